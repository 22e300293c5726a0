// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/updates"
	"k8s.io/apimachinery/pkg/types"
)

func named(name string) types.NamespacedName {
	return types.NamespacedName{Namespace: "default", Name: name}
}

func TestClaimOwners(t *testing.T) {
	ip, other := netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("10.96.0.2")
	http, https := api.Claim{IP: ip, Protocol: api.TCP, Port: 80}, api.Claim{IP: ip, Protocol: api.TCP, Port: 443}
	whole := api.Claim{IP: ip}
	c := claimOwners{}
	c.set(http, named("b"))
	c.set(https, named("a"))
	c.set(api.Claim{IP: other, Protocol: api.TCP, Port: 80}, named("c"))
	check := func(what string, claim api.Claim, key string, want ...string) {
		t.Helper()
		var got []string
		for _, k := range c.conflicting(claim, named(key)) {
			got = append(got, k.Name)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v conflicts with %q, want %q", what, claim, got, want)
		}
	}
	check("another service has the port", http, "x", "b")
	check("the service has the port itself", http, "b")
	check("no service has the port", api.Claim{IP: ip, Protocol: api.UDP, Port: 80}, "x")
	check("two services have ports of the address", whole, "x", "a", "b")
	check("one of them is the service itself", whole, "a", "b")
	c.set(whole, named("b"))
	check("one service has the port and the whole address", http, "x", "b")
	check("two services have the port and the whole address", https, "x", "a", "b")
	c.unset(http, named("a"))
	if !c.has(http, named("b")) {
		t.Error("a service has removed the claim of another one")
	}
	c.unset(http, named("b"))
	if c.has(http, named("b")) || !c.has(https, named("a")) || !c.has(whole, named("b")) {
		t.Errorf("after the removal of %v: %v", http, c)
	}
	c.unset(https, named("a"))
	c.unset(whole, named("b"))
	if keys := slices.Collect(maps.Keys(c)); !slices.Equal(keys, []netip.Addr{other}) {
		t.Errorf("addresses %v remain", keys)
	}
}

func sized(name string, endpoints int) *api.View {
	v := &api.View{Service: &api.Service{Namespace: "default", Name: name}}
	for i := range endpoints {
		v.Endpoints = append(v.Endpoints, api.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})})
	}
	return v
}

func TestSizeOfAChange(t *testing.T) {
	small, big := sized("a", 1), sized("a", 10)
	for _, c := range []struct {
		change Change
		want   int
	}{
		{Change{Old: small, New: big}, updates.Size(big)},
		{Change{Old: big, New: small}, updates.Size(small)},
		{Change{New: big}, updates.Size(big)},
		{Change{Old: big}, updates.Size(big)},
	} {
		if got := c.change.size(); got != c.want {
			t.Errorf("size %d, want %d", got, c.want)
		}
	}
	n := 0
	for updates.Size(sized("a", n)) < updates.LargeSize {
		n++
	}
	for endpoints, want := range map[int]bool{n: true, n - 1: false} {
		v := sized("a", endpoints)
		if isLarge(&Change{New: v}) != want || isLarge(&Change{Old: v, New: small}) != want {
			t.Errorf("a service of size %d is large: %t", updates.Size(v), !want)
		}
	}
}

