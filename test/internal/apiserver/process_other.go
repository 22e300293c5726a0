// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package apiserver

import "syscall"

// dieWithParent does nothing here, so the child processes of a killed test keep running.
func dieWithParent() *syscall.SysProcAttr { return nil }
