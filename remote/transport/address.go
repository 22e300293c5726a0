// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
)

// DefaultAddress is where a server listens and a client looks for it if nothing
// else is said.
const DefaultAddress = "tcp://127.0.0.1:12090"

// Address is where a server listens: tcp://host:port or unix:///path. In front of
// a host, tcp:// may be left out.
type Address struct {
	network string // tcp or unix
	name    string // host:port or path
}

// ParseAddress reads an address.
func ParseAddress(s string) (Address, error) {
	if path, ok := strings.CutPrefix(s, "unix://"); ok {
		if !strings.HasPrefix(path, "/") {
			return Address{}, fmt.Errorf("address %q: the path of a unix socket begins with /, as in unix:///run/kpng/kpng.sock", s)
		}
		if longest, most := longestPath(path), len(syscall.RawSockaddrUnix{}.Path)-1; longest > most {
			return Address{}, fmt.Errorf("address %q: the path of a unix socket is too long by %d bytes", s, longest-most)
		}
		return Address{"unix", path}, nil
	}
	hostPort := strings.TrimPrefix(s, "tcp://")
	_, port, err := net.SplitHostPort(hostPort)
	if err != nil || port == "" || strings.Contains(hostPort, "/") {
		return Address{}, fmt.Errorf("address %q is neither tcp://host:port nor unix:///path", s)
	}
	return Address{"tcp", hostPort}, nil
}

// String returns the address with its scheme.
func (a Address) String() string { return a.network + "://" + a.name }

// host returns the host of a tcp address, empty for all or none.
func (a Address) host() string {
	if a.network != "tcp" {
		return ""
	}
	host, _, _ := net.SplitHostPort(a.name)
	return host
}

// CheckPlaintext returns an error if the address of a listener, without TLS, is seen by others
// than this machine.
func CheckPlaintext(a net.Addr) error { return Address{a.Network(), a.String()}.checkPlaintext() }

func (a Address) checkPlaintext() error {
	ip, err := netip.ParseAddr(a.host())
	if a.network == "unix" || a.host() == "localhost" || err == nil && ip.Unmap().IsLoopback() {
		return nil
	}
	return fmt.Errorf("%s would be reached without TLS and is not on loopback: give certificates, or say that this is to be insecure", a)
}
