// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package userspace

import (
	"net/netip"
	"syscall"
)

// attach does nothing. Instead, the rules apply after a connection is accepted.
func (s *screen) attach(syscall.RawConn, bool, []netip.Prefix, int) (int, error) { return 0, nil }
