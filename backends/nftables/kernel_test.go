// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/kernelnode"
	"github.com/kpng-project/kpng/internal/sourcelists"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// tableContents describes the elements of services in the table. In the result, each
// frontend has its list with sorted endpoints, because numbers and slots depend on earlier
// changes. Source ranges replace the numbers of their lists. tableContents reports elements
// that belong to no frontend, and lists whose elements do not agree with each other.
func tableContents(t testing.TB, b *backend) []string {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	c := contents{t: t, all: map[elementID]element{}, visited: map[elementID]bool{}}
	var lines []string
	ranges := map[uint32][]string{} // by the number of the list of source ranges
	for _, m := range allMaps() {
		if m.kind >= kindNodePortAddresses {
			continue
		}
		s, err := readSnapshot(t.Context(), b.table.conn, m, nil)
		if err != nil {
			t.Fatal(err)
		}
		if s.foreign != nil {
			t.Errorf("%s has foreign elements", m.name())
		}
		for e := range s.all() {
			if m.kind == kindSources {
				r, _ := sourcelists.ParseKey(e.key[:m.keyLen()])
				ranges[r.List] = append(ranges[r.List], r.Prefix.String())
			} else {
				c.all[e.elementID] = e
			}
		}
	}
	used := map[uint32]bool{}
	for id, e := range c.all {
		switch {
		case id.m.kind == kindRestricted:
			used[e.value.number()] = true
			admitted := ranges[e.value.number()]
			slices.Sort(admitted)
			lines = append(lines, fmt.Sprint(id, " from ", strings.Join(admitted, " ")))
		case id.m.kind == kindFrontends:
			number := e.value.number()
			key := listKey{family: id.m.family, port: 1}
			if id.m.match == matchAddress {
				key.port = 0
			} else {
				key.protocol = kernelnode.ProtocolOf(id.key[id.m.keyLen()-8])
			}
			line := fmt.Sprintf("%s : %d %s", id, number&handlingMask, c.list(&list{listKey: key, number: number &^ handlingMask}))
			if number&handlingMask == uint32(handleLocal) {
				l := list{listKey: key, number: number &^ handlingMask}
				if shortcut, ok := c.get(l.shortcutID()); ok {
					l.number = shortcut.value.number()
					line += " / " + c.list(&l)
				} else {
					t.Errorf("%s has no list for packets of the node", e)
				}
			}
			lines = append(lines, line)
		case !id.m.belongsToList():
			lines = append(lines, e.String())
		}
	}
	for id, e := range c.all {
		// A pass removes these elements at its end.
		if id.m.belongsToList() && !c.visited[id] && b.table.pass == nil {
			t.Errorf("%s belongs to no frontend", e)
		}
	}
	for number := range ranges {
		if !used[number] {
			t.Errorf("no frontend uses the list %x of source ranges %v", number, ranges[number])
		}
	}
	slices.Sort(lines)
	return lines
}

type contents struct {
	t       testing.TB
	all     map[elementID]element
	visited map[elementID]bool
}

func (c *contents) get(id elementID) (element, bool) {
	e, ok := c.all[id]
	c.visited[id] = true
	return e, ok
}

// list describes a list: its chain and its sorted endpoints.
func (c *contents) list(l *list) string {
	e, _ := c.get(l.id())
	class, ok := classOfElement(&e.elementID, &e.value)
	if !ok {
		c.t.Errorf("list %s has no class", formatNumber(l.number))
	}
	var endpoints []string
	for slot := 0; ; slot++ {
		e, ok := c.get(l.slotID(slot))
		if !ok {
			break
		}
		if isNumbered(l.number) {
			if e, ok = c.get(l.numberID(e.value.number() & endpointMask)); !ok {
				c.t.Errorf("%s has no endpoint", l.slotID(slot))
			}
		}
		endpoints = append(endpoints, endpointText(l, e.value))
	}
	n := len(endpoints)
	if class.numbered {
		slices.Sort(endpoints)
		endpoints = slices.Compact(endpoints)
	}
	isComplete := class.algorithm == api.Random || n == 1<<class.size
	if !isComplete || class.size != sizeOf(n) || (class.verdict == nodeview.Forward) != (n > 0) {
		c.t.Errorf("list %s has %d slots and class %s", formatNumber(l.number), n, class.name())
	}
	slices.Sort(endpoints)
	return strings.Join(append([]string{class.name()}, endpoints...), ", ")
}

