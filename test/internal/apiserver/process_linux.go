// SPDX-License-Identifier: Apache-2.0

package apiserver

import "syscall"

// dieWithParent makes the kernel kill the child process when the thread that started it
// ends, even if the parent process ends by a panic or SIGKILL.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
