// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"golang.org/x/sys/unix"
)

// targets returns an endpoint for each weight.
func targets(weights ...int32) []nodeview.Target {
	all := make([]nodeview.Target, len(weights))
	for i, w := range weights {
		all[i] = nodeview.Target{Endpoint: &api.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), Weight: w}, Port: 8080}
	}
	return all
}

// For each slot, the share of an endpoint may differ from the right share by at most
// 1/65536 of a slot.
func TestSlotsHaveTheShares(t *testing.T) {
	many := make([]int32, 1000)
	for i := range many {
		many[i] = 1 + rand.Int32N(65535)
	}
	for _, weights := range [][]int32{{1, 2, 7}, {1, 65535}, {0, 50}, {65535, 1, 1, 1, 1, 1, 1, 1}, {3, 3, 3, 4}, many} {
		s := slotsOf(targets(weights...))
		if len(s.endpoints) != len(weights) || len(s.others) != len(weights) {
			t.Fatalf("weights %v: %d slots and %d other endpoints", weights, len(s.endpoints), len(s.others))
		}
		shares, total := map[string]float64{}, 0.0
		for i, a := range s.endpoints {
			p := float64(a.Other) / (1 << 16)
			shares[a.String()] += 1 - p
			shares[s.others[i].String()] += p
		}
		for _, w := range weights {
			total += float64(weightOf(w))
		}
		for i, target := range targets(weights...) {
			want := float64(weightOf(weights[i])) / total * float64(len(weights))
			got := shares[toAddress(target.Addr, target.Port).String()]
			if got == 0 || math.Abs(got-want) > float64(len(weights))/(1<<16) {
				t.Errorf("endpoint %d of %d with weight %d has %.6f slots, want %.6f", i, len(weights), weights[i], got, want)
			}
		}
	}
}

func weightOf(w int32) int32 {
	if w == 0 {
		return api.DefaultWeight
	}
	return w
}

func TestEqualWeightsNeedNoOtherEndpoints(t *testing.T) {
	for _, weights := range [][]int32{nil, {5}, {0, 100}, {7, 7, 7}} {
		if s := slotsOf(targets(weights...)); s.others != nil || len(s.endpoints) != len(weights) {
			t.Errorf("weights %v: %+v", weights, s)
		}
	}
}

// testWeights sends datagrams from new sockets to endpoints of different weights. With this
// number of datagrams, 3 % of the smallest share is more than four standard deviations.
func testWeights(t *testing.T) {
	n := newNode(t, Options{})
	const datagrams = 200_000
	weights := []int32{1, 2, 7}
	weighted := service(1, 1, 2, 3)
	var servers [3]int
	for i := range servers {
		addr := fmt.Sprint("10.0.1.", i+1)
		n.ns.Add(t, "lo", addr)
		weighted.Endpoints[i].Weight = weights[i]
		fd, err := n.open(unix.SOCK_DGRAM|unix.SOCK_NONBLOCK, sockaddr(addr+":8080"))
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		servers[i] = fd
	}
	n.pass(weighted)
	var got [3]int
	to, buffer := sockaddr(serviceAddr(1)), make([]byte, 1)
	err := n.ns.Do(func() error {
		for i := range datagrams {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			err = unix.Sendto(fd, buffer, 0, to)
			unix.Close(fd)
			if err != nil {
				return err
			}
			if i%50 != 49 {
				continue
			}
			for i, server := range servers {
				for _, err := unix.Read(server, buffer); err == nil; _, err = unix.Read(server, buffer) {
					got[i]++
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d datagrams with weights %v: %v", datagrams, weights, got)
	if got[0]+got[1]+got[2] != datagrams {
		t.Errorf("only %v of %d datagrams arrived", got, datagrams)
	}
	for i, w := range weights {
		if want := float64(datagrams) * float64(w) / 10; math.Abs(float64(got[i])-want) > 0.03*want {
			t.Errorf("the endpoint with weight %d got %d datagrams, want %.0f", w, got[i], want)
		}
	}
	lines, err := n.Inspect(t.Context(), netip.MustParseAddr("10.96.0.1"), api.TCP, 80, weighted)
	if err != nil {
		t.Fatal(err)
	}
	want := "  slot 0: 10.0.1.1:8080, or 10.0.1.3:8080 for 70.00 %\n  slot 1: 10.0.1.2:8080, or 10.0.1.3:8080 for 40.00 %\n  slot 2: 10.0.1.3:8080\n"
	if got := lines[len(lines)-min(len(want), len(lines)):]; got != want {
		t.Errorf("Inspect returns %q, want the end %q", lines, want)
	}
	// A new process must keep the lists.
	before := count(t, n.dataplane.slots)
	n.restart()
	n.pass(weighted)
	if after := count(t, n.dataplane.slots); before != 6 || after != 6 || n.dataplane.used.endpoints != 6 {
		t.Errorf("%d slots before a restart, %d after, %d recorded; want 6", before, after, n.dataplane.used.endpoints)
	}
	n.pass(service(1, 1, 2, 3))
	if after := count(t, n.dataplane.slots); after != 3 {
		t.Errorf("%d slots with equal weights, want 3", after)
	}
}

// open opens an IPv4 socket of the node that is bound to an address.
func (n *node) open(kind int, at unix.Sockaddr) (fd int, err error) {
	err = n.ns.Do(func() error {
		if fd, err = unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		return unix.Bind(fd, at)
	})
	return fd, err
}
