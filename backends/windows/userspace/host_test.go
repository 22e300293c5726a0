// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"net"
	"net/netip"
	"strings"
	"testing"
)

func TestTheHostIsAskedForWhatItHas(t *testing.T) {
	var h host
	loopback, nobodys := netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("198.51.100.1")
	if !h.usable(loopback) {
		t.Errorf("%s cannot be used", loopback)
	}
	if h.usable(nobodys) {
		t.Errorf("%s can be used", nobodys)
	}
	name := interfaceWith(t, loopback)
	for _, test := range []struct {
		name      string
		on        string
		addr      netip.Addr
		wantThere bool
	}{
		{name: "an address with others in its prefix is no host address", on: name, addr: loopback},
		{name: "an address of nobody", on: name, addr: nobodys},
		{name: "no such interface", on: "no such interface", addr: loopback},
	} {
		t.Run(test.name, func(t *testing.T) {
			if there, err := h.has(test.on, test.addr); err != nil || there != test.wantThere {
				t.Errorf("%s on %q: %t, %v", test.addr, test.on, there, err)
			}
		})
	}
}

// interfaceWith returns the name of the interface that has an address.
func interfaceWith(t *testing.T, addr netip.Addr) string {
	t.Helper()
	interfaces, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range interfaces {
		addrs, err := i.Addrs()
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range addrs {
			if strings.HasPrefix(a.String(), addr.String()+"/") {
				return i.Name
			}
		}
	}
	t.Fatalf("no interface has %s", addr)
	return ""
}

func TestAMissingNetshIsAnError(t *testing.T) {
	t.Setenv("SystemRoot", t.TempDir())
	if err := (host{}).netsh(t.Context(), "interface", "ipv4"); err == nil || !strings.Contains(err.Error(), `"interface" "ipv4"`) {
		t.Errorf("it is %v, want an error that says what was to be done", err)
	}
}
