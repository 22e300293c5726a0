// SPDX-License-Identifier: Apache-2.0

package sink_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// eventLog is a handler that records each call as a line. If fail is not nil, it decides
// whether a call fails.
type eventLog struct {
	lines []string
	fail  func(line string) error
}

func (l *eventLog) note(format string, args ...any) error {
	line := fmt.Sprintf(format, args...)
	l.lines = append(l.lines, line)
	if l.fail != nil {
		return l.fail(line)
	}
	return nil
}

// take returns the lines since take was last called.
func (l *eventLog) take() string {
	lines := l.lines
	l.lines = nil
	return strings.Join(lines, "\n")
}

func (l *eventLog) SetService(_ context.Context, svc *api.Service) error {
	return l.note("set service %s", svc.Name)
}

func (l *eventLog) DeleteService(_ context.Context, svc *api.Service) error {
	return l.note("delete service %s", svc.Name)
}

func (l *eventLog) SetEndpoint(_ context.Context, svc *api.Service, e *api.Endpoint) error {
	return l.note("set endpoint %s %s", svc.Name, e.Key())
}

func (l *eventLog) DeleteEndpoint(_ context.Context, svc *api.Service, e *api.Endpoint) error {
	return l.note("delete endpoint %s %s", svc.Name, e.Key())
}

func (l *eventLog) SetFrontend(_ context.Context, svc *api.Service, f nodeview.Frontend) error {
	return l.note("set frontend %s %s → %s", svc.Name, f.FrontendKey, targets(f))
}

func (l *eventLog) DeleteFrontend(_ context.Context, svc *api.Service, f nodeview.Frontend) error {
	return l.note("delete frontend %s %s", svc.Name, f.FrontendKey)
}

// targets returns the last byte of the address of each endpoint of a frontend.
func targets(f nodeview.Frontend) string {
	n := []byte{}
	for _, t := range f.Elsewhere.Endpoints {
		n = append(n, t.Addr.AsSlice()[3])
	}
	return fmt.Sprint(n)
}

// withIP returns v with the cluster IP 10.96.0.n.
func withIP(n byte, v *api.View) *api.View {
	v.Service.IPs.ClusterIPs = api.NewIPSet(netip.AddrFrom4([4]byte{10, 96, 0, n}))
	return v
}