// randomView returns a random view of a service. In one of six calls, it returns nil.
// Services may share addresses, but at different ports.
func randomView(rng *rand.Rand, name string, number int) *api.View {
	if rng.IntN(6) == 0 {
		return nil
	}
	var eps []string
	for range rng.IntN(5) {
		here := []string{"", "!"}[rng.IntN(2)]
		eps = append(eps, fmt.Sprintf("%s10.0.0.%d", here, rng.IntN(20)), fmt.Sprintf("%sfd01::%x", here, rng.IntN(20)))
	}
	slices.Sort(eps)
	eps = slices.CompactFunc(eps, func(a, b string) bool { return strings.TrimPrefix(a, "!") == strings.TrimPrefix(b, "!") })
	v := view(name, []string{fmt.Sprintf("10.96.0.%d", number), fmt.Sprintf("fd00::%x", number)}, eps, func(s *api.Service) {
		s.Ports[0].Port = int32(8000 + number)
		if rng.IntN(2) == 0 {
			s.Type = api.LoadBalancer
			s.ExternalTrafficToLocal = rng.IntN(2) == 0
			s.Ports[0].NodePort = int32(30000 + number)
			shared := rng.IntN(3)
			s.IPs.ExternalIPs = api.NewIPSet(netip.AddrFrom4([4]byte{203, 0, 113, byte(shared)}))
			s.IPs.LoadBalancerIPs = api.NewIPSet(netip.AddrFrom4([4]byte{203, 0, 113, byte(100 + shared)}), netip.MustParseAddr("2001:db8::100"))
			if rng.IntN(2) == 0 {
				s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.LoadBalancerIPs, Prefixes: []netip.Prefix{
					netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 0, 2, 0}), 20+rng.IntN(10)).Masked(),
					netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("2001:db8::/64"),
				}}}
			}
		}
		s.AllPorts = rng.IntN(10) == 0
		if s.AllPorts {
			s.IPs.ExternalIPs = api.NewIPSet(netip.AddrFrom4([4]byte{203, 0, 113, byte(200 + number)}))
			s.IPs.LoadBalancerIPs, s.SourceRanges = api.IPSet{}, nil
		}
		if rng.IntN(4) == 0 {
			s.AffinitySeconds = int32(10 + rng.IntN(3))
		}
	})
	if rng.IntN(4) == 0 {
		v.Service.Algorithm = api.Algorithm(rng.IntN(3))
	}
	if rng.IntN(2) == 0 {
		for i := range v.Endpoints {
			v.Endpoints[i].Weight = int32(rng.IntN(5)) * 50
		}
	}
	return v
}

// TestRandomSequenceOfChanges makes many changes. Then it loads only the final views into
// another table, and checks that both tables are equal.
func TestRandomSequenceOfChanges(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			b, ns := start(t, Options{})
			now := map[types.NamespacedName]*api.View{}
			full := func() *sink.Changes {
				var list []sink.Change
				for _, v := range now {
					list = append(list, set(v))
				}
				return batchOf(true, list...)
			}
			mustSync(t, b, full())
			for range 40 {
				var list []sink.Change
				for _, n := range rng.Perm(12)[:1+rng.IntN(5)] {
					name := fmt.Sprint("svc-", n)
					key := types.NamespacedName{Namespace: "default", Name: name}
					old, changed := now[key], randomView(rng, name, n)
					list = append(list, sink.Change{Key: key, Old: old, New: changed})
					now[key] = changed
					if changed == nil {
						delete(now, key)
					}
				}
				mustSync(t, b, batchOf(false, list...))
				switch rng.IntN(8) {
				case 0:
					mustSync(t, b, full())
				case 1:
					if err := verifyAll(t, b); err != nil {
						t.Fatal(err)
					}
				case 2:
					b = startIn(t, ns, Options{})
					mustSync(t, b, full())
				}
			}
			fresh, _ := start(t, Options{})
			mustSync(t, fresh, full())
			if err := verifyAll(t, b); err != nil {
				t.Error(err)
			}
			if diff := cmp.Diff(tableContents(t, fresh), tableContents(t, b)); diff != "" {
				t.Errorf("the table differs from a fresh load (-fresh +actual):\n%s", diff)
			}
			if diff := cmp.Diff(chainNames(t, fresh), chainNames(t, b)); diff != "" {
				t.Errorf("the chains differ from a fresh load (-fresh +actual):\n%s", diff)
			}
			mustSync(t, b, batchOf(true))
			if left := tableContents(t, b); len(left) > 0 {
				t.Errorf("a pass without services leaves %v", left)
			}
		})
	}
}

// chainNames returns the names of the chains in the table, except the chains of unused
// classes. Verify keeps some of these chains.
func chainNames(t testing.TB, b *backend) []string {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	l, err := b.table.conn.inspect(t.Context(), b.table.conn.Table)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range b.table.state.unusedClasses() {
		if !c.isSkeletonChain() {
			delete(l.Chains, c.name())
		}
	}
	return slices.Sorted(maps.Keys(l.Chains))
}

