// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/nodeaddrs"
	"github.com/kpng-project/kpng/sink"
)

// everything returns a list of services. Together, they need every kind of rule.
func everything() []*api.View {
	return []*api.View{
		view("affinity", "10.96.0.3 fd00:96::3", "10.1.0.1 10.1.0.2 !10.2.0.1 fd00::1 fd00::2", affinity),
		view("allports", "10.96.0.6 fd00:96::6", "10.1.0.1 10.1.0.2 !10.2.0.1 fd00::1", allPorts),
		view("none", "10.96.0.2 fd00:96::2", ""),
		view("port", "10.96.0.4 fd00:96::4", "10.1.0.1 fd00::1", nodePort, externalLocal),
		view("ranges", "10.96.0.5 fd00:96::5", "", loadBalancer, sourceRanges, func(s *api.Service) { s.Ports[0].NodePort = 30090 }),
		view("web", "10.96.0.1 fd00:96::1", "10.1.0.1 10.1.0.2 !10.2.0.1 fd00::1 fd00::2 !fd00:2::1"),
	}
}

// wideServices returns services with many ports and endpoints. Together with the services
// of everything(), they need every kind of rule of large services.
func wideServices() []*api.View {
	return []*api.View{
		view("wide", "10.96.0.7 fd00:96::7", wideEndpoints(), affinity),
		view("wide-ranges", "", wideEndpoints(), loadBalancer, sourceRanges, widePorts),
	}
}

// wideEndpoints returns the endpoints of two large lists.
func wideEndpoints() (list string) {
	for i := range largeList {
		list += fmt.Sprintf("!10.3.0.%d fd00:3::%x ", i+1, i+1)
	}
	return list
}

// widePorts gives a service many ports, among them the target port.
func widePorts(s *api.Service) {
	s.Ports = nil
	for i := range 20 {
		p := api.PortMapping{Name: fmt.Sprint("p", i), Protocol: api.TCP, Port: int32(8071 + i), TargetPort: 8080}
		if s.Type == api.LoadBalancer {
			p.NodePort = int32(30070 + i)
		}
		s.Ports = append(s.Ports, p)
	}
	s.Ports[0].Port, s.Ports[1].Port = 1, 65535
}

func insideAndOut(o *options) {
	o.MasqueradeOutsiders, o.PodInterfaces = true, []string{"veth*", "cni0"}
	o.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")}
}

// addForeignRules adds rules, chains and sets of another program.
func addForeignRules(t *testing.T, ns *netnstest.Namespace, flavour flavour) {
	for _, family := range families {
		ns.RunWith(t, `*nat
:KUBE-SERVICES - [0:0]
:OTHERS - [0:0]
-A PREROUTING -m comment --comment "a \"quoted\" name" -j KUBE-SERVICES
-A OUTPUT -j OTHERS
-A OTHERS -p tcp -m tcp --dport 22 -j RETURN
COMMIT
*mangle
-A POSTROUTING -p udp -m udp --dport 7 -j ACCEPT
COMMIT
*filter
:KPNG-other-SERVICES - [0:0]
-A FORWARD -p tcp -m tcp --dport 23 -j REJECT
-A INPUT -j KPNG-other-SERVICES
COMMIT
`, programName(flavour, family, "restore"))
	}
	ns.Run(t, "ipset", "create", "KPNG-other-NODE4", "hash:ip")
	ns.Run(t, "ipset", "add", "KPNG-other-NODE4", "192.0.2.9")
}

// withoutOwn removes the lines that concern this instance from the output of saveAll.
func withoutOwn(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		if !strings.Contains(strings.ReplaceAll(line, "KPNG-other-", ""), "KPNG-") {
			b.WriteString(line)
		}
	}
	return b.String()
}

func TestForeignRulesStay(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		addForeignRules(t, ns, v.flavour)
		before := saveAll(t, ns, v.flavour)
		b := start(t, ns, v, insideAndOut)
		mustSync(t, b, pass(append(everything(), wideServices()...)...), batch(view("web", "10.96.0.1", "10.1.0.9")))
		if diff := cmp.Diff(before, withoutOwn(saveAll(t, ns, v.flavour))); diff != "" {
			t.Errorf("foreign rules changed (-before +after):\n%s", diff)
		}
		if err := b.Cleanup(t.Context()); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(before, saveAll(t, ns, v.flavour)); diff != "" {
			t.Errorf("the node changed (-before +after cleanup):\n%s", diff)
		}
	})
}

