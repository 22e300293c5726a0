// SPDX-License-Identifier: Apache-2.0

package sysctl

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// InNetNS calls f on a thread in the network namespace of the file descriptor ns, or of
// the process if ns is 0.
func InNetNS(ns int, f func()) error {
	if ns == 0 {
		f()
		return nil
	}
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // without an unlock, the thread ends with the goroutine
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
