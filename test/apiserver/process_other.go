// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package apiserver

import "syscall"

// dieWithParent does nothing here: a killed test process leaves its children behind.
func dieWithParent() *syscall.SysProcAttr { return nil }
