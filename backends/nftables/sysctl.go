// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"

	"github.com/kpng-project/kpng/backends/internal/sysctl"
)

// forwarding has the kernel settings that make this node forward packets. Without them,
// traffic from other hosts does not reach pods.
var forwarding = []sysctl.Setting{
	{Name: "net.ipv4.ip_forward", Value: 1, Reason: "traffic from elsewhere reaches pods"},
	{Name: "net.ipv6.conf.all.forwarding", Value: 1, Reason: "traffic from elsewhere reaches pods"},
}

// checkSysctls checks or sets kernel settings, depending on Options.Sysctls.
func (b *Backend) checkSysctls(ctx context.Context) error {
	if b.opts.Sysctls == IgnoreSysctls {
		return nil
	}
	return sysctl.InNetNS(b.opts.NetNS, func() {
		sysctl.Kernel.Apply(ctx, forwarding, b.opts.Sysctls == SetSysctls)
	})
}
