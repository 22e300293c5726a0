// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
)

// DefaultAddress is the default address of servers and clients.
const DefaultAddress = "tcp://127.0.0.1:12090"

// Address is the address of a server. Its text form is tcp://host:port, host:port or
// unix:///path.
type Address struct {
	network string // tcp or unix
	name    string // host:port or path
}

// ParseAddress parses an address.
func ParseAddress(s string) (Address, error) {
	if path, ok := strings.CutPrefix(s, "unix://"); ok {
		if !strings.HasPrefix(path, "/") {
			return Address{}, fmt.Errorf("address %q: the path of a unix socket must begin with /, for example unix:///run/kpng/kpng.sock", s)
		}
		if longest, most := longestPath(path), len(syscall.RawSockaddrUnix{}.Path)-1; longest > most {
			return Address{}, fmt.Errorf("address %q: the path of a unix socket is too long by %d bytes", s, longest-most)
		}
		return Address{"unix", path}, nil
	}
	hostPort := strings.TrimPrefix(s, "tcp://")
	_, port, err := net.SplitHostPort(hostPort)
	if err != nil || port == "" || strings.Contains(hostPort, "/") {
		return Address{}, fmt.Errorf("address %q is not tcp://host:port or unix:///path", s)
	}
	return Address{"tcp", hostPort}, nil
}

// String returns the address with its scheme.
func (a Address) String() string { return a.network + "://" + a.name }

// host returns the host of a tcp address, or "" if the address has none.
func (a Address) host() string {
	if a.network != "tcp" {
		return ""
	}
	host, _, _ := net.SplitHostPort(a.name)
	return host
}

// CheckPlaintext returns an error if other machines can reach a listener at this address.
// Such a listener should use TLS.
func CheckPlaintext(a net.Addr) error { return Address{a.Network(), a.String()}.checkPlaintext() }

func (a Address) checkPlaintext() error {
	ip, err := netip.ParseAddr(a.host())
	if a.network == "unix" || a.host() == "localhost" || err == nil && ip.Unmap().IsLoopback() {
		return nil
	}
	return fmt.Errorf("%s is not on loopback and has no TLS: configure certificates, or allow insecure connections", a)
}
