// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
)

// listPattern matches the name of a list of clients of session affinity.
var listPattern = regexp.MustCompile(`--name (\S+)`)

// lines returns the content of r, sorted. Chains of services get short names, such as
// L1 for the first list of endpoints. Lists of clients get names such as E1.
func (r *rendered) lines(opts *Options) []string {
	var out []string
	names := map[string]string{}
	count := map[byte]int{}
	var ids []chainID
	for id := range r.chains {
		ids = append(ids, id)
	}
	slices.SortFunc(ids, func(a, b chainID) int {
		return strings.Compare(r.chains[a]+a.name[:len(opts.prefix())+1], r.chains[b]+b.name[:len(opts.prefix())+1])
	})
	shorten := func(name string) {
		kind := strings.TrimPrefix(name, opts.prefix())[0]
		if _, ok := names[name]; !ok {
			count[kind]++
			names[name] = fmt.Sprintf("%c%d", kind, count[kind])
		}
	}
	for _, id := range ids {
		shorten(id.name)
		for _, m := range listPattern.FindAllStringSubmatch(r.chains[id], -1) {
			shorten(m[1])
		}
	}
	for addr, list := range r.sources {
		if list.content != "" {
			shorten(list.name)
			for line := range strings.SplitSeq(list.content, "\n") {
				out = append(out, fmt.Sprintf("%s for %s: %s", names[list.name], addr, line))
			}
		}
	}
	short := func(s string) string {
		for long, name := range names {
			s = strings.ReplaceAll(s, long, name)
		}
		return strings.ReplaceAll(s, opts.prefix(), "")
	}
	for id, rules := range r.chains {
		for i, rule := range strings.Split(rules, "\n") {
			out = append(out, short(fmt.Sprintf("%s %s %d: %s", id.table, id.name, i+1, rule)))
		}
	}
	for id, rest := range r.entries {
		if rest != "" {
			out = append(out, short(fmt.Sprintf("%s %s: %s %s", id.chain.table, id.chain.name, id.match, rest)))
		}
	}
	for e := range r.elements {
		out = append(out, e.set+" has "+e.text)
	}
	slices.Sort(out)
	return out
}

// The mark of the option MasqueradeMark, and no other mark, is in the rules.
func TestMasqueradeMarkIsRendered(t *testing.T) {
	opts := &Options{Options: backends.Options{MasqueradeMark: 0x40000, MasqueradeAll: true}}
	if err := opts.complete(); err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		r := &renderer{opts: opts, family: family}
		var got []string
		for _, line := range append(r.skeleton().lines(opts), r.renderService(view("web", "10.96.0.1 fd00:96::1", "!10.1.0.1 !fd00::1", loadBalancer), nil).lines(opts)...) {
			if strings.Contains(line, "mark") || strings.Contains(line, "0x") {
				got = append(got, line)
			}
		}
		want := []string{
			"nat M1 1: -j MARK --set-xmark 0x40000/0x40000",
			"nat P1 1: -m mark ! --mark 0x40000/0x40000 -j RETURN",
			"nat P1 2: -j MARK --set-xmark 0x40000/0x0",
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: rules with marks (-want +got):\n%s", family, diff)
		}
	}
}

