// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
)

// shape is the size of a service in one family.
type shape struct {
	ports, externalIPs, endpoints, ranges int
	// target returns the target port of a service port. Default: 8080 for all ports.
	target   func(port int32) int32
	affinity bool
}

func samePort(port int32) int32  { return port }
func otherPort(port int32) int32 { return port + 10_000 }

// service returns a service with this shape and the cluster IP 10.96.0.7. Its ports are
// 1001, 1002 and so on.
func (s shape) service() *api.Service {
	svc := &api.Service{Namespace: "default", Name: "large", Type: api.LoadBalancer, IPFamilies: []api.Family{api.IPv4}}
	svc.IPs.ClusterIPs.Add(netip.MustParseAddr("10.96.0.7"))
	for i := range s.ports {
		p := api.PortMapping{Name: fmt.Sprint("p", i), Protocol: api.TCP, Port: int32(1001 + i), TargetPort: 8080}
		if s.target != nil {
			p.TargetPort = s.target(p.Port)
		}
		svc.Ports = append(svc.Ports, p)
	}
	svc.IPs.ExternalIPs = apitest.IPs("198.18.0.0", s.externalIPs)
	if s.ranges > 0 {
		svc.IPs.LoadBalancerIPs.Add(netip.MustParseAddr("203.0.113.1"))
		r := api.SourceRanges{TargetIPs: svc.IPs.LoadBalancerIPs}
		for i := range s.ranges {
			r.Prefixes = append(r.Prefixes, netip.PrefixFrom(netip.AddrFrom4([4]byte{20, byte(i >> 8), byte(i), 7}), 24))
		}
		svc.SourceRanges = []api.SourceRanges{r}
	}
	if s.affinity {
		affinity(svc)
	}
	return svc
}

// view returns the node's view of a service. Its endpoints are 10.1.0.1, 10.1.0.2 and so
// on, without those whose numbers are in absent.
func (s shape) view(svc *api.Service, absent ...int) *api.View {
	var words []string
	for i := range s.endpoints {
		if !slices.Contains(absent, i) {
			words = append(words, fmt.Sprintf("10.1.%d.%d@elsewhere", (i+1)>>8, (i+1)&255))
		}
	}
	return sinktest.View(node, svc, strings.Join(words, " "))
}

// program returns a renderer for IPv4, and its output for a service of this shape.
func (s shape) program(withSets bool) (*renderer, *rendered) {
	opts := &Options{}
	if err := opts.complete(); err != nil {
		panic(err)
	}
	r := &renderer{opts: opts, family: api.IPv4, withSets: withSets}
	return r, r.renderService(s.view(s.service()), nil)
}

// cost returns the number of rules and of set elements.
func (r *rendered) cost() int {
	n := r.rules + len(r.elements)
	lists := map[string]int{}
	for _, list := range r.sources {
		lists[list.name] = countRules(list.content)
	}
	for _, rules := range lists {
		n += rules
	}
	return n
}

// The rules and elements of a service are proportional to its frontends, its endpoints and
// its source ranges, and not to their product.
func TestCostIsProportional(t *testing.T) {
	for name, c := range map[string]struct {
		shape shape
		max   int
	}{
		"ports, external IPs and endpoints":        {shape{ports: 50, externalIPs: 200, endpoints: 100}, 50*201 + 2*100},
		"ports that endpoints keep, and endpoints": {shape{ports: 1000, endpoints: 100, target: samePort}, 1000 + 2*100},
		"ports with a list each":                   {shape{ports: 100, endpoints: 40, externalIPs: 3, target: otherPort}, 100*4 + 100*(40+2) + 1},
		"ports and source ranges":                  {shape{ports: 100, endpoints: 1, ranges: 1000}, 3*100 + 1000 + 10},
		"affinity":                                 {shape{ports: 1, endpoints: 1000, affinity: true}, 2*1000 + 200},
		"policy Local without endpoints here":      {shape{ports: 50, externalIPs: 100, endpoints: 100}, 2*50*101 + 300},
	} {
		for _, withSets := range []bool{true, false} {
			svc := c.shape.service()
			svc.ExternalTrafficToLocal = strings.Contains(name, "Local")
			r, _ := c.shape.program(withSets)
			if got := r.renderService(c.shape.view(svc), nil).cost(); got > c.max {
				t.Errorf("%s, with sets %t: %d rules and elements, more than %d", name, withSets, got, c.max)
			}
		}
	}
}

