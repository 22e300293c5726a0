// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/node/nodeaddr"
)

// outcome makes a TCP connection and returns the answer, "refused", "lost" or an error. If
// the outcome should be "lost", it waits for only a second.
func outcome(from *netnstest.Namespace, addr, want string) string {
	timeout := patience
	if want == "lost" {
		timeout = time.Second
	}
	got, err := ask(from, addr, timeout)
	var netErr net.Error
	switch {
	case err == nil:
		return got
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	case errors.As(err, &netErr) && netErr.Timeout():
		return "lost"
	default:
		return err.Error()
	}
}

// TestFilteringDoesNotDependOnOtherNATChains adds nat chains of another program before and
// after the chains of the backend, by priority and by age. The other program translates
// packets that the backend filters.
func TestFilteringDoesNotDependOnOtherNATChains(t *testing.T) {
	const rules = `
		ip daddr 203.0.113.5 tcp dport 80 dnat ip to 10.0.1.2:8080
		ip6 daddr 2001:db8:1::5 tcp dport 80 dnat ip6 to [fd01:1::2]:8080
		ip daddr 10.96.0.3 tcp dport 80 dnat ip to 10.0.1.2:8080
		ip daddr 10.96.0.3 tcp dport 81 dnat ip to 10.0.1.2:8080
		ip6 daddr 2001:db8:1::4 tcp dport 80 dnat ip6 to [fd01:1::2]:8080`
	other := func(priority int) string {
		return fmt.Sprintf(`table inet other {
			chain prerouting { type nat hook prerouting priority %d
				%[2]s
			}
			chain output { type nat hook output priority %[1]d
				%[2]s
			}
			chain postrouting { type nat hook postrouting priority %[3]d
				masquerade
			}
		}
		`, priority, rules, priority+200)
	}
	for name, test := range map[string]struct {
		priority int
		older    bool
	}{
		"older":           {-100, true},
		"newer":           {-100, false},
		"lowest priority": {-199, true},
		"high priority":   {1000, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newPacketWorld(t)
			w.client.Add(t, "eth0", "10.96.7.7/32") // answers packets that are not stopped
			w.client.Add(t, "eth0", "fd00::7/128")
			serve(t, w.client, "outside")
			if test.older {
				runNFT(t, w.node, other(test.priority), "-f", "-")
			}
			b := startIn(t, w.node, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of(netip.MustParseAddr("192.0.2.1"))}, ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00::/64")}})
			mustSync(t, b, batchOf(true,
				set(view("none", []string{"10.96.0.3", "fd00::3"}, nil, nil)),
				set(view("away", []string{"10.96.0.4"}, []string{"198.51.100.1", "2001:db8:2::1"}, func(s *api.Service) {
					s.Type, s.ExternalTrafficToLocal = api.NodePort, true
					s.IPs.ExternalIPs = api.NewIPSet(netip.MustParseAddr("2001:db8:1::4"))
				})),
				set(view("filtered", []string{"10.96.0.5", "fd00::5"}, []string{"!10.0.2.2", "!fd01:2::2"}, func(s *api.Service) {
					s.Type = api.LoadBalancer
					s.IPs.LoadBalancerIPs = api.NewIPSet(netip.MustParseAddr("203.0.113.5"), netip.MustParseAddr("2001:db8:1::5"))
					s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.LoadBalancerIPs, Prefixes: []netip.Prefix{
						netip.MustParsePrefix("192.0.2.2/32"), netip.MustParsePrefix("2001:db8::2/128"),
					}}}
				}))))
			if !test.older {
				runNFT(t, w.node, other(test.priority), "-f", "-")
			}
			for _, c := range []struct {
				about    string
				from     *netnstest.Namespace
				to, want string
			}{
				{"source ranges", w.pod2, "203.0.113.5:80", "lost"},
				{"source ranges", w.pod2, "[2001:db8:1::5]:80", "lost"},
				{"source ranges", w.node, "203.0.113.5:80", "lost"},
				{"service CIDR", w.pod2, "10.96.7.7:8080", "lost"},
				{"service CIDR", w.node, "10.96.7.7:8080", "lost"},
				{"service CIDR", w.pod2, "[fd00::7]:8080", "lost"},
				{"no endpoint, but the other program translates", w.pod2, "10.96.0.3:80", "pod1"},
				{"no endpoint, but the other program translates", w.node, "10.96.0.3:80", "pod1"},
				{"unknown port, but the other program translates", w.pod2, "10.96.0.3:81", "pod1"},
				{"no local endpoint, but the other program translates", w.client, "[2001:db8:1::4]:80", "pod1"},
				{"no endpoint", w.pod2, "[fd00::3]:80", "refused"},
				{"unknown port", w.node, "[fd00::3]:81", "refused"},
			} {
				got, _, _ := strings.Cut(outcome(c.from, c.to, c.want), " ")
				if got != c.want {
					t.Errorf("%s: %s answers %q, want %q", c.about, c.to, got, c.want)
				}
			}
			if got, _, _ := strings.Cut(outcome(w.client, "203.0.113.5:80", "pod"), " "); !strings.HasPrefix(got, "pod") {
				t.Errorf("an admitted client gets %q", got)
			}
		})
	}
}