func TestEvents(t *testing.T) {
	a, b := key("a"), key("b")
	log := &eventLog{}
	run(t, sink.Options{}, sink.Events(log), func(w *world) {
		step := func(what string, change func(), want ...string) {
			w.Helper()
			change()
			w.waitApplied()
			if diff := cmp.Diff(strings.Join(want, "\n"), log.take()); diff != "" {
				w.Errorf("%s: events (-want +got):\n%s", what, diff)
			}
		}
		w.src.Delete(web)
		w.src.Set(withIP(1, view(a, 1)), withIP(2, view(b, 2)))

		step("a pass sets services, then endpoints, then frontends", w.src.MarkSynced,
			"set service a", "set service b",
			"set endpoint a 10.0.0.1", "set endpoint b 10.0.0.2",
			"set frontend a ClusterIP 10.96.0.1:80/TCP → [1]", "set frontend b ClusterIP 10.96.0.2:80/TCP → [2]")

		step("two services swap their addresses", func() { w.src.Set(withIP(2, view(a, 1)), withIP(1, view(b, 2))) },
			"delete frontend a ClusterIP 10.96.0.1:80/TCP", "delete frontend b ClusterIP 10.96.0.2:80/TCP",
			"set service a", "set service b",
			"set frontend a ClusterIP 10.96.0.2:80/TCP → [1]", "set frontend b ClusterIP 10.96.0.1:80/TCP → [2]")

		step("one endpoint is added and one removed", func() { w.src.Set(withIP(2, view(a, 3)), withIP(1, view(b, 2, 4))) },
			"delete endpoint a 10.0.0.1",
			"set endpoint a 10.0.0.3", "set endpoint b 10.0.0.4",
			"set frontend a ClusterIP 10.96.0.2:80/TCP → [3]", "set frontend b ClusterIP 10.96.0.1:80/TCP → [2 4]")

		step("a pass deletes what is stale, and sets everything else again", func() {
			w.src.Fail(errBusy) // the source fails until Fail(nil), so the driver sees Reset and Delete together
			w.src.Reset()
			w.src.Delete(a)
			w.src.Fail(nil)
		},
			"delete frontend a ClusterIP 10.96.0.2:80/TCP", "delete endpoint a 10.0.0.3", "delete service a",
			"set service b", "set endpoint b 10.0.0.2", "set endpoint b 10.0.0.4",
			"set frontend b ClusterIP 10.96.0.1:80/TCP → [2 4]")

		step("a draining endpoint is deleted", func() {
			v := withIP(1, view(b, 2))
			v.Draining = view(b, 4).Endpoints
			w.src.Set(v)
		}, "delete endpoint b 10.0.0.4", "set frontend b ClusterIP 10.96.0.1:80/TCP → [2]")

		step("flows to the draining endpoint may not continue", func() { w.src.Set(withIP(1, view(b, 2))) },
			"set frontend b ClusterIP 10.96.0.1:80/TCP → [2]")

		log.fail = func(line string) error {
			if strings.HasPrefix(line, "set endpoint a") {
				log.fail = nil
				return errBusy
			}
			return nil
		}
		step("an error ends the events of its service, and the next Sync repeats all of them",
			func() { w.src.Set(withIP(3, view(a, 1, 2)), withIP(1, view(b, 3))) },
			"delete endpoint b 10.0.0.2", "set service a",
			"set endpoint a 10.0.0.1", "set endpoint b 10.0.0.3", "set frontend b ClusterIP 10.96.0.1:80/TCP → [3]",
			"set service a", "set endpoint a 10.0.0.1", "set endpoint a 10.0.0.2", "set frontend a ClusterIP 10.96.0.3:80/TCP → [1 2]")

		log.fail = func(line string) error {
			if strings.HasPrefix(line, "delete frontend") {
				log.fail = nil
				panic("oops")
			}
			return nil
		}
		step("a service that could not be deleted and exists again is set again", func() {
			w.src.Delete(a)
			synctest.Wait()
			w.src.Set(withIP(3, view(a, 1)))
		},
			"delete frontend a ClusterIP 10.96.0.3:80/TCP",
			"delete endpoint a 10.0.0.2",
			"set service a", "set endpoint a 10.0.0.1", "set frontend a ClusterIP 10.96.0.3:80/TCP → [1]")

		log.fail = func(string) error { log.fail = nil; return sink.ErrStartOver }
		step("a handler that starts over gets everything, with deletions of removed objects", func() {
			w.src.Set(withIP(3, view(a)))
			synctest.Wait()
			w.src.Delete(b)
		},
			"delete endpoint a 10.0.0.1",
			"delete frontend b ClusterIP 10.96.0.1:80/TCP",
			"delete endpoint a 10.0.0.1", "delete endpoint b 10.0.0.3", "delete service b",
			"set service a", "set frontend a ClusterIP 10.96.0.3:80/TCP → []")
	})
}

// syncEvents calls Sync, and returns the events.
func syncEvents(t *testing.T, s sink.Sink, log *eventLog, c *sink.Changes) string {
	t.Helper()
	if err := s.Sync(t.Context(), c); err != nil {
		t.Errorf("Sync returned %v", err)
	}
	return log.take()
}

func TestEventsOfSingleSyncs(t *testing.T) {
	at := func(name string, ips ...byte) sink.Change {
		v := view(key(name), 1)
		for _, n := range ips {
			v.Service.IPs.ExternalIPs.Add(netip.AddrFrom4([4]byte{10, 96, 0, n}))
		}
		return sink.Change{Key: v.Key(), New: v}
	}
	log := &eventLog{}
	s := sink.Events(log)
	step := func(what string, c *sink.Changes, want ...string) {
		t.Helper()
		if diff := cmp.Diff(strings.Join(want, "\n"), syncEvents(t, s, log, c)); diff != "" {
			t.Errorf("%s: events (-want +got):\n%s", what, diff)
		}
	}
	step("two services", changes(true, at("a", 1, 2), at("b")),
		"set service a", "set service b", "set endpoint a 10.0.0.1", "set endpoint b 10.0.0.1",
		"set frontend a ExternalIP 10.96.0.1:80/TCP → [1]", "set frontend a ExternalIP 10.96.0.2:80/TCP → [1]")
	step("nothing has changed", changes(false, at("a", 1, 2)))
	step("a frontend is added", changes(false, at("a", 1, 2, 3)),
		"set service a", "set frontend a ExternalIP 10.96.0.3:80/TCP → [1]")
	step("an unknown service is deleted", changes(false, sink.Change{Key: key("unknown")}))
	step("an address moves before its owner is delivered", changes(false, at("b", 2)),
		"delete frontend a ExternalIP 10.96.0.2:80/TCP", "set service b", "set frontend b ExternalIP 10.96.0.2:80/TCP → [1]")
	step("the address moves back", changes(false, at("a", 1, 2, 3), at("b")),
		"delete frontend b ExternalIP 10.96.0.2:80/TCP", "set service a", "set service b", "set endpoint a 10.0.0.1",
		"set frontend a ExternalIP 10.96.0.1:80/TCP → [1]", "set frontend a ExternalIP 10.96.0.2:80/TCP → [1]", "set frontend a ExternalIP 10.96.0.3:80/TCP → [1]")
	for _, name := range []string{"f", "c", "e", "d"} {
		syncEvents(t, s, log, changes(false, at(name)))
	}
	step("a pass deletes stale services in order", changes(true, at("e")),
		"delete frontend a ExternalIP 10.96.0.1:80/TCP", "delete frontend a ExternalIP 10.96.0.2:80/TCP", "delete frontend a ExternalIP 10.96.0.3:80/TCP",
		"delete endpoint a 10.0.0.1", "delete endpoint b 10.0.0.1", "delete endpoint c 10.0.0.1", "delete endpoint d 10.0.0.1", "delete endpoint f 10.0.0.1",
		"delete service a", "delete service b", "delete service c", "delete service d", "delete service f",
		"set service e", "set endpoint e 10.0.0.1")

	ctx, cancel := context.WithCancel(t.Context())
	log.fail = func(string) error { cancel(); return nil }
	failed, ok := sink.Acknowledged(s.Sync(ctx, changes(false, at("x"), at("y"))))
	if !ok || len(failed) != 2 || !errors.Is(failed[key("x")], context.Canceled) || log.take() != "set service x" {
		t.Errorf("a Sync whose context ends failed %v", failed)
	}
}

