// SPDX-License-Identifier: Apache-2.0

//go:build !windows

package userspace

import "os/exec"

func withoutWindow(*exec.Cmd) {}
