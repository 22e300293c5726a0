// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package program

import (
	"context"

	"github.com/kpng-project/kpng/internal/command"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
)

// leftovers finds nothing on this platform.
type leftovers struct{ count prometheus.Collector }

func newLeftovers(string) *leftovers { return nil }

func (*leftovers) register(*pflag.FlagSet)                 {}
func (*leftovers) setProgrammed()                          {}
func (*leftovers) problems() []string                      { return nil }
func (*leftovers) follow(context.Context) func()           { return func() {} }
func (*leftovers) check(context.Context) []command.Finding { return nil }
