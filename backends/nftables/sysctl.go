// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"fmt"
	"runtime"

	"github.com/kpng-project/kpng/backends/internal/sysctl"
	"golang.org/x/sys/unix"
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
	return inNetNS(b.opts.NetNS, func() {
		sysctl.Kernel.Apply(ctx, forwarding, b.opts.Sysctls == SetSysctls)
	})
}

// inNetNS calls f on a thread in the network namespace with the file descriptor ns. If ns
// is 0, it just calls f.
func inNetNS(ns int, f func()) error {
	if ns == 0 {
		f()
		return nil
	}
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread is never unlocked, so it ends with the goroutine
		err := unix.Setns(ns, unix.CLONE_NEWNET)
		if err == nil {
			f()
		}
		result <- err
	}()
	if err := <-result; err != nil {
		return fmt.Errorf("enter the network namespace: %w", err)
	}
	return nil
}