// An address moves from one service to another. Meanwhile, a call for its first owner
// fails.
func TestEventsHoldBackConflictingFrontends(t *testing.T) {
	a, b, c := key("a"), key("b"), key("c")
	gone := func(k types.NamespacedName) sink.Change { return sink.Change{Key: k} }
	set := func(v *api.View) sink.Change { return sink.Change{Key: v.Key(), New: v} }
	whole := func(v *api.View) *api.View {
		v.Service.AllPorts = true
		return v
	}
	const heldBack = "service default/b: set frontend ClusterIP 10.96.0.1:80/TCP: service default/a may still have it"
	cases := []struct {
		name  string
		first *api.View // the first owner of the address
		fails string    // the call that fails once
		syncs [][]sink.Change
		want  [][]string // for each Sync: the calls, and the error at the end
	}{{
		name:  "a frontend cannot be deleted",
		first: withIP(1, view(a)), fails: "delete frontend a ClusterIP 10.96.0.1:80/TCP",
		syncs: [][]sink.Change{{gone(a), set(withIP(1, view(b)))}, {gone(a), set(withIP(1, view(b)))}},
		want: [][]string{
			{"delete frontend a ClusterIP 10.96.0.1:80/TCP", "set service b", "service default/a: delete frontend ClusterIP 10.96.0.1:80/TCP: dataplane is busy; " + heldBack},
			{"delete frontend a ClusterIP 10.96.0.1:80/TCP", "delete service a", "set service b", "set frontend b ClusterIP 10.96.0.1:80/TCP → []", "<nil>"},
		},
	}, {
		name:  "a frontend is deleted but an endpoint cannot be deleted",
		first: withIP(1, view(a, 1)), fails: "delete endpoint a 10.0.0.1",
		syncs: [][]sink.Change{{gone(a), set(withIP(1, view(b)))}, {gone(a)}},
		want: [][]string{
			{"delete frontend a ClusterIP 10.96.0.1:80/TCP", "delete endpoint a 10.0.0.1", "set service b", "set frontend b ClusterIP 10.96.0.1:80/TCP → []", "service default/a: delete endpoint 10.0.0.1: dataplane is busy"},
			{"delete endpoint a 10.0.0.1", "delete service a", "<nil>"},
		},
	}, {
		name:  "the other service arrives before the retry: the old frontend is deleted first",
		first: withIP(1, view(a)), fails: "delete frontend a ClusterIP 10.96.0.1:80/TCP",
		syncs: [][]sink.Change{{gone(a)}, {set(withIP(1, view(b)))}},
		want: [][]string{
			{"delete frontend a ClusterIP 10.96.0.1:80/TCP", "service default/a: delete frontend ClusterIP 10.96.0.1:80/TCP: dataplane is busy"},
			{"delete frontend a ClusterIP 10.96.0.1:80/TCP", "set service b", "set frontend b ClusterIP 10.96.0.1:80/TCP → []", "<nil>"},
		},
	}, {
		name:  "the first service gets the address back: the frontend held back is not deleted",
		first: withIP(1, view(a)), fails: "delete frontend a ClusterIP 10.96.0.1:80/TCP",
		syncs: [][]sink.Change{{gone(a), set(withIP(1, view(b)))}, {set(withIP(1, view(a))), gone(b)}},
		want: [][]string{
			{"delete frontend a ClusterIP 10.96.0.1:80/TCP", "set service b", "service default/a: delete frontend ClusterIP 10.96.0.1:80/TCP: dataplane is busy; " + heldBack},
			{"delete service b", "set service a", "set frontend a ClusterIP 10.96.0.1:80/TCP → []", "<nil>"},
		},
	}, {
		name:  "a claim of the whole address also holds back ports of the other service",
		first: whole(withIP(1, view(a))), fails: "delete frontend a ClusterIP 10.96.0.1",
		syncs: [][]sink.Change{{gone(a), set(withIP(1, view(b)))}},
		want: [][]string{
			{"delete frontend a ClusterIP 10.96.0.1", "set service b", "service default/a: delete frontend ClusterIP 10.96.0.1: dataplane is busy; " +
				"service default/b: set frontend ClusterIP 10.96.0.1:80/TCP: service default/a may still have it"},
		},
	}, {
		name:  "unrelated services are not held back",
		first: withIP(1, view(a)), fails: "delete frontend a ClusterIP 10.96.0.1:80/TCP",
		syncs: [][]sink.Change{{gone(a), set(withIP(2, view(c)))}},
		want: [][]string{
			{"delete frontend a ClusterIP 10.96.0.1:80/TCP", "set service c", "set frontend c ClusterIP 10.96.0.2:80/TCP → []", "service default/a: delete frontend ClusterIP 10.96.0.1:80/TCP: dataplane is busy"},
		},
	}}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			log := &eventLog{}
			s := sink.Events(log)
			if err := s.Sync(t.Context(), &sink.Changes{Services: slices.Values([]sink.Change{set(tc.first)})}); err != nil {
				t.Fatal(err)
			}
			log.take()
			log.fail = func(line string) error {
				if line == tc.fails {
					log.fail = nil
					return errBusy
				}
				return nil
			}
			var got [][]string
			for _, changes := range tc.syncs {
				err := s.Sync(t.Context(), &sink.Changes{Services: slices.Values(changes)})
				got = append(got, append(strings.Split(log.take(), "\n"), fmt.Sprint(err)))
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("events and errors (-want +got):\n%s", diff)
			}
		})
	}
}

