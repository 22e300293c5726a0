// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package main

import "os/exec"

// killAll does nothing. When the context of cmd ends, only cmd is killed, and not its
// child processes.
func killAll(*exec.Cmd) {}