// follow adds probabilities to out. The argument probability is that of entering the
// chain, and the result for a target is the probability of reaching the target.
func (r *rendered) follow(t *testing.T, chain string, probability float64, out map[string]float64) {
	rest := probability
	for rule := range strings.SplitSeq(r.chains[chainID{nat, chain}], "\n") {
		part := rest
		if _, text, ok := strings.Cut(rule, "--probability "); ok {
			p, err := strconv.ParseFloat(strings.Fields(text)[0], 64)
			if err != nil {
				t.Fatal(err)
			}
			part *= p
		}
		_, target, _ := strings.Cut(rule, "-j ")
		if _, ok := r.chains[chainID{nat, target}]; ok {
			r.follow(t, target, part, out)
		} else {
			out[target] += part
		}
		rest -= part
	}
}

// All endpoints of a list get the same share of the connections. A packet passes far fewer
// rules than there are endpoints.
func TestEndpointsOfLargeListsAreEqual(t *testing.T) {
	for _, n := range []int{1, 2, 33, 127, 128, 129, 1000} {
		_, out := shape{ports: 1, endpoints: n}.program(true)
		targets := map[string]float64{}
		for id, rest := range out.entries {
			if id.chain.table == nat {
				_, chain, _ := strings.Cut(rest, "-j ")
				out.follow(t, chain, 1, targets)
			}
		}
		if len(targets) != n {
			t.Errorf("%d endpoints: %d targets", n, len(targets))
		}
		for target, p := range targets {
			if math.Abs(p*float64(n)-1) > 1e-5 {
				t.Errorf("%d endpoints: the probability of %s is %v", n, target, p)
			}
		}
		for id, rules := range out.chains {
			if limit := max(127, n/8); countRules(rules) > limit {
				t.Errorf("%d endpoints: chain %s has %d rules, more than %d", n, id.name, countRules(rules), limit)
			}
		}
	}
}

// recordInput makes the programs for IPv4 and for sets append their input to a file. The
// returned function returns the input since its last call.
func recordInput(p *programs) (input func() string) {
	t := p.tb
	path := filepath.Join(t.TempDir(), "input")
	for _, program := range []string{"iptables-*-restore", "ipset"} {
		p.replace(program, `case "$*" in *restore*|*noflush*) tee -a `+path+` | %s "$@" ;; *) exec %s "$@" ;; esac`)
	}
	return func() string {
		text, err := os.ReadFile(path)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		os.Remove(path)
		return string(text)
	}
}

func deletion(view *api.View) *sink.Changes {
	c := batch()
	c.Services = slices.Values([]sink.Change{{Key: view.Key(), Old: view}})
	return c
}

// An endpoint that is removed changes few rules, and no set.
func TestEndpointChangeWritesFewLines(t *testing.T) {
	for name, c := range map[string]struct {
		shape shape
		max   int
	}{
		"many ports":         {shape{ports: 300, endpoints: 200, target: samePort}, 60},
		"many external IPs":  {shape{ports: 2, externalIPs: 300, endpoints: 200}, 60},
		"many endpoints":     {shape{ports: 1, endpoints: 600}, 100},
		"affinity":           {shape{ports: 1, endpoints: 300, affinity: true}, 130},
		"many source ranges": {shape{ports: 2, endpoints: 2, ranges: 3000}, 8},
	} {
		t.Run(name, func(t *testing.T) {
			eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
				p := newPrograms(t)
				b := start(t, ns, v, p.use)
				svc := c.shape.service()
				mustSync(t, b, pass(c.shape.view(svc)))
				want := saveAll(t, ns, v.flavour)
				list := b.rulesets[0].records[c.shape.view(svc).Key()].sources
				input := recordInput(p)
				mustSync(t, b, batch(c.shape.view(svc, 1)))
				if text := input(); text == "" || strings.Count(text, "\n") > c.max {
					t.Errorf("wrote %d lines, want 1 to %d", strings.Count(text, "\n"), c.max)
				}
				if !maps.Equal(list, b.rulesets[0].records[c.shape.view(svc).Key()].sources) {
					t.Error("the source ranges were planned again")
				}
				mustSync(t, b, batch(c.shape.view(svc)))
				if diff := cmp.Diff(want, saveAll(t, ns, v.flavour)); diff != "" {
					t.Errorf("the rules differ after the endpoint is back (-before +after):\n%s", diff)
				}
			})
		})
	}
}