func TestEventsErrorNamesObject(t *testing.T) {
	log := &eventLog{}
	s := sink.Events(log)
	cases := map[string]string{
		"set service":     "service default/web: set service: dataplane is busy",
		"set endpoint":    "service default/web: set endpoint 10.0.0.1: dataplane is busy",
		"set frontend":    "service default/web: set frontend ClusterIP 10.96.0.1:80/TCP: dataplane is busy",
		"delete frontend": "service default/web: delete frontend ClusterIP 10.96.0.1:80/TCP: dataplane is busy",
		"delete endpoint": "service default/web: delete endpoint 10.0.0.1: dataplane is busy",
		"delete service":  "service default/web: delete service: dataplane is busy",
	}
	for _, event := range []string{"set service", "set endpoint", "set frontend", "delete frontend", "delete endpoint", "delete service"} {
		log.fail = func(line string) error {
			if strings.HasPrefix(line, event) {
				return errBusy
			}
			return nil
		}
		c := sink.Change{Key: web}
		if strings.HasPrefix(event, "set") {
			c.New = withIP(1, view(web, 1))
		}
		err := s.Sync(t.Context(), &sink.Changes{Services: slices.Values([]sink.Change{c})})
		var failed *sink.Failed
		if !errors.As(err, &failed) || err.Error() != cases[event] {
			t.Errorf("%s fails: got %v, want %s", event, err, cases[event])
		}
	}
}

// objects is a handler that stores the received objects. It stores frontends by claim. It
// checks that no object refers to a missing object, and that each address is set and
// deleted only for its owner. Calls fail at random, before or after they take effect.
type objects struct {
	t         *testing.T
	r         *rand.Rand
	failing   bool
	services  map[string]bool
	endpoints map[string]bool
	frontends map[api.Claim]string // maps a claim to its owner and endpoints
}

func (o *objects) do(event func()) error {
	if !o.failing {
		event()
		return nil
	}
	switch o.r.IntN(20) {
	case 0:
		return errBusy
	case 1:
		event()
		return errBusy
	case 2:
		panic("oops")
	case 3:
		return sink.ErrStartOver
	}
	event()
	return nil
}

func (o *objects) SetService(_ context.Context, svc *api.Service) error {
	return o.do(func() { o.services[svc.Name] = true })
}