// TestNextServicesOfAPass has a large service "l", and a service "c" that was already
// delivered.
func TestNextServicesOfAPass(t *testing.T) {
	views := []*api.View{sized("a", 1), sized("b", 1), sized("c", 1), sized("d", 1), sized("l", 1)}
	u := &updates.Update{After: func(key types.NamespacedName) iter.Seq2[types.NamespacedName, updates.View] {
		return func(yield func(types.NamespacedName, updates.View) bool) {
			for _, v := range views {
				next := updates.ViewOf(v)
				if v.Service.Name == "l" {
					next.Size = updates.LargeSize
				}
				if v.Service.Name > key.Name && !yield(v.Key(), next) {
					return
				}
			}
		}
	}}
	p := &delivery{ahead: map[types.NamespacedName]struct{}{named("c"): {}}, large: map[types.NamespacedName]struct{}{}}
	check := func(what string, changes []Change, more, wantMore, left bool, want string) {
		t.Helper()
		var names []string
		for _, c := range changes {
			names = append(names, c.Key.Name)
		}
		if got := strings.Join(names, " "); got != want || more != wantMore {
			t.Errorf("%s: %q, more %t; want %q, %t", what, got, more, want, wantMore)
		}
		if p.hasNext(u) != left {
			t.Errorf("%s: it has services left: %t", what, !left)
		}
	}
	first := Change{Key: named("first")}
	changes, more := p.appendNext(u, 1, 1000, []Change{first})
	check("one service after another change", changes, more, true, true, "first a")
	changes, more = p.appendNext(u, 9, 1, nil)
	check("at least one service", changes, more, true, true, "b")
	changes, more = p.appendNext(u, 9, 1000, nil)
	check("the rest", changes, more, false, true, "d")
	if len(p.ahead) > 0 || len(p.large) != 1 {
		t.Errorf("ahead: %v, large: %v", p.ahead, p.large)
	}
	p.large = map[types.NamespacedName]struct{}{}
	check("only the large service is left", nil, false, false, true, "")
	p.ahead[named("l")] = struct{}{}
	check("it has been delivered before", nil, false, false, false, "")
	p.reached = named("z")
	check("nothing is left", nil, false, false, false, "")
	p.large[named("l")] = struct{}{}
	check("the large service waits", nil, false, false, true, "")
}

// TestChangesAheadOfAPassAreLimited admits new services one after the other, while the pass
// does not proceed.
func TestChangesAheadOfAPassAreLimited(t *testing.T) {
	p := &delivery{ahead: map[types.NamespacedName]struct{}{}, reached: named("c")}
	for _, c := range []struct {
		name string
		want bool
	}{{"d", true}, {"e", true}, {"f", true}, {"g", false}, {"a", true}, {"e", true}} {
		if admitted := p.admit([]Change{{Key: named(c.name), New: sized(c.name, 0)}}, 3); (len(admitted) == 1) != c.want {
			t.Errorf("service %s is admitted: %t", c.name, !c.want)
		}
	}
	if len(p.ahead) != 3 {
		t.Errorf("%d services are ahead of the pass", len(p.ahead))
	}
}

func TestEarlierIgnoresMissingTimes(t *testing.T) {
	first, second, none := time.Unix(1, 0), time.Unix(2, 0), time.Time{}
	for _, c := range [][3]time.Time{{first, second, first}, {second, first, first}, {first, none, first}, {none, first, first}, {none, none, none}} {
		if got := earlier(c[0], c[1]); !got.Equal(c[2]) {
			t.Errorf("earlier(%v, %v) is %v, want %v", c[0], c[1], got, c[2])
		}
	}
}

func TestPendingServices(t *testing.T) {
	at := func(seconds int64) time.Time { return time.Unix(seconds, 0) }
	p := newPending()
	p.put(&unacked{key: named("small"), retryAt: at(20)})
	p.put(&unacked{key: named("large"), retryAt: at(10), large: true})
	p.put(&unacked{key: named("failing"), retryAt: at(30), failures: 2})
	if next, ok := p.nextRetry(); !ok || !next.Equal(at(10)) || p.failing != 1 {
		t.Errorf("the next retry is at %v (%t), and %d services are failing", next, ok, p.failing)
	}
	p.remove(named("large"))
	if next, _ := p.nextRetry(); !next.Equal(at(20)) || p.failing != 1 {
		t.Errorf("without the large service, the next retry is at %v, and %d services are failing", next, p.failing)
	}
	p.put(&unacked{key: named("failing"), retryAt: at(30), failures: 3})
	p.remove(named("small"))
	p.remove(named("failing"))
	if _, ok := p.nextRetry(); ok || p.failing != 0 {
		t.Errorf("%d services are failing, but none is pending", p.failing)
	}
}