// An address with many ports has chains of its own, so that packets to other addresses
// pass few rules.
func TestAddressWithManyPorts(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		const addr = "10.9.0.1"
		ns.Add(t, "lo", addr+"/24")
		ns.Run(t, "ip", "route", "add", "10.96.0.0/16", "dev", "lo")
		netnstest.Listen(t, ns.Do, addr+":8080", func(net.Conn) {})
		netnstest.Listen(t, ns.Do, addr+":1005", func(net.Conn) {})
		b := start(t, ns, v)
		same := shape{ports: 20, endpoints: 1, target: samePort}
		svc := same.service()
		svc.Name, svc.IPs = "same", api.ServiceIPs{}
		svc.IPs.ClusterIPs.Add(netip.MustParseAddr("10.96.2.7"))
		kept := same.view(svc)
		kept.Endpoints[0].Addr, kept.Endpoints[0].Local = netip.MustParseAddr(addr), true
		s := shape{ports: 300, endpoints: 1}
		large := s.view(s.service())
		large.Endpoints[0].Addr = netip.MustParseAddr(addr)
		udp := s.service()
		for i := range udp.Ports {
			udp.Ports[i].Protocol = api.UDP
		}
		udp.Name = "udp"
		// These services are in the dispatch chain of the large service.
		small, none := view("small", "10.96.1.7", addr), view("none", "10.97.0.7", "")
		mustSync(t, b, pass(small))
		before := saveAll(t, ns, v.flavour)
		mustSync(t, b, batch(large, s.view(udp), none, kept))
		for id, rules := range b.rulesets[0].chains {
			if limit := 70; countRules(rules) > limit {
				t.Errorf("chain %v has %d rules, more than %d", id, countRules(rules), limit)
			}
		}
		if n := countRules(b.rulesets[0].chains[chainID{nat, "KPNG-D70"}]); n > 5 {
			t.Errorf("the dispatch chain has %d rules", n)
		}
		for _, dial := range []string{"10.96.0.7:1001", "10.96.0.7:1300", "10.96.1.7:80", "10.96.2.7:1005"} {
			if err := ns.Do(func() error {
				conn, err := net.DialTimeout("tcp", dial, 20*time.Second)
				if err == nil {
					conn.Close()
				}
				return err
			}); err != nil {
				t.Errorf("connect: %v", err)
			}
		}
		forget(b)
		if err := verify(t, b); err != nil {
			t.Error(err)
		}
		written := 0
		again := start(t, ns, v, func(o *options) {
			o.Observer = &backendtest.Observer{OnWrote: func(lines int, _ error) { written += lines }}
		})
		mustSync(t, again, pass(large, s.view(udp), none, small, kept))
		if written != 0 {
			t.Errorf("a restart wrote %d lines", written)
		}
		mustSync(t, again, deletion(large), deletion(s.view(udp)), deletion(none), deletion(kept))
		if diff := cmp.Diff(before, saveAll(t, ns, v.flavour)); diff != "" {
			t.Errorf("rules are left (-before +after):\n%s", diff)
		}
	})
}