func (o *objects) DeleteService(_ context.Context, svc *api.Service) error {
	return o.do(func() { delete(o.services, svc.Name) })
}

func (o *objects) SetEndpoint(_ context.Context, svc *api.Service, e *api.Endpoint) error {
	if !o.services[svc.Name] {
		o.t.Errorf("endpoint %s is set before its service %s", e.Key(), svc.Name)
	}
	return o.do(func() { o.endpoints[svc.Name+" "+e.Key()] = true })
}

func (o *objects) DeleteEndpoint(_ context.Context, svc *api.Service, e *api.Endpoint) error {
	return o.do(func() { delete(o.endpoints, svc.Name+" "+e.Key()) })
}

func (o *objects) SetFrontend(_ context.Context, svc *api.Service, f nodeview.Frontend) error {
	for _, e := range f.Elsewhere.Endpoints {
		if !o.endpoints[svc.Name+" "+e.Key()] {
			o.t.Errorf("frontend %s of %s is set before its endpoint %s", f.FrontendKey, svc.Name, e.Key())
		}
	}
	o.checkOwner("set", svc, f)
	return o.do(func() { o.frontends[f.Claim()] = svc.Name + " " + targets(f) })
}

func (o *objects) DeleteFrontend(_ context.Context, svc *api.Service, f nodeview.Frontend) error {
	o.checkOwner("deleted", svc, f)
	return o.do(func() { delete(o.frontends, f.Claim()) })
}

func (o *objects) checkOwner(what string, svc *api.Service, f nodeview.Frontend) {
	if owner, _, ok := strings.Cut(o.frontends[f.Claim()], " "); ok && owner != svc.Name {
		o.t.Errorf("frontend %s is %s for %s while %s owns it", f.FrontendKey, what, svc.Name, owner)
	}
}

// FuzzEvents changes a source at random and makes a handler fail at random. In the end,
// the handler must have the source's objects. No address may ever have two owners, and no
// late delete may remove an address from its new owner.
func FuzzEvents(f *testing.F) {
	for seed := range uint64(50) {
		f.Add(seed, uint8(200))
	}
	f.Fuzz(func(t *testing.T, seed uint64, ops uint8) {
		r := rand.New(rand.NewPCG(seed, 1))
		o := &objects{
			t: t, r: rand.New(rand.NewPCG(seed, 2)), failing: seed%4 > 0,
			services: map[string]bool{}, endpoints: map[string]bool{}, frontends: map[api.Claim]string{},
		}
		run(t, sink.Options{BatchSize: int(seed%5) + 1}, sink.Events(o), func(w *world) {
			w.src.MarkSynced()
			for range ops {
				// Give each address to at most one service.
				free := []byte{1, 2, 3, 4, 5, 6}
				r.Shuffle(len(free), func(i, j int) { free[i], free[j] = free[j], free[i] })
				var set []*api.View
				for i, name := range []string{"a", "b", "c", "d"} {
					if r.IntN(3) == 0 {
						w.src.Delete(key(name))
					} else {
						v := withIP(free[i], view(key(name), randomBytes(r)...))
						if r.IntN(4) == 0 {
							v.Service.IPs.ExternalIPs, v.Service.IPs.ClusterIPs = v.Service.IPs.ClusterIPs, api.IPSet{}
						}
						set = append(set, v)
					}
				}
				w.src.Set(set...)
				if r.IntN(10) == 0 {
					w.src.Reset()
				}
				if r.IntN(2) == 0 {
					synctest.Wait()
				}
			}
			synctest.Wait()
			o.failing = false
			w.waitApplied()

			want := &objects{services: map[string]bool{}, endpoints: map[string]bool{}, frontends: map[api.Claim]string{}}
			for _, v := range w.src.Views() {
				want.services[v.Service.Name] = true
				for _, e := range v.Endpoints {
					want.endpoints[v.Service.Name+" "+e.Key()] = true
				}
				for f := range nodeview.Frontends(v) {
					want.frontends[f.Claim()] = v.Service.Name + " " + targets(f)
				}
			}
			if diff := cmp.Diff(want.lists(), o.lists()); diff != "" {
				w.Errorf("objects (-want +got):\n%s", diff)
			}
		})
	})
}

func (o *objects) lists() [][]string {
	frontends := []string{}
	for k, v := range o.frontends {
		frontends = append(frontends, fmt.Sprint(k, " ", v))
	}
	return [][]string{slices.Sorted(maps.Keys(o.services)), slices.Sorted(maps.Keys(o.endpoints)), slices.Sorted(slices.Values(frontends))}
}
