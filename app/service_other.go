// SPDX-License-Identifier: Apache-2.0

//go:build !windows

package app

import "github.com/spf13/pflag"

func registerService(*pflag.FlagSet, *bool) {}

// detectService returns nil, because only Windows services need special code.
func (h *hosting) detectService() (*service, error) { return nil, nil }