func TestOneJumpPerBaseChain(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		b := start(t, ns, v)
		mustSync(t, b, pass(everything()...))
		ns.Run(t, programName(v.flavour, api.IPv4, ""), "-t", "nat", "-A", "OUTPUT", "-j", "KPNG-SERVICES")
		mustSync(t, b, pass(everything()...))
		for _, family := range families {
			for id, rule := range b.rulesets[0].jumps() {
				line := "-A " + id.name + " " + rule + "\n"
				if n := strings.Count(ns.Run(t, programName(v.flavour, family, "save"), "-t", id.table), line); n != 1 {
					t.Errorf("%s: %d rules %q in table %s, want 1", family, n, line, id.table)
				}
			}
		}
	})
}

// Verify compares the text of rules. Therefore iptables-save must print each kind of rule
// as this package writes it.
func TestRulesAreSavedAsWritten(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		b := start(t, ns, v, insideAndOut)
		mustSync(t, b, pass(append(everything(), wideServices()...)...))
		forget(b)
		if err := verify(t, b); err != nil {
			t.Fatal(err)
		}
		for _, r := range b.rulesets {
			if len(r.inexact) > 0 {
				t.Errorf("%s: iptables-save prints rules in another form: %v", r.family, r.inexact)
			}
		}
	})
}

func TestRestartWritesNothing(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		mustSync(t, start(t, ns, v, insideAndOut), pass(append(everything(), wideServices()...)...))
		var written int
		b := start(t, ns, v, insideAndOut, func(o *options) {
			o.Observer = &backendtest.Observer{OnWrote: func(lines int, _ error) { written += lines }}
		})
		mustSync(t, b, pass(append(everything(), wideServices()...)...))
		if written != 0 {
			t.Errorf("a restart wrote %d lines, want 0", written)
		}
	})
}

func TestDriftIsRepaired(t *testing.T) {
	t.Parallel() // runs beside TestLockHeldForHalfAMinute
	for what, command := range map[string]string{
		"flush by hand":                     "iptables -t nat -F",
		"flush of filter by hand":           "ip6tables -F",
		"flush of the chain of one service": "iptables -t nat -F LIST",
		"edited rule":                       "iptables -t nat -R LIST 1 -p tcp -j DNAT --to-destination 10.9.9.9:99",
		"added rule":                        "ip6tables -t nat -A KPNG-MARK -j RETURN",
		"added chain":                       "iptables -N KPNG-EXTRA",
		"deleted jump":                      "iptables -t nat -D PREROUTING -j KPNG-SERVICES",
		"flush of a set":                    "ipset flush KPNG-CLUSTERIPS4",
		"added element":                     "ipset add KPNG-DROP6 fd00::7,tcp:80",
	} {
		t.Run(what, func(t *testing.T) {
			eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
				if v.withoutIPSet && strings.HasPrefix(command, "ipset") {
					return
				}
				b := start(t, ns, v)
				mustSync(t, b, pass(everything()...))
				if err := verify(t, b); err != nil {
					t.Fatal(err)
				}
				before := saveAll(t, ns, v.flavour)
				list := b.rulesets[0].entry(t, "10.96.0.1/32 -p tcp")
				args := strings.Fields(strings.ReplaceAll(command, "LIST", list))
				args[0] = strings.Replace(args[0], "tables", "tables-"+v.flavour.String(), 1)
				ns.Run(t, args...)
				if err := verify(t, b); !errors.Is(err, sink.ErrStartOver) {
					t.Fatalf("Verify after %q returned %v", command, err)
				}
				mustSync(t, b, pass(everything()...))
				if diff := cmp.Diff(before, saveAll(t, ns, v.flavour)); diff != "" {
					t.Errorf("not repaired (-before +after):\n%s", diff)
				}
			})
		})
	}
}

// entry finds the entry of table nat whose match contains text, and returns its target.
func (t *ruleset) entry(tb testing.TB, text string) string {
	for id, entries := range t.claims {
		for match, c := range entries {
			if id.table == nat && strings.Contains(match, text) {
				_, target, _ := strings.Cut(c.rest, "-j ")
				return target
			}
		}
	}
	tb.Fatalf("no entry with %q", text)
	return ""
}

// In flavour nft, Verify does not read the rules while no program changes rules.
func TestVerifyReadsRulesOnlyAfterChanges(t *testing.T) {
	ns := netnstest.New(t)
	p := newPrograms(t)
	b := start(t, ns, variant{flavourNFT, false}, p.use)
	mustSync(t, b, pass(everything()...))
	p.replace("*-save", "exit 1")
	if err := verify(t, b); err != nil {
		t.Errorf("Verify without a change: %v", err)
	}
	ns.Run(t, "iptables-nft", "-N", "FOREIGN")
	if err := verify(t, b); err == nil {
		t.Error("Verify after a change did not read the rules")
	}
}

