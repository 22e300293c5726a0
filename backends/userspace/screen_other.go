// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package userspace

import "syscall"

// attach does nothing: accept applies the rules.
func (s *screen) attach(syscall.RawConn, bool) error { return nil }
