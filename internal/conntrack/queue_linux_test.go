// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"net/netip"
	"reflect"
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

// TestClassesAgreeWithFrontends checks that each frontend has the verdict of its class.
func TestClassesAgreeWithFrontends(t *testing.T) {
	const dual = "ip 10.96.0.10 fd96::10\nexternal 192.0.2.1 2001:db8::1\nport 53:30053\nport 53:30053/TCP\n"
	sameNodePort := service(t, "dns", dual+"port 54:30053\nready 10.1.0.1")
	headless := service(t, "dns", "external 192.0.2.1 2001:db8::1\nport 53\nready 10.1.0.1")
	headless.Service.IPs.Headless, headless.Service.IPFamilies = true, nil
	oneFamily := service(t, "dns", dual+"ready 10.1.0.1 fd01::1")
	oneFamily.Service.IPFamilies = []api.Family{api.IPv4}
	balanced := service(t, "dns", dual+"ready 10.1.0.1")
	balanced.Service.IPs.LoadBalancerIPs.Add(netip.MustParseAddr("192.0.2.9"))
	lost := service(t, "dns", dual+"ready 10.1.0.1")
	lost.Lost = []api.LostClaim{{Claim: api.Claim{IP: netip.MustParseAddr("192.0.2.1"), Protocol: api.UDP, Port: 53}}}
	for name, view := range map[string]*api.View{
		"both families":         service(t, "dns", dual+"ready 10.1.0.1 fd01::1"),
		"one family is served":  oneFamily,
		"endpoints of a family": service(t, "dns", dual+"ready fd01::1"),
		"Local policies":        service(t, "dns", dual+"local\nready 10.1.0.1"),
		"no endpoints":          service(t, "dns", dual),
		"equal node ports":      sameNodePort,
		"headless":              headless,
		"load balancer":         balanced,
		"a lost claim":          lost,
		"all ports":             service(t, "dns", "external 192.0.2.1\nall-ports\nready 10.1.0.1"),
		"deleted":               nil,
	} {
		found, frontends := 0, 0
		for f := range nodeview.Frontends(view) {
			frontends++
			for _, protocol := range []uint8{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
				v, ok := verdictsOf(view)[protocol][classOf(f.FrontendKey)]
				if !ok {
					continue
				}
				found++
				want := verdict{existing: f.Existing, forwards: f.Elsewhere.Verdict == nodeview.Forward || f.Node.Verdict == nodeview.Forward}
				if !tracks(protocol, f.Protocol) || v != want {
					t.Errorf("%s: %s has %+v, want %+v", name, f.FrontendKey, v, want)
				}
			}
		}
		if name == "all ports" {
			frontends *= 2
		}
		if found != frontends || (frontends == 0) != (view == nil) {
			t.Errorf("%s: %d of %d frontends have a verdict", name, found, frontends)
		}
	}
}

// TestQueuedGroupsFollowTheirService changes a service again before the pass for its
// earlier changes.
func TestQueuedGroupsFollowTheirService(t *testing.T) {
	const both, one = "ip 10.96.0.10\nport 53\nready 10.1.0.1 10.1.0.2", "ip 10.96.0.10\nport 53\nready 10.1.0.2"
	const web = "ip 10.96.0.10\nport 80/TCP"
	toWeb := unanswered(9, "10.96.0.10:80")
	for name, test := range map[string]struct {
		steps         []string
		kept, deleted []connection
	}{
		"the service gets an address": {
			steps: []string{both, one, one + "\nexternal 192.0.2.1"},
			kept:  []connection{udp(2, dns, pod2)}, deleted: []connection{udp(1, dns, pod1), udp(3, "192.0.2.1:53", pod1)},
		},
		"the service loses and regains an address": {
			steps: []string{both, "ip 10.96.0.11\nport 53\nready 10.1.0.2", one},
			kept:  []connection{udp(2, dns, pod2)}, deleted: []connection{udp(1, dns, pod1), udp(3, "10.96.0.11:53", pod2)},
		},
		"the service is deleted": {
			steps:   []string{both, one, ""},
			deleted: []connection{udp(1, dns, pod1), udp(2, dns, pod2)},
		},
		"the only endpoint of a TCP service comes and goes": {
			steps: []string{web, web + "\nready 10.1.0.1", web},
			kept:  []connection{toWeb},
		},
		"a TCP service gets an endpoint and an address": {
			steps:   []string{web, web + "\nready 10.1.0.1", web + "\nready 10.1.0.1\nexternal 192.0.2.1"},
			deleted: []connection{toWeb, unanswered(1, "192.0.2.1:80")},
		},
		"a TCP service gets a second endpoint": {
			steps:   []string{web, web + "\nready 10.1.0.1", web + "\nready 10.1.0.1 10.1.0.2"},
			deleted: []connection{toWeb},
		},
		"a TCP service gets an address": {
			steps: []string{web + "\nready 10.1.0.1", web + "\nready 10.1.0.1\nexternal 192.0.2.1"},
			kept:  []connection{toWeb}, deleted: []connection{unanswered(1, "192.0.2.1:80")},
		},
	} {
		t.Run(name, func(t *testing.T) {
			n, opts := newNamespace(t)
			r := newReconciler(opts)
			var before []*api.View
			for i, text := range test.steps {
				var now []*api.View
				if text != "" {
					now = []*api.View{service(t, "dns", text)}
				}
				r.Sync(t.Context(), changesBetween(before, now))
				before = now
				if i == 0 {
					if p := r.read(t.Context()); p.err != nil {
						t.Fatal(p.err)
					}
					createEntries(t, n.FD, append(slices.Clone(test.kept), test.deleted...)...)
				}
			}
			p := r.read(t.Context())
			if diff := gocmp.Diff(texts(test.kept), tableEntries(t, n.FD)); diff != "" || p.err != nil {
				t.Errorf("connections after pass %+v (-want +got):\n%s", p, diff)
			}
			if len(r.queue.due) > 0 || len(r.queue.removed) > 0 || len(r.queue.tcp.groups) > 0 || len(r.queue.tcp.records) > 0 {
				t.Errorf("the queue is not empty after the pass: %+v", r.queue)
			}
		})
	}
}

