// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package netns runs functions in a network namespace.
package netns

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// Do calls f on a thread in the network namespace with the file descriptor ns. If ns is
// 0, Do just calls f. Programs that f starts also run in the namespace.
func Do(ns int, f func()) error {
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
