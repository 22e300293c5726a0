// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package apiserver

import "syscall"

// dieWithParent can do nothing here: a test process that is killed leaves its
// children behind.
func dieWithParent() *syscall.SysProcAttr { return nil }
