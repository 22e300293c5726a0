// SPDX-License-Identifier: Apache-2.0

//go:build !windows

package app

import "github.com/spf13/pflag"

func registerService(*pflag.FlagSet, *bool) {}

// service returns nil. Outside Windows, a service manager needs only signals and standard
// error.
func (h *hosting) service() (*service, error) { return nil, nil }
