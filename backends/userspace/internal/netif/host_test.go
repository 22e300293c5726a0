// SPDX-License-Identifier: Apache-2.0

package netif

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
)

func TestAddressesOfHost(t *testing.T) {
	var h host
	loopback, unassigned := netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("198.51.100.1")
	if !h.usable(loopback) {
		t.Errorf("%s is not usable", loopback)
	}
	if h.usable(unassigned) {
		t.Errorf("%s is usable", unassigned)
	}
	name := interfaceWith(t, loopback)
	for _, test := range []struct {
		name string
		on   string
		addr netip.Addr
	}{
		{name: "an address with a shorter prefix is not a host address", on: name, addr: loopback},
		{name: "an address of no interface", on: name, addr: unassigned},
	} {
		t.Run(test.name, func(t *testing.T) {
			has, err := h.addresses(test.on)
			if err != nil || has[test.addr] {
				t.Errorf("%s on %q: %t, %v", test.addr, test.on, has[test.addr], err)
			}
		})
	}
}

func TestMissingInterfaceErrorListsExistingOnes(t *testing.T) {
	there := interfaceWith(t, netip.MustParseAddr("127.0.0.1"))
	_, err := host{}.addresses("Ethernet 99")
	if !errors.Is(err, errNoInterface) || !strings.Contains(err.Error(), `"Ethernet 99"`) || !strings.Contains(err.Error(), there) {
		t.Errorf("error %v, want one with the name and %q", err, there)
	}
	if err := newHost().add(t.Context(), "Ethernet 99", ip4); !errors.Is(err, errNoInterface) {
		t.Errorf("Add returned %v", err)
	}
}

// interfaceWith returns the name of the interface that has this address.
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
	t.Fatalf("no interface has the address %s", addr)
	return ""
}

func TestMissingNetshIsAnError(t *testing.T) {
	t.Setenv("SystemRoot", t.TempDir())
	if err := netsh(t.Context(), "interface", "ipv4"); err == nil || !strings.Contains(err.Error(), `"interface" "ipv4"`) {
		t.Errorf("error %v, want one with the failed command", err)
	}
}