func TestDeletedSetIsRepaired(t *testing.T) {
	ns := netnstest.New(t)
	b := start(t, ns, variant{flavourLegacy, false})
	mustSync(t, b, pass(everything()...))
	want := saveAll(t, ns, flavourLegacy)
	ns.Run(t, "iptables-legacy", "-F")
	ns.Run(t, "ipset", "destroy", "KPNG-DROP4")
	if err := verify(t, b); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("Verify returned %v", err)
	}
	mustSync(t, b, pass(everything()...))
	if diff := cmp.Diff(want, saveAll(t, ns, flavourLegacy)); diff != "" {
		t.Errorf("not repaired (-before +after):\n%s", diff)
	}
}

// Elements that other programs have added may have any protocol.
func TestForeignElementsAreRemoved(t *testing.T) {
	ns := netnstest.New(t)
	b := start(t, ns, variant{flavourNFT, false})
	mustSync(t, b, pass(everything()...))
	want := saveAll(t, ns, flavourNFT)
	ns.RunWith(t, `add KPNG-DROP4 10.0.0.1,tcp:80
add KPNG-DROP4 10.0.0.1,udp:53
add KPNG-DROP4 10.0.0.1,sctp:65535
add KPNG-DROP4 10.0.0.1,icmp:3/4
add KPNG-DROP4 10.0.0.1,gre:0
add KPNG-DROP6 2001:db8::1,ipv6-icmp:1/0
add KPNG-DROP6 ::ffff:10.0.0.1,tcp:1
add KPNG-HAIRPIN6 2001:db8::1,udp:53,::1
add KPNG-CLUSTERIPS4 255.255.255.255
`, "ipset", "restore")
	if err := verify(t, b); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("Verify returned %v", err)
	}
	mustSync(t, b, pass(everything()...))
	if diff := cmp.Diff(want, saveAll(t, ns, flavourNFT)); diff != "" {
		t.Errorf("not repaired (-before +after):\n%s", diff)
	}
}

func TestChangeWritesOnlyItsService(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		written := 0
		b := start(t, ns, v, func(o *options) {
			o.Observer = &backendtest.Observer{OnWrote: func(lines int, _ error) { written += lines }}
		})
		mustSync(t, b, passOf(many(300))...)
		for what, c := range map[string]struct {
			change *sink.Changes
			limit  int
		}{
			// The limit includes the lines *nat and COMMIT, a line for the chain, and ten
			// rules.
			"one endpoint": {batch(view("s00007", "10.96.0.7", "10.0.0.1 10.0.1.1 10.0.1.2 10.0.1.3 10.0.1.4 10.0.1.5 10.0.1.6 10.0.1.7 10.0.1.8 10.0.1.9")), 13},
			// This limit also includes a dispatch chain in each table.
			"a new service": {batch(view("new", "10.97.0.7", "10.0.0.1")), 20},
		} {
			written = 0
			mustSync(t, b, c.change)
			if written == 0 || written > c.limit {
				t.Errorf("%s: wrote %d lines, want 1 to %d", what, written, c.limit)
			}
		}
	})
}

// A pass has several batches. Services that it has not delivered yet keep their rules.
func TestServicesOfLaterBatchesKeepTheirRules(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		// The addresses share a dispatch chain.
		a, z := view("a", "10.96.0.1", "10.1.0.1"), view("z", "10.97.0.1", "10.1.0.2")
		stale := view("stale", "10.98.0.1", "10.1.0.3")
		mustSync(t, start(t, ns, v), pass(a, z, stale))
		b := start(t, ns, v)
		a2 := view("a", "10.96.0.1", "10.1.0.9")
		first := batch(a2)
		first.First = true
		mustSync(t, b, first)
		text := saveAll(t, ns, v.flavour)
		for _, want := range []string{"10.1.0.9:8080", "-d 10.97.0.1/32", "10.1.0.2:8080", "-d 10.98.0.1/32", "10.1.0.3:8080"} {
			if !strings.Contains(text, want) {
				t.Errorf("after the first batch, %q is missing in:\n%s", want, text)
			}
		}
		last := batch(z)
		last.Last = true
		mustSync(t, b, last)
		text = saveAll(t, ns, v.flavour)
		if strings.Contains(text, "10.98.0.1") || strings.Contains(text, "10.1.0.3") {
			t.Errorf("after the pass, the deleted service still has rules:\n%s", text)
		}
		if err := verify(t, b); err != nil {
			t.Error(err)
		}
	})
}

