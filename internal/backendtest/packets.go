// SPDX-License-Identifier: Apache-2.0

//go:build linux

package backendtest

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
)

// patience is the timeout of requests that succeed, even on a busy machine.
const patience = time.Minute

// RefusedAtOwnClusterIPs gives the cluster IPs of a service without endpoints to an
// interface of the namespace ns. It checks that connections of the namespace to known and
// unknown ports of these addresses are refused. The function program programs the service.
func RefusedAtOwnClusterIPs(t *testing.T, ns *netnstest.Namespace, node *api.Node, program func(*api.View)) {
	t.Helper()
	ns.Stub(t, "local")
	ips := []string{"10.96.0.53", "fd96::53"}
	ns.Add(t, "local", ips[0]+"/32")
	ns.Add(t, "local", ips[1]+"/128")
	program(View(node, "dns", ips, nil, func(s *api.Service) {
		s.Ports = append(s.Ports, api.PortMapping{Name: "udp", Protocol: api.UDP, Port: 80, TargetPort: 8080})
	}))
	for _, ip := range ips {
		for _, network := range []string{"tcp", "udp"} {
			for _, port := range []string{"80", "81"} {
				if err := request(ns, network, net.JoinHostPort(ip, port)); !errors.Is(err, syscall.ECONNREFUSED) {
					t.Errorf("%s connection of the node to %s port %s: %v, want a refusal", network, ip, port, err)
				}
			}
		}
	}
}

// request connects from ns and, with UDP, waits for an answer.
func request(ns *netnstest.Namespace, network, address string) error {
	return ns.Do(func() error {
		c, err := net.DialTimeout(network, address, patience)
		if err != nil || network == "tcp" {
			return err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(patience))
		// If the kernel rejects a datagram that the node sends, Write fails with EPERM, and the
		// ICMP error arrives nevertheless.
		if _, err := c.Write([]byte("?")); err != nil && !errors.Is(err, syscall.EPERM) {
			return err
		}
		_, err = c.Read(make([]byte, 1))
		return err
	})
}

// CheckConnect checks whether a TCP connection to address is possible. If it should not be
// possible, CheckConnect waits for only a second.
func CheckConnect(t *testing.T, from *netnstest.Namespace, address string, want bool) {
	t.Helper()
	timeout := patience
	if !want {
		timeout = time.Second
	}
	err := from.Do(func() error {
		c, err := net.DialTimeout("tcp", address, timeout)
		if err == nil {
			c.Close()
		}
		return err
	})
	if (err == nil) != want {
		t.Errorf("connect to %s: %v; should be possible: %t", address, err, want)
	}
}

// InvalidPacketPasses sends a TCP packet with a wrong checksum from one namespace to an
// address of another one. It reports whether the packet arrives. Connection tracking calls
// such packets invalid.
func InvalidPacketPasses(t *testing.T, from, to *netnstest.Namespace, address string) bool {
	t.Helper()
	ip := netip.MustParseAddr(address)
	raw := "ip4:tcp"
	if ip.Is6() {
		raw = "ip6:tcp"
	}
	var packets, markers net.PacketConn
	err := to.Do(func() (err error) {
		if packets, err = net.ListenPacket(raw, address); err != nil {
			return err
		}
		markers, err = net.ListenPacket("udp", net.JoinHostPort(address, "9"))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer packets.Close()
	defer markers.Close()
	segment := make([]byte, 20)
	binary.BigEndian.PutUint16(segment[2:], 4711) // the destination port
	segment[12], segment[13], segment[16] = 5<<4, 0x10, 0xff
	err = from.Do(func() error {
		invalid, err := net.Dial(raw, address)
		if err != nil {
			return err
		}
		defer invalid.Close()
		if _, err := invalid.Write(segment); err != nil {
			return err
		}
		marker, err := net.Dial("udp", net.JoinHostPort(address, "9"))
		if err != nil {
			return err
		}
		defer marker.Close()
		_, err = marker.Write([]byte("!"))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	markers.SetDeadline(time.Now().Add(patience))
	if _, _, err := markers.ReadFrom(make([]byte, 1)); err != nil {
		t.Fatalf("read the packet after the invalid one: %v", err)
	}
	packets.SetDeadline(time.Now().Add(time.Second))
	_, _, err = packets.ReadFrom(make([]byte, 100))
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal(err)
	}
	return err == nil
}
