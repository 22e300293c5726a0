// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
	"k8s.io/utils/clock"
)

// startReconciler starts a reconciler that runs until the test ends. It returns the
// reconciler and the results of its passes.
func startReconciler(t testing.TB, opts Options) (*reconciler, *[]outcome) {
	t.Helper()
	var reads []outcome
	opts.Observe = func(seen, deleted int, took time.Duration, err error) {
		reads = append(reads, outcome{seen: seen, deleted: deleted, took: took, err: err})
	}
	r := newReconciler(opts)
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, stop := context.WithTimeout(context.Background(), time.Minute)
		defer stop()
		if err := r.Stop(ctx); err != nil {
			t.Error(err)
		}
	})
	return r, &reads
}

// syncAndFlush passes the changes c to r and waits until r has deleted the stale
// connections.
func syncAndFlush(t testing.TB, r *reconciler, c *sink.Changes) {
	t.Helper()
	if err := r.Sync(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	if err := r.flush(ctx); err != nil {
		t.Fatal(err)
	}
}

const (
	dns     = "10.96.0.10:53"
	pod1    = "10.1.0.1:5053"
	pod2    = "10.1.0.2:5053"
	dns6    = "[fd96::10]:53"
	pod61   = "[fd01::1]:5053"
	pod62   = "[fd01::2]:5053"
	node    = "10.2.0.1:30053"
	foreign = "10.2.0.9:30053"
)

func tcp(c connection) connection {
	c.protocol = unix.IPPROTO_TCP
	return c
}

// unanswered returns a TCP connection without a reply and without translation.
func unanswered(sport uint16, to string) connection {
	return synSent(udp(sport, to, to))
}

func synSent(c connection) connection {
	c = tcp(c)
	c.state = tcpSynSent
	return c
}

func inZone(zone uint16, c connection) connection {
	c.zone = zone
	return c
}

func masqueraded(c connection) connection {
	c.back = netip.MustParseAddrPort("10.1.0.254:60000")
	return c
}

func TestStaleConnectionsAreDeleted(t *testing.T) {
	const both = "ip 10.96.0.10\nport 53\nready 10.1.0.1 10.1.0.2"
	for name, test := range map[string]struct {
		before, now map[string]string
		kept        []connection
		deleted     []connection
		// onRestart is true if the first pass of a new reconciler also deletes the stale
		// connections. If it is false, that pass deletes no connections.
		onRestart bool
	}{
		"an endpoint is removed from its slice": {
			before: map[string]string{"dns": both}, now: map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.2"},
			kept: []connection{udp(2, dns, pod2)}, deleted: []connection{udp(1, dns, pod1)}, onRestart: true,
		},
		"an endpoint no longer serves": {
			before: map[string]string{"dns": both}, now: map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.2\ndying 10.1.0.1"},
			kept: []connection{udp(2, dns, pod2)}, deleted: []connection{udp(1, dns, pod1)}, onRestart: true,
		},
		"an endpoint starts draining": {
			before: map[string]string{"dns": both}, now: map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.2\ndraining 10.1.0.1"},
			kept: []connection{udp(1, dns, pod1), udp(2, dns, pod2)}, onRestart: true,
		},
		"a policy removes an endpoint from all lists": {
			before: map[string]string{"dns": both}, now: map[string]string{"dns": both + "\nlocal"},
			kept: []connection{udp(1, dns, pod1), udp(2, dns, pod2)}, onRestart: true,
		},
		"a draining endpoint is removed": {
			before: map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.2\ndraining 10.1.0.1"},
			now:    map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.2"},
			kept:   []connection{udp(2, dns, pod2)}, deleted: []connection{udp(1, dns, pod1)}, onRestart: true,
		},
		"the service scales to zero": {
			before: map[string]string{"dns": both}, now: map[string]string{"dns": "ip 10.96.0.10\nport 53"},
			deleted: []connection{udp(1, dns, pod1), udp(2, dns, pod2)}, onRestart: true,
		},
		"the service is deleted": {
			before: map[string]string{"dns": both}, now: map[string]string{},
			// A new reconciler keeps both flows, because it does not know which program translated
			// them.
			deleted: []connection{udp(1, dns, pod1), udp(2, dns, pod2)},
		},
		"the service loses one address": {
			before: map[string]string{"dns": both + "\nexternal 192.0.2.53"}, now: map[string]string{"dns": both},
			kept: []connection{udp(1, dns, pod1)}, deleted: []connection{udp(2, "192.0.2.53:53", pod1)},
		},
		"a flow bypassed a service that gets its first endpoint": {
			before: map[string]string{"dns": "ip 10.96.0.10\nport 53"}, now: map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.2"},
			deleted: []connection{udp(1, dns, dns)}, onRestart: true,
		},
		"a flow bypassed a new service": {
			before: map[string]string{}, now: map[string]string{"dns": both},
			deleted: []connection{udp(1, dns, dns)}, onRestart: true,
		},
		"a flow bypasses a service without endpoint on this node": {
			before: map[string]string{"dns": both + "\nlocal"}, now: map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.2\nlocal"},
			kept: []connection{udp(1, dns, dns)}, deleted: []connection{udp(2, dns, pod1)}, onRestart: true,
		},
		"a masqueraded connection": {
			before: map[string]string{"dns": both}, now: map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.2"},
			deleted: []connection{masqueraded(udp(1, dns, pod1))}, onRestart: true,
		},
		"IPv6": {
			before: map[string]string{"dns": "ip fd96::10\nport 53\nready fd01::1 fd01::2"}, now: map[string]string{"dns": "ip fd96::10\nport 53\nready fd01::2"},
			kept: []connection{udp(2, dns6, pod62)}, deleted: []connection{udp(1, dns6, pod61)}, onRestart: true,
		},
		"both families": {
			before: map[string]string{"dns": "ip 10.96.0.10 fd96::10\nport 53\nready 10.1.0.1 fd01::1"}, now: map[string]string{"dns": "ip 10.96.0.10 fd96::10\nport 53"},
			deleted: []connection{udp(1, dns, pod1), udp(2, dns6, pod61)}, onRestart: true,
		},
		"TCP connections are kept": {
			before: map[string]string{"dns": "ip 10.96.0.10\nport 53\nport 53/TCP\nready 10.1.0.1"}, now: map[string]string{"dns": "ip 10.96.0.10\nport 53\nport 53/TCP"},
			kept: []connection{tcp(udp(1, dns, pod1))}, deleted: []connection{udp(2, dns, pod1)}, onRestart: true,
		},
		"a TCP connection started before its service existed": {
			before: map[string]string{}, now: map[string]string{"web": "ip 10.96.0.10 fd96::10\nport 80:30080/TCP\nready 10.1.0.1 fd01::1"},
			kept:    []connection{tcp(udp(1, "10.96.0.10:80", "10.96.0.10:80")), synSent(udp(2, "10.96.0.10:80", "10.1.0.1:5080")), unanswered(3, "10.96.0.10:81"), unanswered(4, "10.2.0.9:30080")},
			deleted: []connection{unanswered(5, "10.96.0.10:80"), unanswered(6, "[fd96::10]:80"), unanswered(7, "10.2.0.1:30080")}, onRestart: true,
		},
		"a TCP connection started before its service had an endpoint": {
			before: map[string]string{"web": "ip 10.96.0.10\nport 80/TCP"}, now: map[string]string{"web": "ip 10.96.0.10\nport 80/TCP\nready 10.1.0.1"},
			deleted: []connection{unanswered(1, "10.96.0.10:80")}, onRestart: true,
		},
		"a TCP connection to a service that still has no endpoint": {
			before: map[string]string{}, now: map[string]string{"web": "ip 10.96.0.10\nport 80/TCP"},
			kept: []connection{unanswered(1, "10.96.0.10:80")}, onRestart: true,
		},
		"a TCP connection started before an all-ports service existed": {
			before: map[string]string{}, now: map[string]string{"web": "external 192.0.2.53\nall-ports\nready 10.1.0.1"},
			deleted: []connection{unanswered(1, "192.0.2.53:77"), udp(2, "192.0.2.53:77", "192.0.2.53:77")}, onRestart: true,
		},
		"another port of the same address is kept": {
			before: map[string]string{"dns": both}, now: map[string]string{},
			kept: []connection{udp(1, "10.96.0.10:54", pod1)},
		},
		"another port of the same endpoint is kept": {
			before: map[string]string{"dns": "ip 10.96.0.10\nport 53\nport 54\nready 10.1.0.1"}, now: map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.1"},
			kept: []connection{udp(1, dns, pod1)}, deleted: []connection{udp(2, "10.96.0.10:54", "10.1.0.1:5054")},
		},
		"the address of an endpoint with another port is not an endpoint": {
			before: map[string]string{"dns": "ip 10.96.0.10\nport 53"}, now: map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.1"},
			deleted: []connection{udp(1, dns, "10.1.0.1:53")}, onRestart: true,
		},
		"connections in other conntrack zones are kept": {
			before: map[string]string{"dns": both}, now: map[string]string{"dns": "ip 10.96.0.10\nport 53"},
			kept: []connection{inZone(7, udp(1, dns, pod1))}, deleted: []connection{udp(1, dns, pod1)}, onRestart: true,
		},
		"node ports are matched by node address and port": {
			before: map[string]string{"dns": "ip 10.96.0.10\nport 53:30053\nready 10.1.0.1"}, now: map[string]string{"dns": "ip 10.96.0.10\nport 53:30053"},
			kept: []connection{udp(1, foreign, pod1), udp(2, "10.2.0.1:30054", pod1)}, deleted: []connection{udp(3, node, pod1), udp(4, dns, pod1)}, onRestart: true,
		},
		"two services swap addresses": {
			before: map[string]string{"a": "ip 10.96.0.10\nport 53\nready 10.1.0.1", "b": "ip 10.96.0.11\nport 53\nready 10.1.0.2"},
			now:    map[string]string{"a": "ip 10.96.0.11\nport 53\nready 10.1.0.1", "b": "ip 10.96.0.10\nport 53\nready 10.1.0.2"},
			kept:   []connection{udp(1, dns, pod2)}, deleted: []connection{udp(2, dns, pod1)}, onRestart: true,
		},
		"an all-ports service": {
			before: map[string]string{"dns": "external 192.0.2.53\nall-ports\nready 10.1.0.1 10.1.0.2"}, now: map[string]string{"dns": "external 192.0.2.53\nall-ports\nready 10.1.0.2"},
			kept: []connection{udp(1, "192.0.2.53:77", "10.1.0.2:77")}, deleted: []connection{udp(2, "192.0.2.53:77", "10.1.0.1:77")}, onRestart: true,
		},
		"an endpoint on the node itself has the port number of its node port": {
			before: map[string]string{}, now: map[string]string{"dns": "port 25053:30053\nip 10.96.0.10\nready 10.2.0.1"},
			kept: []connection{udp(1, node, node)}, onRestart: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			n, opts := newNamespace(t)
			before, now := services(t, test.before), services(t, test.now)
			all := append(append([]connection{}, test.kept...), test.deleted...)
			// checkPass calls r.Sync with the changes c, runs one pass of r and compares
			// the remaining entries.
			checkPass := func(t *testing.T, r *reconciler, c *sink.Changes, want []connection) {
				t.Helper()
				clearTable(t, n.FD)
				createEntries(t, n.FD, all...)
				if err := r.Sync(t.Context(), c); err != nil {
					t.Error(err)
				}
				p := r.read(t.Context())
				if diff := gocmp.Diff(texts(want), tableEntries(t, n.FD)); diff != "" || p.err != nil || p.deleted != len(all)-len(want) {
					t.Errorf("connections after pass %+v (-want +got):\n%s", p, diff)
				}
			}
			synced := func() *reconciler {
				r := newReconciler(opts)
				r.Sync(t.Context(), wholePass(before))
				_, count := r.queue.pending()
				r.queue.removeUpTo(count)
				return r
			}
			t.Run("as a change", func(t *testing.T) { checkPass(t, synced(), changesBetween(before, now), test.kept) })
			t.Run("as a pass", func(t *testing.T) { checkPass(t, synced(), wholePass(now), test.kept) })
			t.Run("after a restart", func(t *testing.T) {
				want := all
				if test.onRestart {
					want = test.kept
				}
				checkPass(t, newReconciler(opts), wholePass(now), want)
			})
		})
	}
}

