// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/node/nodeaddr"
)

// askFrom makes a connection from an address of ns and returns the name of the pod that
// answers. A packet that is dropped is not sent again within the timeout.
func askFrom(ns *netnstest.Namespace, from, to string, timeout time.Duration) (pod string, err error) {
	err = ns.Do(func() error {
		dialer := net.Dialer{Timeout: timeout, LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		c, err := dialer.Dial("tcp", to)
		if err != nil {
			return err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(patience))
		answer, err := io.ReadAll(c)
		pod, _, _ = strings.Cut(string(answer), " ")
		return err
	})
	return pod, err
}

// TestAnUpdateUnderTraffic loads a table of layout 2, which kpng made in commit 6dd0449. A
// pass in several batches replaces it while clients make one connection after another. No
// connection may fail, clients with session affinity stay at their endpoints, and a client
// outside of the source ranges gets no answer.
func TestAnUpdateUnderTraffic(t *testing.T) {
	w := newPacketWorld(t)
	runNFT(t, w.node, "", "-f", "testdata/layout-2-update.nft")
	var clients []string
	for i := range 6 {
		clients = append(clients, fmt.Sprint("192.0.2.", 10+i), fmt.Sprint("2001:db8::", 10+i))
		w.client.Add(t, "eth0", clients[2*i]+"/24")
		w.client.Add(t, "eth0", clients[2*i+1]+"/64")
	}

	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	var before, after sync.WaitGroup // each client calls Done after a connection before and after the update
	updated := make(chan struct{})
	// repeat calls connect again and again. The first connection may wait until the kernel has
	// found the neighbors.
	repeat := func(connect func(timeout time.Duration) error) {
		before.Add(1)
		after.Add(1)
		running.Go(func() {
			isBefore := true
			defer func() {
				if isBefore {
					before.Done()
				}
				after.Done()
			}()
			timeout := patience
			for isLast := false; !isLast && ctx.Err() == nil; timeout = time.Second {
				select {
				case <-updated:
					isLast = true
				default:
				}
				if err := connect(timeout); err != nil {
					t.Error(err)
					cancel()
				}
				if isBefore {
					isBefore = false
					before.Done()
				}
			}
		})
	}
	for _, c := range []struct {
		ns   *netnstest.Namespace
		from string
		to   []string
	}{
		{w.client, "192.0.2.2", []string{"10.96.0.1:80", "192.0.2.1:30001", "203.0.113.2:80"}},
		{w.client, "2001:db8::2", []string{"[fd00::1]:80", "[2001:db8:1::2]:80"}},
		{w.pod2, "10.0.2.2", []string{"10.96.0.1:80", "10.96.0.2:80"}},
		{w.node, "192.0.2.1", []string{"10.96.0.1:80", "203.0.113.2:80"}},
	} {
		for _, to := range c.to {
			repeat(func(timeout time.Duration) error {
				if _, err := askFrom(c.ns, c.from, to, timeout); err != nil {
					return fmt.Errorf("from %s to %s: %w", c.from, to, err)
				}
				return nil
			})
		}
	}
	for _, from := range clients {
		to := []string{"10.96.0.3:80", "192.0.2.1:30003"}
		if strings.Contains(from, ":") {
			to = []string{"[fd00::3]:80"}
		}
		var kept string
		repeat(func(timeout time.Duration) error {
			for _, to := range to {
				pod, err := askFrom(w.client, from, to, timeout)
				if err == nil && kept != "" && pod != kept {
					err = fmt.Errorf("it reaches %s, and before that it reached %s", pod, kept)
				}
				if err != nil {
					return fmt.Errorf("from %s to %s: %w", from, to, err)
				}
				kept = pod
			}
			return nil
		})
	}
	repeat(func(time.Duration) error {
		if pod, err := askFrom(w.pod2, "10.0.2.2", "203.0.113.2:80", 20*time.Millisecond); err == nil {
			return fmt.Errorf("a client outside of the source ranges reaches %s", pod)
		}
		return nil
	})
	before.Wait()

	pods := []string{"!10.0.1.2", "!10.0.2.2", "!fd01:1::2", "!fd01:2::2"}
	plain := view("plain", []string{"10.96.0.1", "fd00::1"}, pods, func(s *api.Service) { s.Type, s.Ports[0].NodePort = api.NodePort, 30001 })
	restricted := view("restricted", []string{"10.96.0.2", "fd00::2"}, pods, func(s *api.Service) {
		s.Type = api.LoadBalancer
		s.IPs.LoadBalancerIPs = api.NewIPSet(netip.MustParseAddr("203.0.113.2"), netip.MustParseAddr("2001:db8:1::2"))
		s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.LoadBalancerIPs, Prefixes: []netip.Prefix{
			netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/64"),
		}}}
	})
	sticky := view("sticky", []string{"10.96.0.3", "fd00::3"}, pods, func(s *api.Service) {
		affine(s)
		s.Type, s.Ports[0].NodePort = api.NodePort, 30003
	})
	b := startIn(t, w.node, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of(netip.MustParseAddr("192.0.2.1"))}})
	mustSync(t, b, batch(true, false, set(sticky)), batch(false, false, set(plain)), batch(false, false, set(restricted)), batch(false, true))
	if tables := runNFT(t, w.node, "", "list", "tables"); tables != "table inet kpng2\n" {
		t.Errorf("after the pass, the tables are\n%s", tables)
	}
	if err := verifyAll(t, b); err != nil {
		t.Error(err)
	}
	close(updated)
	after.Wait()
}
