// SPDX-License-Identifier: Apache-2.0

// Package nodeaddrs implements package nodeaddr. A [List] is a list of addresses that
// notifies its readers of changes. A [Watcher] follows the addresses of the machine. Both
// implement nodeaddr.Source, and are safe for concurrent use.
package nodeaddrs

import (
	"net/netip"
	"slices"
	"sync"
)

// List is a list of addresses. The zero value is empty.
type List struct {
	mu      sync.Mutex
	addrs   []netip.Addr
	changed chan struct{} // nil if Addresses was not called since the last change
}

// Of returns a List with the given addresses.
func Of(addrs ...netip.Addr) *List {
	l := &List{}
	l.Set(addrs...)
	return l
}

// Addresses implements nodeaddr.Source.
func (l *List) Addresses() ([]netip.Addr, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.changed == nil {
		l.changed = make(chan struct{})
	}
	return l.addrs, l.changed
}

// Set replaces the addresses and reports whether they changed. It removes zones, converts
// IPv4-mapped IPv6 addresses to IPv4, and ignores invalid addresses.
func (l *List) Set(addrs ...netip.Addr) bool {
	addrs = normalised(addrs)
	l.mu.Lock()
	defer l.mu.Unlock()
	if slices.Equal(addrs, l.addrs) {
		return false
	}
	l.addrs = addrs
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
	return true
}

func normalised(addrs []netip.Addr) []netip.Addr {
	out := make([]netip.Addr, 0, len(addrs))
	for _, a := range addrs {
		if a.IsValid() {
			out = append(out, a.Unmap().WithZone(""))
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}