func TestDriftIsFoundAndRepaired(t *testing.T) {
	for name, damage := range map[string]string{
		"the table is deleted":                 "delete table inet kpng",
		"the table is flushed":                 "flush table inet kpng",
		"a map is flushed":                     "flush map inet kpng endpoints4",
		"an element is deleted":                "delete element inet kpng services4 { 10.96.0.1 . tcp . 80 }",
		"an element is added":                  "add element inet kpng cluster-ips4 { 10.99.0.1 }",
		"an element leads elsewhere":           "delete element inet kpng endpoints4 { 7000:10 . tcp . 1 }; add element inet kpng endpoints4 { 7000:10 . tcp . 1 : 1.2.3.4 . 5 }",
		"a skeleton chain is flushed":          "flush chain inet kpng prerouting",
		"a rule is added":                      "add rule inet kpng list4-2 counter",
		"a chain is added":                     "add chain inet kpng other",
		"a chain with a jump is added":         "add chain inet kpng bar; add chain inet kpng foo; add rule inet kpng foo jump bar",
		"a set is added":                       "add set inet kpng other { type ipv4_addr; }",
		"a map is added":                       "add chain inet kpng foo; add chain inet kpng bar; add map inet kpng other { type ipv4_addr : verdict; }; add element inet kpng other { 10.1.2.3 : jump bar }; add rule inet kpng foo ip saddr vmap @other",
		"a rule with a set is added":           "add set inet kpng other { type ipv4_addr; }; add rule inet kpng list4-2 ip saddr @other counter",
		"an anonymous set is added":            "add rule inet kpng list4-2 ip saddr { 10.1.2.3, 10.1.2.4 } counter",
		"a source range is added":              "add element inet kpng sources4 { 0:108 . 10.0.0.0 }",
		"the rules for source ranges are lost": "flush chain inet kpng sources4",
		"ranges that are not prefixes":         "add element inet kpng sources4 { 0:108 . 10.1.2.3, 0:100 . 10.0.0.0, 0:1ff . 10.1.2.3 }",
		"an affinity chain is empty":           "flush chain inet kpng affinity4-1-100s",
		"a class is deleted":                   "delete element inet kpng classes4 { 7f00:2 }",
		"a class leads elsewhere":              "delete element inet kpng classes4 { 7f00:2 }; add element inet kpng classes4 { 7f00:2 : goto affinity4-1-100s }",
		"a class of affinity is deleted":       "flush map inet kpng classes4; flush chain inet kpng affinity4-1-100s; delete chain inet kpng slot4-1",
		"numbers of endpoints are gone":        "flush map inet kpng slots4",
		"the map of clients is deleted":        "flush chain inet kpng affinity4-1-100s; flush chain inet kpng client4; delete map inet kpng clients4",
		"a chain's policy is changed":          "add chain inet kpng prerouting { policy drop; }",
		"the table is dormant":                 "add table inet kpng { flags dormant; }",
	} {
		t.Run(name, func(t *testing.T) {
			b, ns := start(t, Options{})
			all := batchOf(true,
				set(view("web", []string{"10.96.0.1", "fd00::1"}, []string{"10.0.0.1", "10.0.0.2", "fd01::1"}, nil)),
				set(view("sticky", []string{"10.96.0.2"}, []string{"10.0.0.1"}, func(s *api.Service) {
					s.AffinitySeconds = 100
				})),
				set(view("from", []string{"10.96.0.3"}, []string{"10.0.0.1"}, func(s *api.Service) {
					s.Type = api.LoadBalancer
					s.IPs.LoadBalancerIPs = api.NewIPSet(netip.MustParseAddr("203.0.113.1"))
					s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.LoadBalancerIPs, Prefixes: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}}
				})))
			mustSync(t, b, all)
			if err := verifyAll(t, b); err != nil {
				t.Fatalf("before: %v", err)
			}
			before := runNFT(t, ns, "", "list", "table", "inet", "kpng")
			runNFT(t, ns, strings.ReplaceAll(damage, "; ", "\n"), "-f", "-")

			err := verifyAll(t, b)
			if !errors.Is(err, sink.ErrStartOver) {
				t.Fatalf("Verify returns %v, want ErrStartOver", err)
			}
			t.Log(err)
			mustSync(t, b, all)
			if err := verifyAll(t, b); err != nil {
				t.Errorf("after: %v", err)
			}
			if diff := cmp.Diff(lines(before), lines(runNFT(t, ns, "", "list", "table", "inet", "kpng"))); diff != "" {
				t.Errorf("the pass did not restore the table (-before +after):\n%s", diff)
			}
		})
	}
}