// TestInstancesKeepTheRefusalsOfOtherInstances checks that an instance refuses connections
// although the chains of another instance see the packets afterwards. Of two instances
// with the same priority, the newer instance sees the packets first.
func TestInstancesKeepTheRefusalsOfOtherInstances(t *testing.T) {
	w := newPacketWorld(t)
	addresses := nodeaddr.Of(netip.MustParseAddr("192.0.2.1"))
	serve(t, w.node, "node")
	for _, test := range []struct{ instance, none, away string }{
		{"older", "203.0.113.5", "203.0.113.6"},
		{"newer", "203.0.113.7", "203.0.113.8"},
	} {
		w.node.Add(t, "lo", test.none+"/32") // without rules, the node answers
		w.node.Add(t, "lo", test.away+"/32")
		mustSync(t, startIn(t, w.node, Options{Options: backends.Options{Instance: test.instance, NodeAddresses: addresses}}), batchOf(true,
			set(view("none", []string{"10.96.0.3"}, nil, func(s *api.Service) {
				s.IPs.ExternalIPs = api.NewIPSet(netip.MustParseAddr(test.none))
				s.Ports[0].Port = 8080
			})),
			set(view("away", []string{"10.96.0.4"}, []string{"198.51.100.1"}, func(s *api.Service) {
				s.Type, s.ExternalTrafficToLocal = api.NodePort, true
				s.IPs.ExternalIPs = api.NewIPSet(netip.MustParseAddr(test.away))
				s.Ports[0].Port = 8080
			}))))
	}
	for to, want := range map[string]string{
		"203.0.113.5:8080": "refused", "203.0.113.7:8080": "refused",
		"203.0.113.6:8080": "lost", "203.0.113.8:8080": "lost",
	} {
		if got := outcome(w.client, to, want); got != want {
			t.Errorf("a client of %s gets %q, want %q", to, got, want)
		}
	}
}

// TestRefusedPacketsThatOthersTranslateLoseThePriority checks packets that another
// program has translated. They must leave without the priority that means a refusal.
func TestRefusedPacketsThatOthersTranslateLoseThePriority(t *testing.T) {
	w := newPacketWorld(t)
	mustSync(t, startIn(t, w.node, Options{}), batchOf(true, set(view("none", []string{"10.96.0.3"}, nil, nil))))
	runNFT(t, w.node, fmt.Sprintf(`table inet other {
		chain output { type nat hook output priority 1000
			ip daddr 10.96.0.3 tcp dport 80 dnat ip to 10.0.1.2:8080
		}
		chain leave { type filter hook postrouting priority 300
			meta priority { %#x, %#x } drop
		}
	}
	`, nft.DropLater, nft.RejectLater), "-f", "-")
	if got := outcome(w.node, "10.96.0.3:80", "pod1"); !strings.HasPrefix(got, "pod1") {
		t.Errorf("the node gets %q, want an answer of pod1", got)
	}
}

// TestTheNodeIsRefusedAtItsOwnClusterIPs checks cluster IPs that are also addresses of the
// node, as with a node-local DNS cache. The source of the node's connections is then the
// cluster IP, too.
func TestTheNodeIsRefusedAtItsOwnClusterIPs(t *testing.T) {
	w := newPacketWorld(t)
	b := startIn(t, w.node, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of(netip.MustParseAddr("192.0.2.1"))}})
	backendtest.RefusedAtOwnClusterIPs(t, w.node, node, func(v *api.View) { mustSync(t, b, batchOf(true, set(v))) })
}

// TestInvalidPacketsAreDropped checks that the option DropInvalid applies to forwarded
// packets that belong to no connection.
func TestInvalidPacketsAreDropped(t *testing.T) {
	for _, drop := range []bool{false, true} {
		w := newPacketWorld(t)
		mustSync(t, startIn(t, w.node, Options{DropInvalid: drop}), batchOf(true))
		if passed := backendtest.InvalidPacketPasses(t, w.pod1, w.pod2, "10.0.2.2"); passed == drop {
			t.Errorf("with DropInvalid %t, an invalid packet passes: %t", drop, passed)
		}
		if passed := backendtest.InvalidPacketPasses(t, w.pod1, w.pod2, "fd01:2::2"); passed == drop {
			t.Errorf("with DropInvalid %t, an invalid IPv6 packet passes: %t", drop, passed)
		}
	}
}