// If Unsure is set, the dataplane may have any earlier state of the service.
func TestUnsureChangeChecksWholeService(t *testing.T) {
	n, opts := newNamespace(t)
	r, _ := startReconciler(t, opts)
	before := services(t, map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.1"})
	meanwhile := services(t, map[string]string{"dns": "ip 10.96.0.11\nport 53\nready 10.1.0.1 10.1.0.2"})
	syncAndFlush(t, r, wholePass(before))
	syncAndFlush(t, r, changesBetween(before, meanwhile))
	createEntries(t, n.FD, udp(1, dns, pod1), udp(2, dns, pod2), udp(3, "10.96.0.11:53", pod1))
	again := changesBetween(before, before[:0])
	again.Services = slices.Values([]sink.Change{{Key: before[0].Key(), Old: before[0], New: before[0], Unsure: true}})
	syncAndFlush(t, r, again)
	if diff := gocmp.Diff(texts([]connection{udp(1, dns, pod1)}), tableEntries(t, n.FD)); diff != "" {
		t.Errorf("connections (-want +got):\n%s", diff)
	}
}

// Each batch of a pass deletes the stale connections of its services. The last batch also
// deletes the connections of deleted services. It keeps connections to an address that
// another service took over.
func TestPassInSeveralBatches(t *testing.T) {
	at := func(name, ip, pods string) *api.View {
		return service(t, name, "ip "+ip+"\nport 53\nready "+pods)
	}
	n, opts := newNamespace(t)
	r, _ := startReconciler(t, opts)
	syncAndFlush(t, r, wholePass([]*api.View{at("deleted", "10.96.0.10", "10.1.0.1"), at("moves", "10.96.0.11", "10.1.0.1"), at("stays", "10.96.0.12", "10.1.0.1")}))
	toDeleted, toMoved := udp(1, "10.96.0.10:53", pod1), udp(2, "10.96.0.11:53", pod1)
	toStaying, toRemoved := udp(3, "10.96.0.12:53", pod1), udp(4, "10.96.0.12:53", pod2)
	createEntries(t, n.FD, toDeleted, toMoved, toStaying, toRemoved)
	check := func(after string, want ...connection) {
		t.Helper()
		if diff := gocmp.Diff(texts(want), tableEntries(t, n.FD)); diff != "" {
			t.Errorf("connections after %s (-want +got):\n%s", after, diff)
		}
	}
	first := inPass(at("a", "10.96.0.11", "10.1.0.1"))
	first.First = true
	syncAndFlush(t, r, first)
	check("another service took over an address", toDeleted, toMoved, toStaying, toRemoved)
	syncAndFlush(t, r, first)
	check("the pass started again", toDeleted, toMoved, toStaying, toRemoved)
	syncAndFlush(t, r, inPass(at("moves", "10.96.0.13", "10.1.0.1")))
	check("the pass delivered the service that had the address before", toDeleted, toMoved, toStaying, toRemoved)
	last := inPass(at("stays", "10.96.0.12", "10.1.0.1"))
	last.Last = true
	syncAndFlush(t, r, last)
	check("the end of the pass", toMoved, toStaying)
}

func services(t testing.TB, texts map[string]string) []*api.View {
	var list []*api.View
	for name, text := range texts {
		list = append(list, service(t, name, text))
	}
	return list
}

// newNamespace returns a network namespace and options for a reconciler in it. The
// options have one node address.
func newNamespace(t testing.TB) (*netnstest.Namespace, Options) {
	n := netnstest.New(t)
	return n, Options{NetNS: n.FD, NodeAddresses: nodeaddr.Of(netip.MustParseAddr("10.2.0.1")), clock: noPauses{}}
}

// noPauses is a clock whose timers fire immediately.
type noPauses struct{ clock.RealClock }

func (noPauses) After(time.Duration) <-chan time.Time { return clock.RealClock{}.After(0) }

func TestTableIsNotReadWithoutRemovals(t *testing.T) {
	const both = "ip 10.96.0.10\nport 53\nready 10.1.0.1 10.1.0.2"
	for name, test := range map[string]struct{ before, now map[string]string }{
		"nothing changed":                          {map[string]string{"dns": both}, map[string]string{"dns": both}},
		"an endpoint is added":                     {map[string]string{"dns": both}, map[string]string{"dns": both + " 10.1.0.3"}},
		"an endpoint starts draining":              {map[string]string{"dns": both}, map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.1\ndraining 10.1.0.2"}},
		"a policy changes":                         {map[string]string{"dns": both}, map[string]string{"dns": both + "\nlocal"}},
		"a TCP endpoint is added":                  {map[string]string{"web": "ip 10.96.0.11\nport 80/TCP\nready 10.1.0.1"}, map[string]string{"web": "ip 10.96.0.11\nport 80/TCP\nready 10.1.0.1 10.1.0.2"}},
		"a TCP service without endpoints is added": {map[string]string{}, map[string]string{"web": "ip 10.96.0.11\nport 80/TCP"}},
		"TCP endpoints are removed":                {map[string]string{"web": "ip 10.96.0.11\nport 80/TCP\nready 10.1.0.1"}, map[string]string{"web": "ip 10.96.0.11\nport 80/TCP"}},
		"a service without UDP ports is deleted":   {map[string]string{"web": "ip 10.96.0.11\nport 80/TCP\nready 10.1.0.1"}, map[string]string{}},
	} {
		t.Run(name, func(t *testing.T) {
			before, now := services(t, test.before), services(t, test.now)
			_, opts := newNamespace(t)
			r, passes := startReconciler(t, opts)
			syncAndFlush(t, r, wholePass(before))
			read := len(*passes)
			syncAndFlush(t, r, changesBetween(before, now))
			if len(*passes) != read {
				t.Errorf("the table was read: %+v", (*passes)[read:])
			}
		})
	}
}

// A pass keeps flows to an endpoint that was added after the destination was queued.
func TestChangesUpdateQueuedVerdicts(t *testing.T) {
	first := services(t, map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.1"})
	second := services(t, map[string]string{"dns": "ip 10.96.0.10\nport 53"})
	third := services(t, map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.2"})
	fourth := services(t, map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.2 10.1.0.1"})
	n, opts := newNamespace(t)
	r := newReconciler(opts)
	createEntries(t, n.FD, udp(1, dns, pod1), udp(2, dns, pod2), udp(3, dns, "10.1.0.3:5053"))
	for _, c := range []*sink.Changes{wholePass(first), changesBetween(first, second), changesBetween(second, third), changesBetween(third, fourth)} {
		if err := r.Sync(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	if p := r.read(t.Context()); p.err != nil || p.deleted != 1 {
		t.Errorf("the pass was %+v", p)
	}
	if diff := gocmp.Diff(texts([]connection{udp(1, dns, pod1), udp(2, dns, pod2)}), tableEntries(t, n.FD)); diff != "" {
		t.Errorf("connections (-want +got):\n%s", diff)
	}
}

func TestFailedPassIsRetried(t *testing.T) {
	n, opts := newNamespace(t)
	const later = 900 // the test opens this file descriptor later, so the first passes fail
	opts.NetNS = later
	failed := make(chan struct{}, 1)
	opts.Observe = func(_, _ int, _ time.Duration, err error) {
		if err != nil {
			select {
			case failed <- struct{}{}:
			default:
			}
		}
	}
	r := newReconciler(opts)
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	createEntries(t, n.FD, udp(1, dns, pod1))
	if err := r.Sync(t.Context(), wholePass(services(t, map[string]string{"dns": "ip 10.96.0.10\nport 53"}))); err != nil {
		t.Errorf("Sync returns an error because the table cannot be read: %v", err)
	}
	<-failed
	if err := r.flush(t.Context()); err == nil {
		t.Error("flush succeeds although the table was not read")
	}
	if err := unix.Dup3(n.FD, later, unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(later)
	for deadline := time.Now().Add(time.Minute); len(tableEntries(t, n.FD)) > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("remaining entries: %q", tableEntries(t, n.FD))
		}
	}
	for ; r.flush(t.Context()) != nil; time.Sleep(time.Millisecond) { // flush fails if the last pass failed, so retry
	}
	if err := r.Stop(t.Context()); err != nil {
		t.Error(err)
	}
}