func TestServicesAreRendered(t *testing.T) {
	rename := func(s *api.Service) { s.Ports[0].Name = "a\"\n-j ACCEPT" }
	outside := func(o *Options) {
		o.MasqueradeOutsiders, o.PodInterfaces = true, []string{"veth*"}
		o.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")}
	}
	for _, c := range []struct {
		name     string
		view     *api.View
		family   api.Family
		withSets bool
		opts     func(*Options)
		want     string
	}{{
		name: "a cluster IP with endpoints elsewhere needs one chain", family: api.IPv4,
		view: view("a", "10.96.0.31", "10.1.0.1 10.1.0.2 10.1.0.3"),
		want: `
			filter DF1: -d 10.96.0.31/32 -m comment --comment "default/a" -j REJECT
			nat DF1: -d 10.96.0.31/32 -p tcp -m tcp --dport 80 -m comment --comment "default/a:http" -j L1
			nat L1 1: -p tcp -m statistic --mode random --probability 0.33333333349 -j DNAT --to-destination 10.1.0.1:8080
			nat L1 2: -p tcp -m statistic --mode random --probability 0.50000000000 -j DNAT --to-destination 10.1.0.2:8080
			nat L1 3: -p tcp -j DNAT --to-destination 10.1.0.3:8080`,
	}, {
		name: "a set has the connections of an endpoint on this node to itself", family: api.IPv6,
		view: view("a", "fd00:96::1f", "!fd00::1"), withSets: true,
		want: `
			CLUSTERIPS has fd00:96::1f
			HAIRPIN has fd00::1,tcp:8080,fd00::1
			nat DF1: -d fd00:96::1f/128 -p tcp -m tcp --dport 80 -m comment --comment "default/a:http" -j L1
			nat L1 1: -p tcp -j DNAT --to-destination [fd00::1]:8080`,
	}, {
		name: "without sets, an endpoint on this node has a chain for connections to itself", family: api.IPv6,
		view: view("a", "fd00:96::1f", "!fd00::1"),
		want: `
			filter DF1: -d fd00:96::1f/128 -m comment --comment "default/a" -j REJECT
			nat DF1: -d fd00:96::1f/128 -p tcp -m tcp --dport 80 -m comment --comment "default/a:http" -j L1
			nat E1 1: -s fd00::1/128 -j MARK
			nat E1 2: -p tcp -j DNAT --to-destination [fd00::1]:8080
			nat L1 1: -j E1`,
	}, {
		name: "session affinity looks for the client first", family: api.IPv4,
		view: view("a", "10.96.0.31", "10.1.0.1 10.1.0.2", affinity), withSets: true,
		want: `
			CLUSTERIPS has 10.96.0.31
			nat DF1: -d 10.96.0.31/32 -p tcp -m tcp --dport 80 -m comment --comment "default/a:http" -j L1
			nat L1 1: -p tcp -m recent --update --seconds 100 --reap --name E1 --mask 255.255.255.255 --rsource -j DNAT --to-destination 10.1.0.1:8080
			nat L1 2: -p tcp -m recent --update --seconds 100 --reap --name E2 --mask 255.255.255.255 --rsource -j DNAT --to-destination 10.1.0.2:8080
			nat L1 3: -p tcp -m statistic --mode random --probability 0.50000000000 -m recent --set --name E1 --mask 255.255.255.255 --rsource -j DNAT --to-destination 10.1.0.1:8080
			nat L1 4: -p tcp -m recent --set --name E2 --mask 255.255.255.255 --rsource -j DNAT --to-destination 10.1.0.2:8080`,
	}, {
		name: "no endpoint at all, with sets", family: api.IPv4, withSets: true,
		view: view("a", "10.96.0.31", "", loadBalancer),
		want: `
			CLUSTERIPS has 10.96.0.31
			REJECT has 10.96.0.31,tcp:80
			REJECT has 203.0.113.1,tcp:80
			filter NT1D6: -p tcp -m tcp --dport 30080 -m comment --comment "default/a:http" -j REJECT`,
	}, {
		name: "no endpoint at all, without sets", family: api.IPv4,
		view: view("a", "10.96.0.31", "", loadBalancer),
		want: `
			filter D10: -d 203.0.113.1/32 -p tcp -m tcp --dport 80 -m comment --comment "default/a:http" -j REJECT
			filter DF1: -d 10.96.0.31/32 -m comment --comment "default/a" -j REJECT
			filter DF1: -d 10.96.0.31/32 -p tcp -m tcp --dport 80 -m comment --comment "default/a:http" -j REJECT
			filter NT1D6: -p tcp -m tcp --dport 30080 -m comment --comment "default/a:http" -j REJECT`,
	}, {
		name: "external addresses with policy Cluster are masqueraded", family: api.IPv4, withSets: true,
		view: view("a", "10.96.0.31", "10.1.0.1", loadBalancer),
		want: `
			CLUSTERIPS has 10.96.0.31
			nat D10: -d 203.0.113.1/32 -p tcp -m tcp --dport 80 -m comment --comment "default/a:http" -j X1
			nat DF1: -d 10.96.0.31/32 -p tcp -m tcp --dport 80 -m comment --comment "default/a:http" -j L1
			nat L1 1: -p tcp -j DNAT --to-destination 10.1.0.1:8080
			nat NT1D6: -p tcp -m tcp --dport 30080 -m comment --comment "default/a:http" -j X1
			nat X1 1: -j MARK
			nat X1 2: -j L1`,
	}, {
		name: "external policy Local drops what is from elsewhere and forwards the node's traffic", family: api.IPv4, withSets: true,
		view: view("a", "10.96.0.31", "10.1.0.1", loadBalancer, externalLocal), opts: outside,
		want: `
			CLUSTERIPS has 10.96.0.31
			DROP has 203.0.113.1,tcp:80
			filter NT1D6: -p tcp -m tcp --dport 30080 -m comment --comment "default/a:http" -j DROP
			nat C1 1: -j OUTSIDERS
			nat C1 2: -j L1
			nat D10: -d 203.0.113.1/32 -p tcp -m tcp --dport 80 -m comment --comment "default/a:http" -j X1
			nat DF1: -d 10.96.0.31/32 -p tcp -m tcp --dport 80 -m comment --comment "default/a:http" -j C1
			nat L1 1: -p tcp -j DNAT --to-destination 10.1.0.1:8080
			nat NT1D6: -p tcp -m tcp --dport 30080 -m comment --comment "default/a:http" -j X1
			nat X1 1: -m addrtype --src-type LOCAL -j MARK
			nat X1 2: -m addrtype --src-type LOCAL -j L1
			nat X1 3: -s 10.0.0.0/8 -j L1
			nat X1 4: -i veth+ -j L1
			nat X1 5: -j ACCEPT`,
	}, {
		name: "source ranges restrict load-balancer IPs only", family: api.IPv4, withSets: true,
		view: view("a", "10.96.0.31", "10.1.0.1", loadBalancer, sourceRanges),
		want: `
			CLUSTERIPS has 10.96.0.31
			S1 for 203.0.113.1: 198.51.100.0/24
			mangle D10: -d 203.0.113.1/32 -p tcp -m tcp --dport 80 -m comment --comment "default/a:http" -m set ! --match-set S1 src -j DROP
			nat D10: -d 203.0.113.1/32 -p tcp -m tcp --dport 80 -m comment --comment "default/a:http" -j X1
			nat DF1: -d 10.96.0.31/32 -p tcp -m tcp --dport 80 -m comment --comment "default/a:http" -j L1
			nat L1 1: -p tcp -j DNAT --to-destination 10.1.0.1:8080
			nat NT1D6: -p tcp -m tcp --dport 30080 -m comment --comment "default/a:http" -j X1
			nat X1 1: -j MARK
			nat X1 2: -j L1`,
	}, {
		name: "source ranges apply before rejecting", family: api.IPv6, withSets: true,
		view: view("a", "", "", loadBalancer, sourceRanges),
		want: `
			REJECT has 2001:db8:1::1,tcp:80
			S1 for 2001:db8:1::1: 2001:db8:2::/48
			filter NT1D6: -p tcp -m tcp --dport 30080 -m comment --comment "default/a:http" -j REJECT
			mangle D10: -d 2001:db8:1::1/128 -p tcp -m tcp --dport 80 -m comment --comment "default/a:http" -m set ! --match-set S1 src -j DROP`,
	}, {
		name: "without sets, a chain has the source ranges", family: api.IPv6,
		view: view("a", "", "fd00::1", loadBalancer, sourceRanges, noNodePort),
		want: `
			F1 for 2001:db8:1::1: -j DROP
			F1 for 2001:db8:1::1: -s 2001:db8:2::/48 -j RETURN
			mangle D10: -d 2001:db8:1::1/128 -p tcp -m tcp --dport 80 -m comment --comment "default/a:http" -j F1
			nat D10: -d 2001:db8:1::1/128 -p tcp -m tcp --dport 80 -m comment --comment "default/a:http" -j X1
			nat L1 1: -p tcp -j DNAT --to-destination [fd00::1]:8080
			nat X1 1: -j MARK
			nat X1 2: -j L1`,
	}, {
		name: "ranges of the other family admit no source", family: api.IPv6, withSets: true,
		view: view("a", "", "fd00::1", loadBalancer, sourceRanges, noNodePort, func(s *api.Service) { s.SourceRanges[0].Prefixes = s.SourceRanges[0].Prefixes[:1] }),
		want: `
			mangle D10: -d 2001:db8:1::1/128 -p tcp -m tcp --dport 80 -m comment --comment "default/a:http" -j DROP
			nat D10: -d 2001:db8:1::1/128 -p tcp -m tcp --dport 80 -m comment --comment "default/a:http" -j X1
			nat L1 1: -p tcp -j DNAT --to-destination [fd00::1]:8080
			nat X1 1: -j MARK
			nat X1 2: -j L1`,
	}, {
		name: "an all-ports service keeps ports", family: api.IPv4, withSets: true,
		view: view("a", "10.96.0.31", "10.1.0.1", allPorts),
		want: `
			CLUSTERIPS has 10.96.0.31
			nat DF1: -d 10.96.0.31/32 -m comment --comment "default/a" -j L1
			nat L1 1: -j DNAT --to-destination 10.1.0.1`,
	}, {
		name: "an unusual name is not in a comment", family: api.IPv4, withSets: true,
		view: view("a", "10.96.0.31", "10.1.0.1", rename),
		want: `
			CLUSTERIPS has 10.96.0.31
			nat DF1: -d 10.96.0.31/32 -p tcp -m tcp --dport 80 -j L1
			nat L1 1: -p tcp -j DNAT --to-destination 10.1.0.1:8080`,
	}} {
		t.Run(c.name, func(t *testing.T) {
			opts := Options{Options: backends.Options{Instance: "test"}}
			if c.opts != nil {
				c.opts(&opts)
			}
			r := renderer{opts: &opts, family: c.family, withSets: c.withSets, env: environment{pods: opts.ClusterCIDRs}}
			var want []string
			for line := range strings.Lines(strings.TrimPrefix(c.want, "\n")) {
				want = append(want, strings.TrimSpace(line))
			}
			if diff := cmp.Diff(want, r.renderService(c.view, nil).lines(&opts)); diff != "" {
				t.Errorf("rules differ (-want +got):\n%s", diff)
			}
		})
	}
}

