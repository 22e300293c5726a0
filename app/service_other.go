// SPDX-License-Identifier: Apache-2.0

//go:build !windows

package app

import "github.com/spf13/pflag"

func registerService(*pflag.FlagSet, *bool) {}

// service returns how to run under a service manager: elsewhere than on Windows
// these want nothing but signals and standard error.
func (h *hosting) service() (*service, error) { return nil, nil }
