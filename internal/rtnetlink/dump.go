// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package rtnetlink has code for lists of links, addresses and routes in the kernel.
package rtnetlink

import (
	"errors"

	"github.com/vishvananda/netlink"
)

// maxDumps limits how often Dump calls its argument.
const maxDumps = 5

// Dump calls list, which lists objects of the kernel. If objects change during a list,
// objects may be missing or appear twice. Then Dump calls list again, at most four times.
func Dump[T any](list func() (T, error)) (all T, err error) {
	for range maxDumps {
		if all, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return all, err
}