// lines returns the lines of s, sorted. nft lists elements in any order, and chains in
// the order of their creation. So the outputs of nft for two equal tables can differ. The
// result has neither the numbers of lists and endpoints, nor the seed of the hash of clients.
func lines(s string) []string {
	list := fields(s)
	for i := range list {
		list[i] = numberText.ReplaceAllString(list[i], "NUMBER")
		list[i] = sourceList.ReplaceAllString(list[i], "LIST$1")
	}
	slices.Sort(list)
	return list
}

// fields returns the lines of s and the elements in them.
func fields(s string) []string {
	list := strings.FieldsFunc(s, func(r rune) bool { return r == '\n' || r == ',' || r == '{' || r == '}' })
	for i := range list {
		list[i] = strings.TrimSpace(list[i])
	}
	return list
}

var (
	numberText = regexp.MustCompile(`\b[4-7][0-7]\w\w:\w+( \. \d+ :)?|seed 0x\w+`)
	sourceList = regexp.MustCompile(`\b0:\w+(\w\w)\b`)
)

// TestAChangeRepairsDriftOfItsService checks that a change succeeds even if another
// program has changed elements of the service. If the table was deleted, the change
// starts a new pass.
func TestAChangeRepairsDriftOfItsService(t *testing.T) {
	b, ns := start(t, Options{})
	old := view("web", []string{"10.96.0.1"}, []string{"10.0.0.1", "10.0.0.2"}, nil)
	other := view("other", []string{"10.96.0.2"}, []string{"10.0.0.3"}, nil)
	mustSync(t, b, batchOf(true, set(old), set(other)))
	runNFT(t, ns, "delete element inet kpng lists4 { 7000:10 }\n"+
		"add element inet kpng endpoints4 { 7000:10 . tcp . 3 : 1.2.3.4 . 5 }\n", "-f", "-")
	changed := view("web", []string{"10.96.0.1"}, []string{"10.0.0.1", "10.0.0.2", "10.0.0.4"}, nil)
	mustSync(t, b, batchOf(false, sink.Change{Old: old, New: changed}, sink.Change{Old: other, Key: other.Key()}))
	checkFresh(t, b, set(changed))
	runNFT(t, ns, "", "delete", "table", "inet", "kpng")
	if err := b.Sync(t.Context(), batchOf(false, sink.Change{Old: changed, New: old})); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("without a table, Sync returns %v, want ErrStartOver", err)
	}
	mustSync(t, b, batchOf(true, set(old)))
}

// TestSourceRangesChange replaces source ranges by wider and narrower ones, in a Sync and
// during a restart.
func TestSourceRangesChange(t *testing.T) {
	from := func(ranges ...string) *api.View {
		return view("web", []string{"10.96.0.1"}, []string{"10.0.0.1"}, func(s *api.Service) {
			s.Type = api.LoadBalancer
			s.IPs.LoadBalancerIPs = api.NewIPSet(netip.MustParseAddr("203.0.113.1"))
			filter := api.SourceRanges{TargetIPs: s.IPs.LoadBalancerIPs}
			for _, r := range ranges {
				filter.Prefixes = append(filter.Prefixes, netip.MustParsePrefix(r))
			}
			s.SourceRanges = []api.SourceRanges{filter}
		})
	}
	wide, narrow := from("10.0.0.0/8"), from("10.0.0.0/16", "10.1.0.0/16", "10.0.0.0/24")
	b, ns := start(t, Options{})
	check := func(when string, want ...string) {
		t.Helper()
		if err := verifyAll(t, b); err != nil {
			t.Errorf("%s: %v", when, err)
		}
		var got []string
		for _, line := range tableContents(t, b) {
			if r, ok := strings.CutPrefix(line, "restricted-services4 203.0.113.1 . tcp . 80 from "); ok {
				got = strings.Fields(r)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
	}
	mustSync(t, b, batchOf(true, set(wide)))
	check("at first", "10.0.0.0/8")
	mustSync(t, b, batchOf(false, sink.Change{Old: wide, New: narrow}))
	check("narrower", "10.0.0.0/16", "10.0.0.0/24", "10.1.0.0/16")
	mustSync(t, b, batchOf(false, sink.Change{Old: narrow, New: wide}))
	check("wider", "10.0.0.0/8")
	b = startIn(t, ns, Options{})
	mustSync(t, b, batchOf(true, set(narrow)))
	check("narrower at a restart", "10.0.0.0/16", "10.0.0.0/24", "10.1.0.0/16")
	b = startIn(t, ns, Options{})
	mustSync(t, b, batchOf(true, set(wide)))
	check("wider at a restart", "10.0.0.0/8")
}
