// SPDX-License-Identifier: Apache-2.0

//go:build !windows

package app

import "github.com/spf13/pflag"

func registerService(*pflag.FlagSet, *bool) {}

// The method service returns nil, because only Windows services need special code.
func (h *hosting) service() (*service, error) { return nil, nil }