// Equal source ranges have one set or chain, whatever number of frontends and services
// need them.
func TestEqualSourceRangesAreShared(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		b := start(t, ns, v)
		s := shape{ports: 30, endpoints: 1, ranges: 200}
		one, two := s.service(), s.service()
		two.Name = "two"
		two.IPs = api.ServiceIPs{}
		two.IPs.LoadBalancerIPs.Add(netip.MustParseAddr("203.0.113.2"))
		slices.Reverse(two.SourceRanges[0].Prefixes)
		two.SourceRanges[0].TargetIPs = two.IPs.LoadBalancerIPs
		other := s.service()
		other.Name, other.IPs = "other", api.ServiceIPs{}
		other.IPs.LoadBalancerIPs.Add(netip.MustParseAddr("203.0.113.3"))
		other.SourceRanges[0].TargetIPs, other.SourceRanges[0].Prefixes = other.IPs.LoadBalancerIPs, other.SourceRanges[0].Prefixes[:100]

		ranges := func() (n int) {
			if v.withoutIPSet {
				return strings.Count(ns.Run(t, programName(v.flavour, api.IPv4, "save"), "-t", mangle), "-s 20.")
			}
			return strings.Count(ns.Run(t, "ipset", "save"), " 20.")
		}
		check := func(what string, want int) {
			t.Helper()
			if err := b.rulesets[0].checkLoss(t.Context()); err != nil { // also destroys unused sets
				t.Fatal(err)
			}
			deadline := time.Now().Add(20 * time.Second)
			for ranges() != want && time.Now().Before(deadline) {
				time.Sleep(10 * time.Millisecond)
				b.rulesets[0].checkLoss(t.Context())
			}
			if n := ranges(); n != want {
				t.Errorf("%s: %d source ranges, want %d", what, n, want)
			}
			forget(b)
			if err := verify(t, b); err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
		mustSync(t, b, pass())
		before := saveAll(t, ns, v.flavour)
		mustSync(t, b, batch(s.view(one), s.view(two)))
		check("two services", 200)
		mustSync(t, b, batch(s.view(other)))
		check("a service with other ranges", 300)
		mustSync(t, b, deletion(s.view(one)))
		check("after the deletion of the first", 300)
		mustSync(t, b, deletion(s.view(two)))
		check("after the deletion of the second", 100)
		b = start(t, ns, v)
		mustSync(t, b, pass(s.view(other)))
		check("after a restart", 100)
		b = start(t, ns, v)
		mustSync(t, b, pass())
		check("after a restart without the service", 0)
		if diff := cmp.Diff(before, saveAll(t, ns, v.flavour)); diff != "" {
			t.Errorf("rules or sets are left (-before +after):\n%s", diff)
		}
	})
}

// Addresses with the same source ranges share one list, so neither its computation nor its
// memory is proportional to the number of addresses.
func TestAddressesShareTheirSourceRanges(t *testing.T) {
	s := shape{ports: 1, endpoints: 1, ranges: 200}
	svc := s.service()
	for i := range 50 {
		svc.IPs.LoadBalancerIPs.Add(netip.AddrFrom4([4]byte{203, 0, 113, byte(i + 2)}))
	}
	svc.SourceRanges[0].TargetIPs = svc.IPs.LoadBalancerIPs
	r, _ := s.program(true)
	out := r.renderService(s.view(svc), nil)
	lists := map[*sourceList]bool{}
	for _, list := range out.sources {
		lists[list] = true
	}
	if len(out.sources) != 51 || len(lists) != 1 {
		t.Errorf("%d addresses have %d lists, want 51 with one list", len(out.sources), len(lists))
	}
}

// Two lists of source ranges may have the same name. Then the second service fails, and no
// service gets the ranges of another service.
func TestSourceRangesWithTheNameOfOthers(t *testing.T) {
	for _, v := range variants[:2] {
		b := start(t, netnstest.New(t), v)
		s := shape{ports: 1, endpoints: 1, ranges: 2}
		mustSync(t, b, pass())
		r := b.rulesets[0]
		name := r.sourceList(s.service().SourceRanges[0].Prefixes).name
		r.addSourceUsers(&sourceList{name, "192.0.2.0/24"}, 1)
		var failed *sink.Failed
		if err := b.Sync(t.Context(), batch(s.view(s.service()), view("web", "10.96.0.1", "10.1.0.1"))); !errors.As(err, &failed) || len(*failed) != 1 {
			t.Fatalf("Sync returned %v", err)
		}
		if err := (*failed)[s.view(s.service()).Key()]; err == nil || !strings.Contains(err.Error(), "source ranges of another service") {
			t.Errorf("the error is %v", err)
		}
		if _, ok := r.records[view("web", "10.96.0.1", "").Key()]; !ok {
			t.Error("the other service was not programmed")
		}
	}
}

