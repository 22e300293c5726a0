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

// forwarding are the kernel settings that traffic from elsewhere needs to reach pods.
var forwarding = []sysctl.Setting{
	{Name: "net.ipv4.ip_forward", Value: 1, Reason: "traffic from elsewhere reaches pods"},
	{Name: "net.ipv6.conf.all.forwarding", Value: 1, Reason: "traffic from elsewhere reaches pods"},
}

// checkSysctls checks or sets kernel settings, as Options.Sysctls says.
func (b *Backend) checkSysctls(ctx context.Context) error {
	if b.opts.Sysctls == IgnoreSysctls {
		return nil
	}
	return inNetNS(b.opts.NetNS, func() {
		sysctl.Kernel.Apply(ctx, forwarding, b.opts.Sysctls == SetSysctls)
	})
}

// inNetNS calls f on a thread in the network namespace of the file descriptor ns, or of
// the process if ns is 0.
func inNetNS(ns int, f func()) error {
	if ns == 0 {
		f()
		return nil
	}
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked, so the thread ends with the goroutine
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
