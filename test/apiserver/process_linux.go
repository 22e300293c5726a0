// SPDX-License-Identifier: Apache-2.0

package apiserver

import "syscall"

// dieWithParent has the kernel kill the process when the thread that started it
// ends, be it by a panic or by SIGKILL.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
