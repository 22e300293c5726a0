// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/moby/ipvs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// virtualServers records when expected endpoints reach IPVS, until ctx ends. IPVS sends
// no notifications, so the function reads the virtual server of each expected endpoint
// every millisecond.
func virtualServers(t testing.TB, ctx context.Context) (seen *sightings, expect func(service int, pod netip.Addr)) {
	t.Helper()
	handle, err := ipvs.New("")
	if err != nil {
		t.Fatal(err)
	}
	type endpoint struct {
		service int
		pod     netip.Addr
	}
	seen = newSightings()
	var mu sync.Mutex
	var expected []endpoint
	done := make(chan struct{})
	t.Cleanup(func() { <-done })
	go func() {
		defer close(done)
		defer handle.Close()
		for tick := time.Tick(time.Millisecond); ctx.Err() == nil; <-tick {
			mu.Lock()
			pending := slices.Clone(expected)
			mu.Unlock()
			for _, e := range pending {
				destinations, err := handle.GetDestinations(&ipvs.Service{
					Address: vip(e.service).AsSlice(), AddressFamily: unix.AF_INET, Protocol: unix.IPPROTO_TCP, Port: servicePort,
				})
				now := time.Now()
				if err != nil {
					t.Errorf("read virtual server of service %d: %v", e.service, err)
					return
				}
				if !slices.ContainsFunc(destinations, func(d *ipvs.Destination) bool { return d.Address.String() == e.pod.String() }) {
					continue
				}
				seen.saw(e.pod, now)
				mu.Lock()
				expected = slices.DeleteFunc(expected, func(other endpoint) bool { return other == e })
				mu.Unlock()
			}
		}
	}()
	return seen, func(service int, pod netip.Addr) {
		mu.Lock()
		defer mu.Unlock()
		expected = append(expected, endpoint{service, pod})
	}
}

// flushIPVS deletes all virtual servers, and the interfaces with the addresses of
// services.
func flushIPVS() error {
	if _, err := os.Stat("/proc/net/ip_vs"); err != nil {
		return nil // the kernel has no IPVS
	}
	handle, err := ipvs.New("")
	if err != nil {
		return err
	}
	defer handle.Close()
	if err := handle.Flush(); err != nil {
		return fmt.Errorf("delete virtual servers: %w", err)
	}
	links, err := netlink.LinkList()
	if err != nil {
		return err
	}
	for _, l := range links {
		if l.Type() == "dummy" {
			err = errors.Join(err, netlink.LinkDel(l))
		}
	}
	return err
}
