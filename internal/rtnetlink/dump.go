// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package rtnetlink has code that reads lists of links, addresses and routes from the
// kernel.
package rtnetlink

import (
	"errors"

	"github.com/vishvananda/netlink"
)

// maxDumps limits how often Dump calls its argument.
const maxDumps = 5

// Dump calls the function list, which lists objects of the kernel. If objects change
// during this call, the result may lack objects or contain objects twice. Then Dump calls
// the function again, at most four times.
func Dump[T any](list func() (T, error)) (all T, err error) {
	for range maxDumps {
		if all, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return all, err
}
