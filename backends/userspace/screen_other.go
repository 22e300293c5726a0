// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package userspace

import "syscall"

// attach does nothing. Instead, the rules apply after a connection is accepted.
func (s *screen) attach(syscall.RawConn, bool) error { return nil }