func TestOwnNames(t *testing.T) {
	for name, want := range map[string]map[string]bool{
		"":     {"KPNG-SERVICES": true, "KPNG-D3F": true, "KPNG-blue-SERVICES": false, "KPNG-": false, "KUBE-SERVICES": false, "KPNG-mine": false},
		"blue": {"KPNG-SERVICES": false, "KPNG-blue-SERVICES": true, "KPNG-blue2-SERVICES": false},
	} {
		for chain, want := range want {
			if got := (&Options{Options: backends.Options{Instance: name}}).isOwn(chain); got != want {
				t.Errorf("instance %q owns chain %s: %t, want %t", name, chain, got, want)
			}
		}
	}
}

// The kernel limits names of chains to 28 characters, and names of sets to 31.
func TestNamesAreShortEnough(t *testing.T) {
	r := renderer{opts: &Options{Options: backends.Options{Instance: "sixsix"}}, family: api.IPv6}
	for _, name := range []string{r.hashed("L", "default/a"), r.name(postrouting), r.setName(clusterIPSet) + "NEW"} {
		if limit := 28; len(name) > limit {
			t.Errorf("%s has %d characters, more than %d", name, len(name), limit)
		}
	}
}

func TestOptionsAreChecked(t *testing.T) {
	for want, opts := range map[string]Options{
		"":                      {},
		"instance":              {Options: backends.Options{Instance: "a-b"}},
		"not a single bit":      {Options: backends.Options{MasqueradeMark: 3}},
		"kube-proxy's":          {Options: backends.Options{MasqueradeMark: 0x4000}},
		"not an interface name": {Options: backends.Options{PodInterfaces: []string{"a b"}}},
		"less than a second":    {LockWait: 1},
		"masquerading outsiders needs CIDRs or interfaces of pods": {Options: backends.Options{MasqueradeOutsiders: true}},
	} {
		_, err := newBackend(options{public: opts})
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("options %+v: error %v, want %q", opts, err, want)
		}
	}
}