// If the set of source ranges cannot be made, only the services that need it fail, and
// their load-balancer addresses are not translated.
func TestSetOfSourceRangesCannotBeMade(t *testing.T) {
	for _, flavour := range []flavour{flavourNFT, flavourLegacy} {
		ns := netnstest.New(t)
		b := start(t, ns, variant{flavour, false})
		s := shape{ports: 1, endpoints: 1, ranges: 2}
		mustSync(t, b, pass())
		name := b.rulesets[0].sourceList(s.service().SourceRanges[0].Prefixes).name
		// The kernel does not destroy a set that is in another set.
		ns.RunWith(t, "create "+name+" hash:ip\ncreate others list:set\nadd others "+name+"\n", "ipset", "restore")
		var failed *sink.Failed
		large := s.view(s.service())
		if err := b.Sync(t.Context(), batch(large, view("web", "10.96.0.1", "10.1.0.9"))); !errors.As(err, &failed) || len(*failed) != 1 || (*failed)[large.Key()] == nil {
			t.Fatalf("%s: Sync returned %v", flavour, err)
		}
		text := saveAll(t, ns, flavour)
		if strings.Contains(text, "203.0.113.1") || !strings.Contains(text, "10.1.0.9:8080") {
			t.Errorf("%s: the rules are:\n%s", flavour, text)
		}
		ns.Run(t, "ipset", "destroy", "others")
		if err := b.Sync(t.Context(), batch(large)); !errors.As(err, &failed) { // it destroys the other set
			t.Errorf("%s: Sync returned %v", flavour, err)
		}
		mustSync(t, b, batch(large))
		forget(b)
		if err := verify(t, b); err != nil {
			t.Errorf("%s: %v", flavour, err)
		}
	}
}

// A drift in a set of source ranges is found and repaired. If the set is lost, no source is
// admitted.
func TestDriftOfSourceRanges(t *testing.T) {
	ns := netnstest.New(t)
	b := start(t, ns, variant{flavourNFT, false})
	s := shape{ports: 2, endpoints: 1, ranges: 3}
	mustSync(t, b, pass(s.view(s.service())))
	want := saveAll(t, ns, flavourNFT)
	name := b.rulesets[0].sourceList(s.service().SourceRanges[0].Prefixes).name
	for _, command := range []string{"flush " + name, "add " + name + " 192.0.2.0/24", "del " + name + " 20.0.1.0/24", "add " + name + " 20.0.1.0/25"} {
		ns.Run(t, append([]string{"ipset"}, strings.Fields(command)...)...)
		if err := verify(t, b); !errors.Is(err, sink.ErrStartOver) || !strings.Contains(err.Error(), name) {
			t.Errorf("after %q, Verify returned %v", command, err)
		}
		mustSync(t, b, pass(s.view(s.service())))
		if diff := cmp.Diff(want, saveAll(t, ns, flavourNFT)); diff != "" {
			t.Errorf("after %q, not repaired (-want +got):\n%s", command, diff)
		}
	}
}

// kernelState is the state that results from the inputs of the programs.
type kernelState struct {
	chains map[chainID][]string
	sets   map[string][]string
}

// run executes the input of the programs, and calls check after each transaction.
func (k *kernelState) run(input string, check func()) {
	table := ""
	for line := range strings.Lines(input) {
		f := strings.Fields(line)
		switch {
		case f[0] == "COMMIT":
			check()
		case line[0] == '*':
			table = f[0][1:]
		case line[0] == ':':
			k.chains[chainID{table, f[0][1:]}] = nil
		case f[0] == "-A":
			id := chainID{table, f[1]}
			k.chains[id] = append(k.chains[id], line)
		case f[0] == "-X":
			delete(k.chains, chainID{table, f[1]})
		case f[0] == "create", f[0] == "flush":
			k.sets[f[1]] = nil
		case f[0] == "add":
			k.sets[f[1]] = append(k.sets[f[1]], f[2])
		}
	}
}