func TestPanicOfALargeView(t *testing.T) {
	s := &unacked{key: named("web")}
	u := &updates.Update{View: func(types.NamespacedName) *api.View { panic("no memory") }}
	if c, err := s.computed(u); err == nil || !strings.Contains(err.Error(), "no memory") || c.Key != s.key {
		t.Errorf("change %v, error %v", c, err)
	}
}

// frontendAt returns a view of a service with a cluster IP.
func frontendAt(name, ip string) *api.View {
	s := &api.Service{Namespace: "default", Name: name, IPFamilies: []api.Family{api.IPv4}, Ports: []api.PortMapping{{Protocol: api.TCP, Port: 80}}}
	s.IPs.ClusterIPs.Add(netip.MustParseAddr(ip))
	return &api.View{Service: s}
}

func TestOldClaimsFollowTheRecords(t *testing.T) {
	o, v := newOldClaims(), frontendAt("web", "10.96.0.1")
	for i, records := range []map[types.NamespacedName]*unacked{
		{v.Key(): {key: v.Key(), old: updates.ViewOf(v)}}, {}, {v.Key(): {key: v.Key(), old: updates.ViewOf(v)}},
	} {
		o.changed[v.Key()] = struct{}{}
		o.update(records)
		if len(o.owners) != len(records) {
			t.Errorf("step %d: %d addresses, want %d", i, len(o.owners), len(records))
		}
	}
}

func TestFullStateForgetsClaims(t *testing.T) {
	var s state
	s.track()
	v := frontendAt("web", "10.96.0.1")
	for _, c := range []Change{{Key: v.Key(), New: v}, {Key: v.Key()}} {
		s.commit(s.with(slices.Values([]Change{c})))
		if want := c.New != nil; (len(s.owners) == 1) != want || (len(s.views) == 1) != want {
			t.Errorf("the state has %d addresses and %d views", len(s.owners), len(s.views))
		}
	}
}

func TestFailedServicesAreLogged(t *testing.T) {
	var lines []string
	log := funcr.New(func(_, args string) { lines = append(lines, args) }, funcr.Options{})
	failed := Failed{}
	for i := range maxLogged + 3 {
		failed.Add(named(fmt.Sprintf("s%02d", i)), fmt.Errorf("error %d", i))
	}
	failed[named("s01")] = &panicError{"no memory", []byte("the stack")}
	logFailed(log, failed)
	if len(lines) != maxLogged+1 {
		t.Fatalf("%d lines: %q", len(lines), lines)
	}
	for i, want := range map[int]string{0: `"Service failed; retrying"`, 1: `"stack"="the stack"`, maxLogged: `"More services failed" "services"=3`} {
		if !strings.Contains(lines[i], want) {
			t.Errorf("line %d is %q, want %q", i, lines[i], want)
		}
	}
	for i, line := range lines[:maxLogged] {
		if !strings.Contains(line, fmt.Sprintf(`"name"="s%02d"`, i)) || i != 1 && strings.Contains(line, "stack") {
			t.Errorf("line %d is %q", i, line)
		}
	}
}

// When no service is pending, the index of claims holds no views.
func TestOldViewsAreReleased(t *testing.T) {
	d := NewDriver(nil, Func(nil), Options{})
	d.pending.put(&unacked{key: named("a"), old: updates.ViewOf(sized("a", 1))})
	d.pending.claims.update(d.pending.byKey)
	d.pending.remove(named("a"))
	if len(d.pending.claims.indexed) != 1 {
		t.Fatal("the index did not have the view")
	}
	d.dropTaken(nil, nil)
	if n := len(d.pending.claims.indexed); n > 0 {
		t.Errorf("the index holds %d views", n)
	}
}