// TestAddressReturnsToItsService delivers a second service that takes over an address.
// Then the first service gets its address back, and later loses an endpoint.
func TestAddressReturnsToItsService(t *testing.T) {
	const both = "ip 10.96.0.10\nport 53\nready 10.1.0.1 10.1.0.2"
	n, opts := newNamespace(t)
	r := newReconciler(opts)
	first := services(t, map[string]string{"first": both})
	second := services(t, map[string]string{"second": "ip 10.96.0.10\nport 53\nready 10.1.0.3"})
	r.Sync(t.Context(), wholePass(first))
	r.Sync(t.Context(), changesBetween(nil, second))
	r.Sync(t.Context(), &sink.Changes{Services: slices.Values([]sink.Change{
		{Key: first[0].Key(), New: first[0], Unsure: true}, {Key: second[0].Key(), Old: second[0]},
	})})
	r.read(t.Context())
	createEntries(t, n.FD, udp(1, dns, pod1), udp(2, dns, pod2))
	r.Sync(t.Context(), changesBetween(first, services(t, map[string]string{"first": "ip 10.96.0.10\nport 53\nready 10.1.0.2"})))
	r.read(t.Context())
	if diff := gocmp.Diff(texts([]connection{udp(2, dns, pod2)}), tableEntries(t, n.FD)); diff != "" {
		t.Errorf("connections (-want +got):\n%s", diff)
	}
}

// TestQueueHasFewEndpoints checks that a queue has the endpoints of a TCP service only if
// an endpoint may be a destination of the service.
func TestQueueHasFewEndpoints(t *testing.T) {
	for text, want := range map[string]bool{
		"ip 10.96.0.10\nport 80/TCP\nready 10.1.0.1":       false,
		"external 10.1.0.2\nall-ports\nready 10.1.0.1":     false,
		"external 10.1.0.1\nall-ports\nready 10.1.0.1":     true,
		"ip 10.96.0.10\nport 80:30080/TCP\nready 10.1.0.1": true, // a node may have the address of the endpoint
	} {
		q := newQueue()
		q.add(&sink.Changes{Services: slices.Values([]sink.Change{{Key: types.NamespacedName{Name: "web"}, New: service(t, "web", text)}})})
		groups, got := 0, false
		for _, r := range q.tcp.records {
			for _, g := range r.groups {
				groups++
				got = got || g.existing != nodeview.Existing{}
			}
			if len(r.view.Endpoints) > 0 {
				t.Errorf("%q: a record has endpoints", text)
			}
		}
		if groups == 0 || got != want {
			t.Errorf("%q: %d groups are due, with endpoints: %t, want %t", text, groups, got, want)
		}
	}
}

// A first pass has nothing to prune, so a new queue need not know which services it delivers.
func TestFirstPassStoresNoKeys(t *testing.T) {
	views := services(t, map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.1"})
	q := newQueue()
	for i, stored := range []bool{false, true} {
		c := wholePass(views)
		c.Last = false
		if q.add(c); reflect.DeepEqual(q.pass, sink.Pass{}) == stored {
			t.Errorf("in pass %d, the queue stores keys: %t, want %t", i+1, !stored, stored)
		}
	}
}
