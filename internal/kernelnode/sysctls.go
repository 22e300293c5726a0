// SPDX-License-Identifier: Apache-2.0

//go:build linux

package kernelnode

import (
	"context"
	"slices"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/netns"
	"github.com/kpng-project/kpng/internal/sysctl"
)

// ApplySysctls checks or sets the kernel settings that make this node forward packets,
// and the settings in the argument more. The field o.Sysctls says whether it checks or
// sets them.
func ApplySysctls(ctx context.Context, o *backends.Options, more ...sysctl.Setting) error {
	if o.Sysctls == backends.IgnoreSysctls {
		return nil
	}
	return netns.Do(o.NetNS, func() {
		sysctl.Kernel.Apply(ctx, slices.Concat(sysctl.Forwarding, more), o.Sysctls == backends.SetSysctls)
	})
}
