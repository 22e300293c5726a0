// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package userspace

import "syscall"

// attach does nothing: who accepts decides.
func (s *screen) attach(syscall.RawConn, bool) error { return nil }
