// SPDX-License-Identifier: Apache-2.0

//go:build !windows

package command

import (
	"syscall"

	"github.com/spf13/pflag"
)

// errInUse is the error of a listen address that another process uses.
const errInUse = syscall.EADDRINUSE

func registerService(*pflag.FlagSet, *bool) {}

// detectService returns nil, because only Windows services need special code.
func (h *hosting) detectService() (*service, error) { return nil, nil }
