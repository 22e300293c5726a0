// SPDX-License-Identifier: Apache-2.0

package nodeaddrs_test

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/kpng-project/kpng/internal/nodeaddrs"
)

func addrs(list ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func compare(t testing.TB, want, got []netip.Addr) {
	t.Helper()
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("addresses (-want +got):\n%s", diff)
	}
}

func TestListIsSortedWithoutDuplicates(t *testing.T) {
	l := nodeaddrs.Of(addrs("fe80::1%eth0", "10.0.0.2", "::ffff:10.0.0.1", "10.0.0.2")...)
	l.Set(append(addrs("fe80::1%eth0", "10.0.0.2", "::ffff:10.0.0.1", "10.0.0.2"), netip.Addr{})...)
	got, _ := l.Addresses()
	compare(t, addrs("10.0.0.1", "10.0.0.2", "fe80::1"), got)
}

func TestListSignalsOnlyChanges(t *testing.T) {
	var l nodeaddrs.List
	none, changed := l.Addresses()
	compare(t, nil, none)

	if l.Set() {
		t.Error("setting no addresses in an empty list signals a change")
	}
	if isClosed(changed) {
		t.Error("signals a change without one")
	}
	if !l.Set(addrs("10.0.0.1", "10.0.0.2")...) {
		t.Error("setting addresses signals no change")
	}
	if !isClosed(changed) {
		t.Error("signals no change")
	}
	got, changed := l.Addresses()
	compare(t, addrs("10.0.0.1", "10.0.0.2"), got)
	if l.Set(addrs("10.0.0.2", "10.0.0.1")...) || isClosed(changed) {
		t.Error("another order signals a change")
	}
}

func isClosed(changed <-chan struct{}) bool {
	select {
	case <-changed:
		return true
	default:
		return false
	}
}
