// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// inNetNS calls f on a thread that is in the network namespace of the file
// descriptor ns, or in that of the process if it is 0.
func inNetNS(ns int, f func() error) error {
	if ns == 0 {
		return f()
	}
	result := make(chan error)
	go func() {
		// The thread is not unlocked, and so ends with the goroutine.
		runtime.LockOSThread()
		if err := unix.Setns(ns, unix.CLONE_NEWNET); err != nil {
			result <- fmt.Errorf("entering a network namespace: %w", err)
			return
		}
		result <- f()
	}()
	return <-result
}
