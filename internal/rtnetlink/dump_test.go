// SPDX-License-Identifier: Apache-2.0

//go:build linux

package rtnetlink

import (
	"errors"
	"testing"

	"github.com/vishvananda/netlink"
)

func TestInterruptedDumpsAreRepeated(t *testing.T) {
	other := errors.New("other")
	for _, c := range []struct {
		name        string
		interrupted int // the first lists
		then        error
		calls       int
		want        error
	}{
		{"not interrupted", 0, nil, 1, nil},
		{"interrupted twice", 2, nil, 3, nil},
		{"always interrupted", 100, nil, maxDumps, netlink.ErrDumpInterrupted},
		{"another error", 1, other, 2, other},
	} {
		calls := 0
		got, err := Dump(func() (int, error) {
			if calls++; calls <= c.interrupted {
				return calls, netlink.ErrDumpInterrupted
			}
			return calls, c.then
		})
		if got != c.calls || calls != c.calls || !errors.Is(err, c.want) {
			t.Errorf("%s: result %d, %v after %d calls; want %d, %v", c.name, got, err, calls, c.calls, c.want)
		}
	}
}