// While table nat translates packets to an address with source ranges, table mangle drops
// packets from other sources. This must hold during the creation, each change and the
// deletion of a service.
func TestSourceRangesHoldDuringChanges(t *testing.T) {
	const addr = "-d 203.0.113.1/32 "
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		p := newPrograms(t)
		b := start(t, ns, v, p.use)
		mustSync(t, b, pass())
		input := recordInput(p)
		k := kernelState{map[chainID][]string{}, map[string][]string{}}
		s := shape{ports: 2, endpoints: 2, ranges: 5}
		open, closed := s.service(), s.service()
		closed.SourceRanges[0].Prefixes = closed.SourceRanges[0].Prefixes[:1]
		moved := s.service()
		moved.Name = "moved"
		withoutPort := s.service()
		withoutPort.Ports = withoutPort.Ports[:1]
		var before *api.View
		for i, svc := range []*api.Service{open, closed, withoutPort, open, moved, nil, closed, nil} {
			c := batch()
			if svc != nil {
				c = batch(s.view(svc))
			}
			if next := svc; before != nil && (next == nil || next.Name != before.Service.Name) {
				list := slices.Collect(c.Services)
				c.Services = slices.Values(append([]sink.Change{{Key: before.Key(), Old: before}}, list...))
			}
			before = nil
			if svc != nil {
				before = s.view(svc)
			}
			mustSync(t, b, c)
			k.run(input(), func() {
				restricted := map[string]bool{} // by match
				for id, rules := range k.chains {
					for _, rule := range rules {
						if _, match, ok := strings.Cut(rule, addr); ok && id.table == mangle {
							match, rest := splitEntry(match)
							_, set, _ := strings.Cut(rest, "--match-set ")
							_, target, _ := strings.Cut(strings.TrimSpace(rest), "-j ")
							set, _, _ = strings.Cut(set, " ")
							chain := strings.Join(k.chains[chainID{mangle, target}], "")
							restricted[match] = target == "DROP" && len(k.sets[set]) > 0 || strings.HasSuffix(chain, "-j DROP\n")
						}
					}
				}
				for id, rules := range k.chains {
					for _, rule := range rules {
						if _, match, ok := strings.Cut(rule, addr); ok && id.table == nat {
							if match, _ := splitEntry(match); !restricted[match] {
								t.Errorf("step %d: table nat translates %s%s without source ranges", i, addr, match)
							}
						}
					}
				}
			})
		}
		for id, rules := range k.chains {
			if text := strings.Join(rules, ""); strings.Contains(text, addr) {
				t.Errorf("after the deletion, chain %v has %s", id, text)
			}
		}
	})
}

// A large service is written after the other services of a batch. In flavour nft, its
// transactions are bounded.
func TestLargeServiceIsWrittenLast(t *testing.T) {
	for _, flavour := range []flavour{flavourNFT, flavourLegacy} {
		p := newPrograms(t)
		b := start(t, netnstest.New(t), variant{flavour, false}, p.use)
		mustSync(t, b, pass())
		input := recordInput(p)
		s := shape{ports: 60, endpoints: 200, target: otherPort}
		mustSync(t, b, batch(s.view(s.service()), view("small", "10.96.1.7", "10.1.0.1")))
		text := input()
		small, large := strings.Index(text, "default/small"), strings.Index(text, "10.1.0.40:")
		if end := strings.Index(text[small:], "COMMIT"); small < 0 || large < small+end {
			t.Errorf("%s: the large service begins at %d, the small one at %d", flavour, large, small)
		}
		most := 0
		for part := range strings.SplitSeq(text, "COMMIT\n") {
			most = max(most, strings.Count(part, "\n-A "))
		}
		if limit := maxLines; flavour == flavourNFT && most > limit || flavour == flavourLegacy && most < limit {
			t.Errorf("%s: the largest transaction has %d rules", flavour, most)
		}
		forget(b)
		if err := verify(t, b); err != nil {
			t.Error(err)
		}
		c := batch(view("small", "10.96.1.7", "10.1.0.2"))
		list := append(slices.Collect(deletion(s.view(s.service())).Services), slices.Collect(c.Services)...)
		c.Services = slices.Values(list)
		mustSync(t, b, c)
		text = input()
		if small, large := strings.Index(text, "10.1.0.2:8080"), strings.Index(text, "-X KPNG-G"); small < 0 || large < small {
			t.Errorf("%s: the deletion of the large service begins at %d, the change of the small one at %d", flavour, large, small)
		}
	}
}

