// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"os/exec"
	"syscall"

	"golang.org/x/sys/windows"
)

// withoutWindow lets a service run a console program, for which Windows would
// open a console otherwise.
func withoutWindow(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{HideWindow: true, CreationFlags: windows.CREATE_NO_WINDOW}
}
