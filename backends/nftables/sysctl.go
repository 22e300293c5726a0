// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"

	"github.com/kpng-project/kpng/backends/internal/sysctl"
)

// forwarding are the kernel settings without which traffic from elsewhere does not reach
// pods.
var forwarding = []sysctl.Setting{
	{Name: "net.ipv4.ip_forward", Value: 1, Reason: "traffic from elsewhere reaches pods"},
	{Name: "net.ipv6.conf.all.forwarding", Value: 1, Reason: "traffic from elsewhere reaches pods"},
}

// checkSysctls does what Options.Sysctls says.
func (b *Backend) checkSysctls(ctx context.Context) error {
	if b.opts.Sysctls == IgnoreSysctls {
		return nil
	}
	return inNetNS(b.opts.NetNS, func() error {
		sysctl.Kernel.Apply(ctx, forwarding, b.opts.Sysctls == SetSysctls)
		return nil
	})
}
