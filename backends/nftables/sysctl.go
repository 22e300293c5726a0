// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"

	"github.com/kpng-project/kpng/backends/internal/netns"
	"github.com/kpng-project/kpng/backends/internal/sysctl"
)

// checkSysctls checks or sets kernel settings, depending on Options.Sysctls.
func (b *Backend) checkSysctls(ctx context.Context) error {
	if b.opts.Sysctls == IgnoreSysctls {
		return nil
	}
	return netns.Do(b.opts.NetNS, func() {
		sysctl.Kernel.Apply(ctx, sysctl.Forwarding, b.opts.Sysctls == SetSysctls)
	})
}