// In flavour nft, a large service is written in several transactions. After each of them,
// every chain to which a rule leads has its rules.
func TestTransactionsOfLargeServicesAreConsistent(t *testing.T) {
	p := newPrograms(t)
	b := start(t, netnstest.New(t), variant{flavourNFT, false}, p.use)
	mustSync(t, b, pass())
	input := recordInput(p)
	k := kernelState{map[chainID][]string{}, map[string][]string{}}
	s := shape{ports: 60, endpoints: 200, target: otherPort}
	svc := s.service()
	var absent []int
	for i := range s.endpoints / 2 {
		absent = append(absent, i)
	}
	other := s
	other.target = func(port int32) int32 { return port + 20_000 }
	transactions := 0
	for i, c := range []*sink.Changes{batch(s.view(svc)), batch(s.view(svc, absent...)), batch(other.view(other.service())), deletion(s.view(svc))} {
		mustSync(t, b, c)
		k.run(input(), func() {
			transactions++
			for id, rules := range k.chains {
				for _, rule := range rules {
					_, target, _ := strings.Cut(strings.TrimSpace(rule), "-j KPNG-")
					if to := (chainID{id.table, "KPNG-" + target}); len(target) == 1+hashLen && len(k.chains[to]) == 0 {
						t.Fatalf("change %d: chain %s leads to chain %s, which has no rules", i, id.name, to.name)
					}
				}
			}
		})
	}
	if transactions < 6 {
		t.Errorf("%d transactions", transactions)
	}
}

