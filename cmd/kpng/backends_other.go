// SPDX-License-Identifier: Apache-2.0

//go:build !linux && !windows

package main

import (
	"github.com/kpng-project/kpng/app/program"
	"github.com/kpng-project/kpng/internal/command"
)

func platformBackends() []*command.Backend { return descriptions(program.Userspace()) }
