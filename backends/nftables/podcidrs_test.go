// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/sink"
)

func TestPodCIDRsFollowTheNode(t *testing.T) {
	opts := Options{Options: backends.Options{NodePodCIDRs: true, MasqueradeOutsiders: true}}
	b, ns := start(t, opts)
	check := func(after string, want ...string) {
		t.Helper()
		for _, chain := range []string{"short-circuit", "mark-outsiders"} {
			text := runNFT(t, ns, "", "list", "chain", "inet", "kpng", chain)
			for _, cidr := range []string{"10.1.1.0/24", "10.1.2.0/24", "fd01:1::/64"} {
				if has, should := strings.Contains(text, "saddr "+cidr), strings.Contains(strings.Join(want, " "), cidr); has != should {
					t.Errorf("after %s, chain %[3]s has %[2]s: %[4]t, want %[5]t:\n%[6]s", after, cidr, chain, has, should, text)
				}
			}
		}
	}
	pass := func(cidrs ...string) *sink.Changes {
		c := batchOf(true, set(view("web", []string{"10.96.0.1"}, []string{"10.1.1.2"}, nil)))
		n := *node
		for _, cidr := range cidrs {
			n.PodCIDRs = append(n.PodCIDRs, netip.MustParsePrefix(cidr))
		}
		c.Node = &n
		return c
	}
	mustSync(t, b, pass())
	check("a pass without pod CIDRs")
	change := pass("10.1.1.0/24", "fd01:1::/64")
	change.First, change.Last = false, false
	if err := b.Sync(t.Context(), change); !errors.Is(err, sink.ErrStartOver) {
		t.Fatalf("after a change of pod CIDRs, Sync returns %v, want ErrStartOver", err)
	}
	mustSync(t, b, pass("10.1.1.0/24", "fd01:1::/64"))
	check("the next pass", "10.1.1.0/24", "fd01:1::/64")
	same := pass("10.1.1.0/24", "fd01:1::/64")
	same.First, same.Last = false, false
	mustSync(t, b, same)

	restarted := startIn(t, ns, opts)
	check("a restart", "10.1.1.0/24", "fd01:1::/64")
	mustSync(t, restarted, pass("10.1.2.0/24"))
	check("a pass with another pod CIDR", "10.1.2.0/24")
}

// TestUnallocatedClusterIPsAreDropped checks that packets to cluster IPs without a
// service are dropped, unless another table translates their destination.
func TestUnallocatedClusterIPsAreDropped(t *testing.T) {
	w := newPacketWorld(t)
	serve(t, w.client, "client") // receives packets that are neither translated nor dropped
	for _, addr := range []string{"10.96.0.2/32", "10.97.0.2/32", "fd96::2/128", "fd97::2/128"} {
		w.client.Add(t, "eth0", addr)
	}
	runNFT(t, w.node, `table ip another {
		chain prerouting { type nat hook prerouting priority dstnat + 10; ip daddr 10.96.0.3 tcp dport 8080 dnat to 10.0.2.2:8080; }
	}`, "-f", "-")
	services := func(b *backend) {
		mustSync(t, b, batchOf(true, set(view("one", []string{"10.96.0.1", "fd96::1"}, []string{"10.0.2.2", "fd01:2::2"}, func(s *api.Service) { s.Ports[0].Port = 8080 }))))
	}
	check := func(want map[string]string) {
		t.Helper()
		for addr, want := range want {
			for from, ns := range map[string]*netnstest.Namespace{"a pod": w.pod1, "the node": w.node} {
				if from == "the node" && addr == "10.96.0.3:8080" {
					continue // the other table has no output chain, so it ignores packets of the node
				}
				timeout := patience
				if want == "" {
					timeout = time.Second
				}
				got, _ := ask(ns, addr, timeout)
				if got, _, _ = strings.Cut(got, " "); got != want {
					t.Errorf("%s reaches %q at %s, want %q", from, got, addr, want)
				}
			}
		}
	}
	services(startIn(t, w.node, Options{}))
	check(map[string]string{"10.96.0.2:8080": "client", "[fd96::2]:8080": "client"})
	services(startIn(t, w.node, Options{ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd96::/64")}}))
	check(map[string]string{
		"10.96.0.2:8080": "", "[fd96::2]:8080": "",
		"10.97.0.2:8080": "client", "[fd97::2]:8080": "client",
		"10.96.0.1:8080": "pod2", "[fd96::1]:8080": "pod2", "10.96.0.3:8080": "pod2",
	})
}
