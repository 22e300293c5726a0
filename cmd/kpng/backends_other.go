// SPDX-License-Identifier: Apache-2.0

//go:build !linux && !windows

package main

import "github.com/kpng-project/kpng/app/program"

func platformBackends() []*program.Backend {
	return []*program.Backend{program.Userspace(nil)}
}
