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
	"github.com/kpng-project/kpng/backends/nodeaddr"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
	"k8s.io/utils/clock"
)

// start returns a reconciler that runs until the test ends, and the passes that
// it has made.
func start(t testing.TB, opts Options) (*Reconciler, *[]Pass) {
	t.Helper()
	var passes []Pass
	opts.Observe = func(p Pass) { passes = append(passes, p) }
	r := New(opts)
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, stop := context.WithTimeout(context.Background(), 10*time.Second)
		defer stop()
		if err := r.Stop(ctx); err != nil {
			t.Error(err)
		}
	})
	return r, &passes
}

// tell tells r of changes and waits until all is done.
func tell(t testing.TB, r *Reconciler, c *sink.Changes) {
	t.Helper()
	if err := r.Sync(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(t.Context(), 20*time.Second)
	defer stop()
	if err := r.Flush(ctx); err != nil {
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

// began returns a TCP connection that nobody has answered or translated.
func began(sport uint16, to string) connection {
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

func TestStaleConnectionsAreEnded(t *testing.T) {
	const both = "ip 10.96.0.10\nport 53\nready 10.1.0.1 10.1.0.2"
	for name, test := range map[string]struct {
		before, now map[string]string
		stay, go_   []connection
		// onRestart says that a reconciler that was told nothing before ends the
		// same connections; else it ends none.
		onRestart bool
	}{
		"an endpoint that is in no slice any more has gone": {
			before: map[string]string{"dns": both}, now: map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.2"},
			stay: []connection{udp(2, dns, pod2)}, go_: []connection{udp(1, dns, pod1)}, onRestart: true,
		},
		"an endpoint that no longer serves has gone": {
			before: map[string]string{"dns": both}, now: map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.2\ndying 10.1.0.1"},
			stay: []connection{udp(2, dns, pod2)}, go_: []connection{udp(1, dns, pod1)}, onRestart: true,
		},
		"a draining endpoint has not gone": {
			before: map[string]string{"dns": both}, now: map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.2\ndraining 10.1.0.1"},
			stay: []connection{udp(1, dns, pod1), udp(2, dns, pod2)}, onRestart: true,
		},
		"an endpoint that a policy takes off all lists has not gone": {
			before: map[string]string{"dns": both}, now: map[string]string{"dns": both + "\nlocal"},
			stay: []connection{udp(1, dns, pod1), udp(2, dns, pod2)}, onRestart: true,
		},
		"a draining endpoint goes": {
			before: map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.2\ndraining 10.1.0.1"},
			now:    map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.2"},
			stay:   []connection{udp(2, dns, pod2)}, go_: []connection{udp(1, dns, pod1)}, onRestart: true,
		},
		"scale to zero": {
			before: map[string]string{"dns": both}, now: map[string]string{"dns": "ip 10.96.0.10\nport 53"},
			go_: []connection{udp(1, dns, pod1), udp(2, dns, pod2)}, onRestart: true,
		},
		"the service is deleted": {
			before: map[string]string{"dns": both}, now: map[string]string{},
			// Who else may have translated the address, nobody can tell afterwards.
			go_: []connection{udp(1, dns, pod1), udp(2, dns, pod2)},
		},
		"one address of the service goes": {
			before: map[string]string{"dns": both + "\nexternal 192.0.2.53"}, now: map[string]string{"dns": both},
			stay: []connection{udp(1, dns, pod1)}, go_: []connection{udp(2, "192.0.2.53:53", pod1)},
		},
		"what bypassed a service that gets its first endpoint": {
			before: map[string]string{"dns": "ip 10.96.0.10\nport 53"}, now: map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.2"},
			go_: []connection{udp(1, dns, dns)}, onRestart: true,
		},
		"what bypassed a service that is new": {
			before: map[string]string{}, now: map[string]string{"dns": both},
			go_: []connection{udp(1, dns, dns)}, onRestart: true,
		},
		"what bypasses a service that has no endpoint on this node": {
			before: map[string]string{"dns": both + "\nlocal"}, now: map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.2\nlocal"},
			stay: []connection{udp(1, dns, dns)}, go_: []connection{udp(2, dns, pod1)}, onRestart: true,
		},
		"a masqueraded connection": {
			before: map[string]string{"dns": both}, now: map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.2"},
			go_: []connection{masqueraded(udp(1, dns, pod1))}, onRestart: true,
		},
		"IPv6": {
			before: map[string]string{"dns": "ip fd96::10\nport 53\nready fd01::1 fd01::2"}, now: map[string]string{"dns": "ip fd96::10\nport 53\nready fd01::2"},
			stay: []connection{udp(2, dns6, pod62)}, go_: []connection{udp(1, dns6, pod61)}, onRestart: true,
		},
		"both families at once": {
			before: map[string]string{"dns": "ip 10.96.0.10 fd96::10\nport 53\nready 10.1.0.1 fd01::1"}, now: map[string]string{"dns": "ip 10.96.0.10 fd96::10\nport 53"},
			go_: []connection{udp(1, dns, pod1), udp(2, dns6, pod61)}, onRestart: true,
		},
		"TCP is left alone": {
			before: map[string]string{"dns": "ip 10.96.0.10\nport 53\nport 53/tcp\nready 10.1.0.1"}, now: map[string]string{"dns": "ip 10.96.0.10\nport 53\nport 53/tcp"},
			stay: []connection{tcp(udp(1, dns, pod1))}, go_: []connection{udp(2, dns, pod1)}, onRestart: true,
		},
		"a TCP connection that began before its service was there": {
			before: map[string]string{}, now: map[string]string{"web": "ip 10.96.0.10 fd96::10\nport 80/tcp 30080\nready 10.1.0.1 fd01::1"},
			stay: []connection{tcp(udp(1, "10.96.0.10:80", "10.96.0.10:80")), synSent(udp(2, "10.96.0.10:80", "10.1.0.1:5080")), began(3, "10.96.0.10:81"), began(4, "10.2.0.9:30080")},
			go_:  []connection{began(5, "10.96.0.10:80"), began(6, "[fd96::10]:80"), began(7, "10.2.0.1:30080")}, onRestart: true,
		},
		"a TCP connection that began before there was an endpoint": {
			before: map[string]string{"web": "ip 10.96.0.10\nport 80/tcp"}, now: map[string]string{"web": "ip 10.96.0.10\nport 80/tcp\nready 10.1.0.1"},
			go_: []connection{began(1, "10.96.0.10:80")}, onRestart: true,
		},
		"a TCP connection that began without an endpoint, while there is none": {
			before: map[string]string{}, now: map[string]string{"web": "ip 10.96.0.10\nport 80/tcp"},
			stay: []connection{began(1, "10.96.0.10:80")}, onRestart: true,
		},
		"a TCP connection that began before an all-ports service was there": {
			before: map[string]string{}, now: map[string]string{"web": "external 192.0.2.53\nall-ports\nready 10.1.0.1"},
			go_: []connection{began(1, "192.0.2.53:77"), udp(2, "192.0.2.53:77", "192.0.2.53:77")}, onRestart: true,
		},
		"another port of the same address is left alone": {
			before: map[string]string{"dns": both}, now: map[string]string{},
			stay: []connection{udp(1, "10.96.0.10:54", pod1)},
		},
		"another port of the same endpoint has not gone with the first": {
			before: map[string]string{"dns": "ip 10.96.0.10\nport 53\nport 54\nready 10.1.0.1"}, now: map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.1"},
			stay: []connection{udp(1, dns, pod1)}, go_: []connection{udp(2, "10.96.0.10:54", "10.1.0.1:5054")},
		},
		"an endpoint at another port than the service's is none of it": {
			before: map[string]string{"dns": "ip 10.96.0.10\nport 53"}, now: map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.1"},
			go_: []connection{udp(1, dns, "10.1.0.1:53")}, onRestart: true,
		},
		"other zones are left alone": {
			before: map[string]string{"dns": both}, now: map[string]string{"dns": "ip 10.96.0.10\nport 53"},
			stay: []connection{inZone(7, udp(1, dns, pod1))}, go_: []connection{udp(1, dns, pod1)}, onRestart: true,
		},
		"node ports are matched by node address and port": {
			before: map[string]string{"dns": "ip 10.96.0.10\nport 53 30053\nready 10.1.0.1"}, now: map[string]string{"dns": "ip 10.96.0.10\nport 53 30053"},
			stay: []connection{udp(1, foreign, pod1), udp(2, "10.2.0.1:30054", pod1)}, go_: []connection{udp(3, node, pod1), udp(4, dns, pod1)}, onRestart: true,
		},
		"an address is handed over to another service": {
			before: map[string]string{"a": "ip 10.96.0.10\nport 53\nready 10.1.0.1", "b": "ip 10.96.0.11\nport 53\nready 10.1.0.2"},
			now:    map[string]string{"a": "ip 10.96.0.11\nport 53\nready 10.1.0.1", "b": "ip 10.96.0.10\nport 53\nready 10.1.0.2"},
			stay:   []connection{udp(1, dns, pod2)}, go_: []connection{udp(2, dns, pod1)}, onRestart: true,
		},
		"an all-ports service": {
			before: map[string]string{"dns": "external 192.0.2.53\nall-ports\nready 10.1.0.1 10.1.0.2"}, now: map[string]string{"dns": "external 192.0.2.53\nall-ports\nready 10.1.0.2"},
			stay: []connection{udp(1, "192.0.2.53:77", "10.1.0.2:77")}, go_: []connection{udp(2, "192.0.2.53:77", "10.1.0.1:77")}, onRestart: true,
		},
		"an endpoint on the node itself, at the number of its node port": {
			before: map[string]string{}, now: map[string]string{"dns": "port 25053 30053\nip 10.96.0.10\nready 10.2.0.1"},
			stay: []connection{udp(1, node, node)}, onRestart: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			n, opts := world(t)
			before, now := services(t, test.before), services(t, test.now)
			all := append(append([]connection{}, test.stay...), test.go_...)
			// check tells r of c, has it look once, and compares what is left.
			check := func(t *testing.T, r *Reconciler, c *sink.Changes, want []connection) {
				t.Helper()
				empty(t, n.FD)
				enter(t, n.FD, all...)
				if err := r.Sync(t.Context(), c); err != nil {
					t.Error(err)
				}
				p := r.pass(t.Context())
				if diff := gocmp.Diff(texts(want), entries(t, n.FD)); diff != "" || p.Err != nil || p.Ended != len(all)-len(want) {
					t.Errorf("pass %+v left connections (-want +got):\n%s", p, diff)
				}
			}
			told := func() *Reconciler {
				r := New(opts)
				r.Sync(t.Context(), whole(before))
				_, count := r.notes.open()
				r.notes.done(count)
				return r
			}
			t.Run("as a change", func(t *testing.T) { check(t, told(), difference(before, now), test.stay) })
			t.Run("as a whole", func(t *testing.T) { check(t, told(), whole(now), test.stay) })
			t.Run("after a restart", func(t *testing.T) {
				want := all
				if test.onRestart {
					want = test.stay
				}
				check(t, New(opts), whole(now), want)
			})
		})
	}
}

// What an unsure change follows is not known.
func TestAnUnsureChangeIsLookedAtAsAWhole(t *testing.T) {
	n, opts := world(t)
	r, _ := start(t, opts)
	before := services(t, map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.1"})
	meanwhile := services(t, map[string]string{"dns": "ip 10.96.0.11\nport 53\nready 10.1.0.1 10.1.0.2"})
	tell(t, r, whole(before))
	tell(t, r, difference(before, meanwhile))
	enter(t, n.FD, udp(1, dns, pod1), udp(2, dns, pod2), udp(3, "10.96.0.11:53", pod1))
	again := difference(before, before[:0])
	again.Services = slices.Values([]sink.Change{{Key: before[0].Key(), Old: before[0], New: before[0], Unsure: true}})
	tell(t, r, again)
	if diff := gocmp.Diff(texts([]connection{udp(1, dns, pod1)}), entries(t, n.FD)); diff != "" {
		t.Errorf("connections (-want +got):\n%s", diff)
	}
}

// Connections end as the batches of a pass say, those of services that are gone when it
// ends, and none to an address that was taken over from a service.
func TestAPassInSeveralBatches(t *testing.T) {
	at := func(name, ip, pods string) *api.ServiceEndpoints {
		return service(t, name, "ip "+ip+"\nport 53\nready "+pods)
	}
	n, opts := world(t)
	r, _ := start(t, opts)
	tell(t, r, whole([]*api.ServiceEndpoints{at("gone", "10.96.0.10", "10.1.0.1"), at("moves", "10.96.0.11", "10.1.0.1"), at("stays", "10.96.0.12", "10.1.0.1")}))
	toGone, toMoved := udp(1, "10.96.0.10:53", pod1), udp(2, "10.96.0.11:53", pod1)
	toStaying, toRemoved := udp(3, "10.96.0.12:53", pod1), udp(4, "10.96.0.12:53", pod2)
	enter(t, n.FD, toGone, toMoved, toStaying, toRemoved)
	check := func(after string, want ...connection) {
		t.Helper()
		if diff := gocmp.Diff(texts(want), entries(t, n.FD)); diff != "" {
			t.Errorf("connections after %s (-want +got):\n%s", after, diff)
		}
	}
	first := inPass(at("a", "10.96.0.11", "10.1.0.1"))
	first.First = true
	tell(t, r, first)
	check("another service has taken an address over", toGone, toMoved, toStaying, toRemoved)
	tell(t, r, first)
	check("the pass began again", toGone, toMoved, toStaying, toRemoved)
	tell(t, r, inPass(at("moves", "10.96.0.13", "10.1.0.1")))
	check("the service that had it is delivered", toGone, toMoved, toStaying, toRemoved)
	last := inPass(at("stays", "10.96.0.12", "10.1.0.1"))
	last.Last = true
	tell(t, r, last)
	check("the pass has ended", toMoved, toStaying)
}

func services(t testing.TB, texts map[string]string) []*api.ServiceEndpoints {
	var list []*api.ServiceEndpoints
	for name, text := range texts {
		list = append(list, service(t, name, text))
	}
	return list
}

// world is a namespace with a node address.
func world(t testing.TB) (*netnstest.Namespace, Options) {
	n := netnstest.New(t)
	return n, Options{NetNS: n.FD, NodeAddrs: nodeaddr.Of(netip.MustParseAddr("10.2.0.1")), Clock: restless{}}
}

// restless is a clock on which pauses take no time.
type restless struct{ clock.RealClock }

func (restless) After(time.Duration) <-chan time.Time { return clock.RealClock{}.After(0) }

func TestWhereNothingGoesTheTableIsNotRead(t *testing.T) {
	const both = "ip 10.96.0.10\nport 53\nready 10.1.0.1 10.1.0.2"
	for name, test := range map[string]struct{ before, now map[string]string }{
		"nothing changed":              {map[string]string{"dns": both}, map[string]string{"dns": both}},
		"an endpoint comes":            {map[string]string{"dns": both}, map[string]string{"dns": both + " 10.1.0.3"}},
		"an endpoint begins to drain":  {map[string]string{"dns": both}, map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.1\ndraining 10.1.0.2"}},
		"a policy changes":             {map[string]string{"dns": both}, map[string]string{"dns": both + "\nlocal"}},
		"an endpoint of TCP comes":     {map[string]string{"web": "ip 10.96.0.11\nport 80/tcp\nready 10.1.0.1"}, map[string]string{"web": "ip 10.96.0.11\nport 80/tcp\nready 10.1.0.1 10.1.0.2"}},
		"TCP without endpoints comes":  {map[string]string{}, map[string]string{"web": "ip 10.96.0.11\nport 80/tcp"}},
		"endpoints of TCP go":          {map[string]string{"web": "ip 10.96.0.11\nport 80/tcp\nready 10.1.0.1"}, map[string]string{"web": "ip 10.96.0.11\nport 80/tcp"}},
		"a service without UDP leaves": {map[string]string{"web": "ip 10.96.0.11\nport 80/tcp\nready 10.1.0.1"}, map[string]string{}},
	} {
		t.Run(name, func(t *testing.T) {
			before, now := services(t, test.before), services(t, test.now)
			_, opts := world(t)
			r, passes := start(t, opts)
			tell(t, r, whole(before))
			read := len(*passes)
			tell(t, r, difference(before, now))
			if len(*passes) != read {
				t.Errorf("the table was read: %+v", (*passes)[read:])
			}
		})
	}
}

// An endpoint that comes while stale connections of its service are still to be
// looked for is as right as the others.
func TestWhatIsToBeLookedForIsKeptUpToDate(t *testing.T) {
	first := services(t, map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.1"})
	second := services(t, map[string]string{"dns": "ip 10.96.0.10\nport 53"})
	third := services(t, map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.2"})
	fourth := services(t, map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.2 10.1.0.1"})
	n, opts := world(t)
	r := New(opts)
	enter(t, n.FD, udp(1, dns, pod1), udp(2, dns, pod2), udp(3, dns, "10.1.0.3:5053"))
	for _, c := range []*sink.Changes{whole(first), difference(first, second), difference(second, third), difference(third, fourth)} {
		if err := r.Sync(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	if p := r.pass(t.Context()); p.Err != nil || p.Ended != 1 {
		t.Errorf("the pass was %+v", p)
	}
	if diff := gocmp.Diff(texts([]connection{udp(1, dns, pod1), udp(2, dns, pod2)}), entries(t, n.FD)); diff != "" {
		t.Errorf("connections (-want +got):\n%s", diff)
	}
}

func TestWhatFailsIsTriedAgain(t *testing.T) {
	n, opts := world(t)
	const later = 900 // a file descriptor that is not there yet
	opts.NetNS = later
	failed := make(chan struct{}, 1)
	opts.Observe = func(p Pass) {
		if p.Err != nil {
			select {
			case failed <- struct{}{}:
			default:
			}
		}
	}
	r := New(opts)
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	enter(t, n.FD, udp(1, dns, pod1))
	if err := r.Sync(t.Context(), whole(services(t, map[string]string{"dns": "ip 10.96.0.10\nport 53"}))); err != nil {
		t.Errorf("that the table cannot be read is an error of the sink: %v", err)
	}
	<-failed
	if err := r.Flush(t.Context()); err == nil {
		t.Error("flushed without reading the table")
	}
	if err := unix.Dup3(n.FD, later, unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(later)
	for deadline := time.Now().Add(10 * time.Second); len(entries(t, n.FD)) > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("there still are %q", entries(t, n.FD))
		}
	}
	for r.Flush(t.Context()) != nil { // as of a pass that failed
		time.Sleep(time.Millisecond)
	}
	if err := r.Stop(t.Context()); err != nil {
		t.Error(err)
	}
}