// The kernel remembers 100 clients for each endpoint of a service port. So the clients of
// one service do not displace the clients of another service, and are removed together with
// their service.
func TestClientsOfServiceAreLimited(t *testing.T) {
	for _, flavour := range []flavour{flavourNFT, flavourLegacy} {
		ns := netnstest.New(t)
		b := start(t, ns, variant{flavour, false})
		list := func(key string) string { // the file of the clients of an endpoint
			r := b.rulesets[0]
			for id, rules := range r.records[view(key, "", "").Key()].chains {
				if m := listPattern.FindStringSubmatch(rules); m != nil && id.table == nat {
					return "/proc/thread-self/net/xt_recent/" + m[1]
				}
			}
			t.Fatalf("service %s has no list of clients", key)
			return ""
		}
		clients := func(file string) (n int) {
			if err := ns.Do(func() error {
				text, err := os.ReadFile(file)
				n = bytes.Count(text, []byte("src="))
				return err
			}); err != nil {
				t.Fatal(err)
			}
			return n
		}
		add := func(file string, n int) {
			if err := ns.Do(func() error {
				for i := range n {
					if err := os.WriteFile(file, fmt.Appendf(nil, "+198.51.%d.%d\n", i>>8, i&255), 0); err != nil {
						return err
					}
				}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
		}
		one, two := view("one", "10.96.0.1", "10.1.0.1", affinity), view("two", "10.96.0.2", "10.1.0.1", affinity)
		mustSync(t, b, pass(one, two))
		add(list("two"), 3)
		add(list("one"), 300)
		if n := clients(list("one")); n != 100 {
			t.Errorf("%s: the list of the first service has %d clients", flavour, n)
		}
		if n := clients(list("two")); n != 3 {
			t.Errorf("%s: the list of the second service has %d clients", flavour, n)
		}
		file := list("one")
		mustSync(t, b, deletion(one))
		gone := func() bool {
			return errors.Is(ns.Do(func() error { _, err := os.Stat(file); return err }), os.ErrNotExist)
		}
		for deadline := time.Now().Add(20 * time.Second); !gone() && time.Now().Before(deadline); { // the kernel deletes rules in the background
			time.Sleep(5 * time.Millisecond)
		}
		if !gone() {
			t.Errorf("%s: the clients of the deleted service are left", flavour)
		}
	}
}

// TestUpdateFromEarlierRules replaces the rules of an earlier version under traffic. No
// connection fails, and no connection from outside the source ranges succeeds. Clients of
// session affinity keep their endpoints.
func TestUpdateFromEarlierRules(t *testing.T) {
	clients := regexp.MustCompile(`--update .*--name (\S+) .*10\.1\.0\.1:8080`)
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		for _, addr := range []string{"10.9.0.1/24", "10.9.0.2/24", "fd09::1/64", "fd09::2/64"} {
			ns.Add(t, "lo", addr)
		}
		for _, prefix := range []string{"10.96.0.0/16", "203.0.113.0/24", "fd00:96::/64", "2001:db8:1::/64"} {
			ns.Run(t, "ip", "route", "add", prefix, "dev", "lo")
		}
		netnstest.Listen(t, ns.Do, "10.9.0.1:8080", func(net.Conn) {})
		netnstest.Listen(t, ns.Do, "[fd09::1]:8080", func(net.Conn) {})
		read := func(name string) string {
			text, err := os.ReadFile(filepath.Join("testdata", "earlier", name))
			if err != nil {
				t.Fatal(err)
			}
			return string(text)
		}
		folder := "with-sets"
		if v.withoutIPSet {
			folder = "without-sets"
		} else {
			ns.RunWith(t, read("with-sets/sets"), "ipset", "restore")
		}
		for i, family := range families {
			ns.RunWith(t, read(fmt.Sprintf("%s/rules%d", folder, 4+2*i)), programName(v.flavour, family, "restore"), "--noflush")
		}
		m := clients.FindStringSubmatch(read(folder + "/rules4"))
		file := "/proc/thread-self/net/xt_recent/" + m[1]
		if err := ns.Do(func() error { return os.WriteFile(file, []byte("+192.0.2.77\n"), 0) }); err != nil {
			t.Fatal(err)
		}

		var stop = make(chan struct{})
		done := make(chan int)
		for _, c := range []struct {
			from, to string
			want     bool
		}{
			{"10.9.0.1", "10.96.0.9:80", true}, {"fd09::1", "[fd00:96::9]:80", true}, {"10.9.0.1", "203.0.113.9:80", true},
			{"fd09::1", "[2001:db8:1::9]:80", true}, {"10.9.0.2", "203.0.113.9:80", false}, {"fd09::2", "[2001:db8:1::9]:80", false},
		} {
			go func() {
				n := 0
				defer func() { done <- n }()
				dialer := net.Dialer{Timeout: 20 * time.Second, LocalAddr: &net.TCPAddr{IP: net.ParseIP(c.from)}}
				if !c.want {
					dialer.Timeout = 5 * time.Millisecond
				}
				for {
					err := ns.Do(func() error {
						conn, err := dialer.Dial("tcp", c.to)
						if err == nil {
							conn.(*net.TCPConn).SetLinger(0)
							conn.Close()
						}
						return err
					})
					if (err == nil) != c.want {
						t.Errorf("connect from %s to %s: %v", c.from, c.to, err)
						return
					}
					n++
					select {
					case <-stop:
						return
					default:
					}
				}
			}()
		}
		mustSync(t, start(t, ns, v), pass(updated()...))
		close(stop)
		for range 6 {
			if n := <-done; n == 0 {
				t.Error("there was no connection during the update")
			}
		}
		if err := ns.Do(func() error {
			text, err := os.ReadFile(file)
			if err == nil && !bytes.Contains(text, []byte("192.0.2.77")) {
				err = errors.New("session affinity has lost its client")
			}
			return err
		}); err != nil {
			t.Error(err)
		}
		fresh := netnstest.New(t)
		mustSync(t, start(t, fresh, v), pass(updated()...))
		// In flavour legacy, the order of the tables may differ.
		sorted := func(text string) []string { return slices.Sorted(strings.SplitSeq(text, "\n")) }
		if diff := cmp.Diff(sorted(saveAll(t, fresh, v.flavour)), sorted(saveAll(t, ns, v.flavour))); diff != "" {
			t.Errorf("rules differ from those of a first start (-want +got):\n%s", diff)
		}
	})
}

// updated returns the services whose rules are in testdata/earlier.
func updated() []*api.View {
	local := view("local", "10.96.0.9 fd00:96::9", "10.9.0.1 fd09::1", loadBalancer, sourceRanges, noNodePort, func(s *api.Service) {
		s.IPs.LoadBalancerIPs = api.IPSet{}
		s.IPs.LoadBalancerIPs.Add(netip.MustParseAddr("203.0.113.9"))
		s.IPs.LoadBalancerIPs.Add(netip.MustParseAddr("2001:db8:1::9"))
		s.SourceRanges = []api.SourceRanges{{
			TargetIPs: s.IPs.LoadBalancerIPs,
			Prefixes:  []netip.Prefix{netip.MustParsePrefix("10.9.0.1/32"), netip.MustParsePrefix("fd09::1/128")},
		}}
	})
	return []*api.View{
		view("affinity", "10.96.0.3 fd00:96::3", "10.1.0.1 10.1.0.2 !10.2.0.1 fd00::1", affinity), local,
		view("none", "10.96.0.2 fd00:96::2", ""), view("port", "10.96.0.4 fd00:96::4", "10.1.0.1 fd00::1", nodePort, externalLocal),
	}
}
