// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
)

// clientsOf returns the groups of clients in the table, by list.
func clientsOf(t testing.TB, b *backend) map[uint32]map[uint32]bool {
	t.Helper()
	clients := map[uint32]map[uint32]bool{}
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.table.conn.dumpClients(t.Context(), api.IPv4, func(c client) {
		if clients[c.list] == nil {
			clients[c.list] = map[uint32]bool{}
		}
		clients[c.list][c.group] = true
	}); err != nil {
		t.Fatal(err)
	}
	return clients
}

// sendSYNs sends n segments that open a TCP connection to an address, each with another
// source in 198.18.0.0/15.
func sendSYNs(t testing.TB, ns *netnstest.Namespace, to netip.Addr, n int) {
	t.Helper()
	if err := ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		for i := range n {
			packet := make([]byte, 40)
			packet[0], packet[8], packet[9] = 0x45, 64, unix.IPPROTO_TCP
			source := spoofed(i).As4()
			copy(packet[12:], source[:])
			copy(packet[16:], to.AsSlice())
			binary.BigEndian.PutUint16(packet[20:], 4321)
			binary.BigEndian.PutUint16(packet[22:], 80)
			packet[32], packet[33] = 5<<4, 2
			sum := uint32(unix.IPPROTO_TCP + 20)
			for at := 12; at < 40; at += 2 {
				sum += uint32(binary.BigEndian.Uint16(packet[at:]))
			}
			for sum>>16 != 0 {
				sum = sum>>16 + sum&0xffff
			}
			binary.BigEndian.PutUint16(packet[36:], ^uint16(sum))
			if err := unix.Sendto(fd, packet, 0, &unix.SockaddrInet4{Addr: to.As4()}); err != nil {
				return fmt.Errorf("packet %d: %w", i, err)
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

func spoofed(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{198, 18 + byte(i>>16), byte(i >> 8), byte(i)})
}

// TestClientsEndWithTheirService sends many clients to a service with session affinity,
// and then deletes the service. The clients take only groups of the service, and Verify
// deletes them. The client of another service stays.
func TestClientsEndWithTheirService(t *testing.T) {
	const n = 3_000
	w := newPacketWorld(t)
	b := startIn(t, w.node, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}})
	flooded := view("flooded", []string{"10.96.0.1"}, webEndpoints, affine)
	other := view("other", []string{"10.96.0.2"}, webEndpoints, affine)
	mustSync(t, b, batchOf(true, set(flooded), set(other)))
	if _, err := ask(w.client, "10.96.0.2:80", patience); err != nil {
		t.Fatal(err)
	}
	sendSYNs(t, w.client, netip.MustParseAddr("10.96.0.1"), n)
	numberOf := func(v *api.View) uint32 { return b.table.services[v.Key()][0].number }
	before := clientsOf(t, b)
	want := map[uint32]bool{}
	for i := range n {
		want[clientGroup(spoofed(i), b.table.clientSeed)] = true
	}
	got := before[numberOf(flooded)]
	missing := 0
	for group := range want {
		if !got[group] {
			missing++
		}
	}
	if len(got) > len(want) || missing > n/100 || len(before[numberOf(other)]) != 1 { // the kernel may lose packets
		t.Errorf("the flooded service has %d groups of clients, want %d, of which %d are missing; the other service has %d",
			len(got), len(want), missing, len(before[numberOf(other)]))
	}

	mustSync(t, b, batchOf(false, sink.Change{Old: flooded, Key: flooded.Key()}))
	if err := b.Verify(t.Context()); err != nil {
		t.Fatal(err)
	}
	after := clientsOf(t, b)
	if len(after) != 1 || len(after[numberOf(other)]) != 1 {
		t.Errorf("after the deletion, %d lists have clients, and the other service has %d", len(after), len(after[numberOf(other)]))
	}
	if err := verifyAll(t, b); err != nil {
		t.Error(err)
	}
}

// TestStaleClientsOfAnotherProcessAreDeleted restarts the backend without a service that had
// clients.
func TestStaleClientsOfAnotherProcessAreDeleted(t *testing.T) {
	b, ns := start(t, Options{})
	mustSync(t, b, batchOf(true, set(view("web", []string{"10.96.0.1"}, webEndpoints, affine))))
	runNFT(t, ns, "add element inet kpng clients4 { 5000:1000 . 7 timeout 1h : 5000:1001, 5000:1000 . 8 timeout 1h : 5000:1002, 5000:9000 . 8 timeout 1h : 5000:9001 }\n", "-f", "-")
	b = startIn(t, ns, Options{})
	mustSync(t, b, batchOf(true))
	if err := verifyAll(t, b); err != nil {
		t.Fatal(err)
	}
	if left := clientsOf(t, b); len(left) > 0 {
		t.Errorf("clients are left: %v", left)
	}
}