// If a service is deleted during a pass, none of its rules stay, even if an earlier
// process made rules that the service no longer needs.
func TestServiceDeletedDuringPass(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		a := view("a", "10.96.0.1 10.96.0.2", "10.1.0.1")
		none, web := view("none", "10.96.0.3", ""), view("web", "10.96.0.4", "10.1.0.2")
		mustSync(t, start(t, ns, v), pass(web))
		want := saveAll(t, ns, v.flavour)
		mustSync(t, start(t, ns, v), pass(a, none, web))
		b := start(t, ns, v)
		first := batch(view("a", "10.96.0.1", "10.1.0.1"), none)
		first.First = true
		deleted := &sink.Changes{Node: node, Services: slices.Values([]sink.Change{{Key: a.Key(), Old: a}, {Key: none.Key(), Old: none}})}
		last := batch(web)
		last.Last = true
		mustSync(t, b, first, deleted)
		if text := saveAll(t, ns, v.flavour); strings.Contains(text, "-d 10.96.0.1/32 -p tcp") {
			t.Errorf("before the end of the pass, the deleted service still has its frontend:\n%s", text)
		}
		mustSync(t, b, last)
		if diff := cmp.Diff(want, saveAll(t, ns, v.flavour)); diff != "" {
			t.Errorf("rules differ (-want +got):\n%s", diff)
		}
		if err := verify(t, b); err != nil {
			t.Error(err)
		}
	})
}

func TestNodeAddressesAreFollowed(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		addrs := nodeaddrs.Of(netip.MustParseAddr("192.0.2.1"))
		b := start(t, ns, v, func(o *options) { o.NodeAddresses = addrs })
		mustSync(t, b, pass(everything()...))
		addrs.Set(netip.MustParseAddr("192.0.2.77"), netip.MustParseAddr("127.0.0.1"))
		if err := b.updateAddresses(t.Context()); err != nil {
			t.Fatal(err)
		}
		text := saveAll(t, ns, v.flavour)
		if !strings.Contains(text, "192.0.2.77") || strings.Contains(text, "192.0.2.1") || strings.Contains(text, "127.0.0.1") {
			t.Errorf("node ports are not at 192.0.2.77 only:\n%s", text)
		}
	})
}

// After a pass, the rules in the other flavour are removed, because nothing updates them.
func TestChangeOfFlavour(t *testing.T) {
	for _, flavours := range [][2]flavour{{flavourNFT, flavourLegacy}, {flavourLegacy, flavourNFT}} {
		t.Run("from "+flavours[0].String(), func(t *testing.T) {
			ns := netnstest.New(t)
			addForeignRules(t, ns, flavours[0])
			before := saveAll(t, ns, flavours[0])
			mustSync(t, start(t, ns, variant{flavours[0], false}), pass(everything()...))
			b := start(t, ns, variant{flavours[1], false})
			first := batch(everything()...)
			first.First = true
			mustSync(t, b, first)
			if text := saveAll(t, ns, flavours[0]); !strings.Contains(text, "KPNG-SERVICES") {
				t.Errorf("the old rules were removed before the end of the pass:\n%s", text)
			}
			mustSync(t, b, pass(everything()...))
			if diff := cmp.Diff(before, withoutOwn(saveAll(t, ns, flavours[0]))); diff != "" {
				t.Errorf("foreign rules changed (-before +after):\n%s", diff)
			}
			for _, family := range families {
				if text := ns.Run(t, programName(flavours[0], family, "save")); strings.Contains(strings.ReplaceAll(text, "KPNG-other-", ""), "KPNG-") {
					t.Errorf("old rules stayed:\n%s", text)
				}
			}
			if err := verify(t, b); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestFlavourIsDetected(t *testing.T) {
	const (
		hint    = "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n"
		oldHint = "*mangle\n:KUBE-KUBELET-CANARY - [0:0]\nCOMMIT\n"
		rule    = "*filter\n-A INPUT -p tcp --dport 23 -j REJECT\nCOMMIT\n"
	)
	for name, c := range map[string]struct {
		nft, legacy string
		want        flavour
	}{
		"hint of kubelet in legacy":            {rule, hint, flavourLegacy},
		"hint of kubelet in nft":               {hint, rule, flavourNFT},
		"hint of an old kubelet in legacy":     {rule, oldHint, flavourLegacy},
		"hint of an old kubelet in nft":        {oldHint, rule, flavourNFT},
		"more rules in legacy":                 {"", rule, flavourLegacy},
		"more rules in nft":                    {rule, "", flavourNFT},
		"none, and the default program is nft": {"", "", flavourNFT},
	} {
		t.Run(name, func(t *testing.T) {
			ns := netnstest.New(t)
			for program, input := range map[string]string{"ip6tables-nft-restore": c.nft, "iptables-legacy-restore": c.legacy} {
				if input != "" {
					ns.RunWith(t, input, program)
				}
			}
			b := makeBackend(t, ns, variant{})
			got, err := detectFlavour(t.Context(), &b.opts)
			if err != nil || got != c.want {
				t.Errorf("detected %s, %v; want %s", got, err, c.want)
			}
		})
	}
}
