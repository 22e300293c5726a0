// SPDX-License-Identifier: Apache-2.0

package nodeaddrs

import (
	"net/netip"
	"slices"
)

// addresses is nodeaddr.Source.
type addresses interface {
	Addresses() (addrs []netip.Addr, changed <-chan struct{})
}

// Loopback is a nodeaddr.Source with the loopback addresses of another source.
type Loopback struct{ Of addresses }

// Addresses implements nodeaddr.Source.
func (l Loopback) Addresses() ([]netip.Addr, <-chan struct{}) {
	all, changed := l.Of.Addresses()
	return slices.DeleteFunc(slices.Clone(all), func(a netip.Addr) bool { return !a.IsLoopback() }), changed
}

// Selected reports whether the other source may have loopback addresses. A [Watcher] may
// have them if its selection names them. Another source may have them if it has some now.
func (l Loopback) Selected() bool {
	if w, ok := l.Of.(*Watcher); ok {
		return slices.ContainsFunc(w.selected.cidrs, func(p netip.Prefix) bool { return p.Addr().IsLoopback() })
	}
	addrs, _ := l.Addresses()
	return len(addrs) > 0
}
