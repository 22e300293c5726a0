// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/frontends"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/nodeview"
	"k8s.io/apimachinery/pkg/types"
)

// Handler receives the objects of an [Events] sink. The argument svc is the service of
// the object. In a Delete method, svc is the service as last delivered.
//
// A Set method receives a new or changed object. A service is identified by its key, an
// endpoint by [api.Endpoint.Key], and a frontend by its FrontendKey. A frontend contains
// its endpoints, so it also changes when an endpoint changes, or when existing flows may no
// longer continue to a draining endpoint. If a handler does not need a kind of object, its
// methods for that kind should return nil.
//
// If a method fails or panics, the handler receives no more objects of the service in
// this Sync. The next delivery of this service sets all its objects again, and so does
// each pass. A Delete call may be repeated, and may concern an object that was never set.
// But a successful DeleteFrontend is not repeated, and DeleteFrontend never concerns an
// address and port of another service. So a handler may store frontends by address and
// port alone.
type Handler interface {
	SetService(ctx context.Context, svc *api.Service) error
	DeleteService(ctx context.Context, svc *api.Service) error
	// SetEndpoint and DeleteEndpoint receive the endpoints that this node uses, except
	// draining endpoints.
	SetEndpoint(ctx context.Context, svc *api.Service, e *api.Endpoint) error
	DeleteEndpoint(ctx context.Context, svc *api.Service, e *api.Endpoint) error
	SetFrontend(ctx context.Context, svc *api.Service, f nodeview.Frontend) error
	DeleteFrontend(ctx context.Context, svc *api.Service, f nodeview.Frontend) error
}

// Events returns a sink that calls h for each changed object. A Sync first deletes the
// removed frontends of all services, then endpoints, then services. After that it sets
// services, then endpoints, then frontends. So no object refers to a missing object,
// and a service gets an address and port only after the previous owner's frontend was
// deleted. If a frontend cannot be deleted, the sink does not set the frontend that
// would replace it. Then the service of the new frontend fails too, and is delivered
// again.
//
// In a pass (see [Changes]) the sink deletes the objects that the services no longer
// have. It sets all objects of every service again, because h may have lost them. A new
// frontend may replace a frontend of a service that the pass has not reached. Then the
// sink deletes the old frontend first. For this, it holds the last delivered view of
// every service. It usually shares these views with the source.
//
// The error of Sync is a [*Failed] with the services for which a method of h failed.
//
// The driver finds the optional methods of h, such as those of [Starter] and [Cleaner], with
// [As].
func Events(h Handler) Sink {
	if isNil(h) {
		return Func(nil)
	}
	return &events{
		handler: h, sent: map[types.NamespacedName]sent{}, owners: claimOwners{},
	}
}

// events is the sink of Events. Calls of its methods never overlap, so it needs no lock.
type events struct {
	handler Handler
	sent    map[types.NamespacedName]sent
	// The claims of all frontends that the handler may have, with their owners.
	owners claimOwners
	pass   Pass
}

// sent is the view that the handler received for a service. If sure is true, the handler
// has every object of the view; otherwise it may have some of them. The handler has no
// other objects of the service. The claims of the service's frontends are in owners.
type sent struct {
	view *api.View
	sure bool
}

// transition is the change of a service from its last sent view to a new view. The new
// view of a deleted service is nil.
type transition struct {
	key types.NamespacedName
	old sent
	new *api.View
	// The handler has all objects of the old view, and both views have the same frontends,
	// apart from their endpoints.
	sameFrontends bool
	// All deletes have succeeded, so the handler has only objects of the view new.
	deleted bool
	// The first error. After an error, the handler receives no more objects of the service.
	err error
}

func (e *events) Unwrap() any { return e.handler }

func (e *events) Sync(ctx context.Context, c *Changes) error {
	transitions := e.transitions(c)
	e.makeRoom(ctx, transitions)
	runSteps(ctx, transitions, e.deleteFrontends, e.deleteEndpoints, e.deleteService)
	runSteps(ctx, transitions, e.setService, e.setEndpoints, e.setFrontends)

	var failed Failed
	for _, t := range transitions {
		e.note(t)
		failed.Add(t.key, t.err)
	}
	return failed.Err()
}

// runSteps runs each step for all transitions before the next step. It skips transitions
// with an error.
func runSteps(ctx context.Context, transitions []*transition, steps ...func(context.Context, *transition) error) {
	for _, step := range steps {
		for _, t := range transitions {
			switch {
			case t.err != nil:
			case ctx.Err() != nil:
				t.err = context.Cause(ctx)
			default:
				t.err = guard(ctx, "event handler", func(ctx context.Context) error { return step(ctx, t) })
			}
		}
	}
}

// transitions returns the transitions of c in order of keys.
func (e *events) transitions(c *Changes) []*transition {
	var transitions []*transition
	add := func(key types.NamespacedName, new *api.View) {
		t := &transition{key: key, old: e.sent[key], new: new}
		t.sameFrontends = frontends.Same(t.known(), new)
		transitions = append(transitions, t)
	}
	e.pass.Begin(c)
	if c.First {
		for key, t := range e.sent { // the handler may have lost any object
			t.sure = false
			e.sent[key] = t
		}
	}
	for s := range c.Services {
		add(s.Key, s.New)
	}
	if c.Last {
		for key := range e.sent {
			if e.pass.Stale(key) {
				add(key, nil)
			}
		}
		slices.SortFunc(transitions, func(a, b *transition) int { return ordering.Keys(a.key, b.key) })
	}
	return transitions
}

// makeRoom deletes each old frontend that conflicts with a new frontend, if the service
// of the old frontend has no transition.
func (e *events) makeRoom(ctx context.Context, transitions []*transition) {
	taken := map[types.NamespacedName]claimOwners{} // claims by their old owners
	for _, t := range transitions {
		if t.sameFrontends {
			continue
		}
		for f := range frontends.Keys(t.new) {
			for _, other := range e.owners.conflicting(f.Claim(), t.key) {
				_, found := slices.BinarySearchFunc(transitions, other, func(t *transition, key types.NamespacedName) int {
					return ordering.Keys(t.key, key)
				})
				if found {
					continue
				}
				if taken[other] == nil {
					taken[other] = claimOwners{}
				}
				taken[other].set(f.Claim(), t.key)
			}
		}
	}
	for _, other := range slices.SortedFunc(maps.Keys(taken), ordering.Keys) {
		e.evict(ctx, other, taken[other])
	}
}

// evict deletes those frontends of a service that conflict with one of the claims. If the
// handler fails to delete a frontend, the claim of this frontend stays in e.owners.
func (e *events) evict(ctx context.Context, key types.NamespacedName, claims claimOwners) {
	t := &transition{key: key, old: sent{view: e.sent[key].view}}
	e.sent[key] = t.old
	for f := range nodeview.Frontends(t.old.view) {
		if len(claims.conflicting(f.Claim(), key)) > 0 {
			_ = guard(ctx, "event handler", func(ctx context.Context) error { return e.deleteFrontend(ctx, t, f) })
		}
	}
}

// deleteFrontend deletes the frontend f of t.old if the handler may have it.
func (e *events) deleteFrontend(ctx context.Context, t *transition, f nodeview.Frontend) error {
	if !e.owners.has(f.Claim(), t.key) {
		return nil
	}
	if err := e.handler.DeleteFrontend(ctx, t.old.view.Service, f); err != nil {
		return fmt.Errorf("delete frontend %s: %w", f.FrontendKey, err)
	}
	e.owners.unset(f.Claim(), t.key)
	return nil
}

func (e *events) deleteFrontends(ctx context.Context, t *transition) error {
	if t.old.view == nil || t.sameFrontends {
		return nil
	}
	kept := map[nodeview.FrontendKey]struct{}{}
	for k := range frontends.Keys(t.new) {
		kept[k] = struct{}{}
	}
	for f := range nodeview.Frontends(t.old.view) {
		if _, ok := kept[f.FrontendKey]; ok {
			continue
		}
		if err := e.deleteFrontend(ctx, t, f); err != nil {
			return err
		}
	}
	return nil
}

func (e *events) deleteEndpoints(ctx context.Context, t *transition) error {
	c := Change{Old: t.old.view, New: t.new}
	for old, new := range c.Endpoints() {
		if new != nil {
			continue
		}
		if err := e.handler.DeleteEndpoint(ctx, t.old.view.Service, old); err != nil {
			return fmt.Errorf("delete endpoint %s: %w", old.Key(), err)
		}
	}
	return nil
}

func (e *events) deleteService(ctx context.Context, t *transition) error {
	if t.old.view != nil && t.new == nil {
		if err := e.handler.DeleteService(ctx, t.old.view.Service); err != nil {
			return fmt.Errorf("delete service: %w", err)
		}
	}
	t.deleted = true
	return nil
}

func (e *events) setService(ctx context.Context, t *transition) error {
	before := t.known()
	if t.new == nil || before != nil && before.Service.Equal(t.new.Service) {
		return nil
	}
	if err := e.handler.SetService(ctx, t.new.Service); err != nil {
		return fmt.Errorf("set service: %w", err)
	}
	return nil
}

func (e *events) setEndpoints(ctx context.Context, t *transition) error {
	c := Change{Old: t.known(), New: t.new}
	for _, new := range c.Endpoints() {
		if new == nil {
			continue
		}
		if err := e.handler.SetEndpoint(ctx, t.new.Service, new); err != nil {
			return fmt.Errorf("set endpoint %s: %w", new.Key(), err)
		}
	}
	return nil
}

// setFrontends sets the frontends of t.new, except those that conflict with a frontend of
// another service. For these, it returns an error.
func (e *events) setFrontends(ctx context.Context, t *transition) error {
	var heldBack error
	known, stop := t.knownFrontends()
	defer stop()
	var same comparison
	for f := range nodeview.Frontends(t.new) {
		if old := known(f.FrontendKey); same.frontends(&old, &f) {
			continue
		}
		if !t.sameFrontends { // otherwise the handler has a frontend with this claim
			if others := e.owners.conflicting(f.Claim(), t.key); len(others) > 0 {
				heldBack = fmt.Errorf("set frontend %s: service %s may still have it", f.FrontendKey, others[0])
				continue
			}
			e.owners.set(f.Claim(), t.key)
		}
		if err := e.handler.SetFrontend(ctx, t.new.Service, f); err != nil {
			return fmt.Errorf("set frontend %s: %w", f.FrontendKey, err)
		}
	}
	return heldBack
}

// knownFrontends returns two functions. The function known returns the known frontend with a
// key, or zero. The caller calls known with the keys of all frontends of t.new, in order,
// and then calls stop.
func (t *transition) knownFrontends() (known func(nodeview.FrontendKey) nodeview.Frontend, stop func()) {
	if t.sameFrontends {
		next, stop := iter.Pull(nodeview.Frontends(t.old.view))
		return func(nodeview.FrontendKey) nodeview.Frontend {
			f, _ := next()
			return f
		}, stop
	}
	all := map[nodeview.FrontendKey]nodeview.Frontend{}
	for f := range nodeview.Frontends(t.known()) {
		all[f.FrontendKey] = f
	}
	return func(k nodeview.FrontendKey) nodeview.Frontend { return all[k] }, func() {}
}

// comparison compares frontends of two views. The frontends of a view share their lists, so
// a comparison remembers the last lists that it has compared.
type comparison struct {
	elsewhere, node lastCompared[nodeview.Target]
	ranges          lastCompared[netip.Prefix]
	own             lastCompared[netip.Addr]
	existing        struct {
		a, b nodeview.Existing
		same bool
	}
}

func (c *comparison) frontends(a, b *nodeview.Frontend) bool {
	return a.FrontendKey == b.FrontendKey && a.Masquerade == b.Masquerade && a.Affinity == b.Affinity && a.Algorithm == b.Algorithm &&
		(a.ServicePort == b.ServicePort || a.ServicePort != nil && b.ServicePort != nil && *a.ServicePort == *b.ServicePort) &&
		sameTraffic(&a.Elsewhere, &b.Elsewhere, &c.elsewhere) && sameTraffic(&a.Node, &b.Node, &c.node) &&
		c.sameExisting(a.Existing, b.Existing) && a.Sources.Restricted == b.Sources.Restricted &&
		c.ranges.equal(a.Sources.Ranges, b.Sources.Ranges, func(a, b netip.Prefix) bool { return a == b }) &&
		c.own.equal(a.Sources.Own, b.Sources.Own, func(a, b netip.Addr) bool { return a == b })
}

// sameExisting reports whether existing flows may continue to the same endpoints.
func (c *comparison) sameExisting(a, b nodeview.Existing) bool {
	if x := &c.existing; x.a != a || x.b != b {
		before := slices.Collect(a.All())
		now := slices.Collect(b.All())
		x.a, x.b = a, b
		x.same = slices.EqualFunc(before, now, func(a, b nodeview.Target) bool { return a.AddrPort() == b.AddrPort() })
	}
	return c.existing.same
}

func sameTraffic(a, b *nodeview.Traffic, lists *lastCompared[nodeview.Target]) bool {
	return a.Verdict == b.Verdict && a.List == b.List && lists.equal(a.Endpoints, b.Endpoints, sameTarget)
}

func sameTarget(a, b nodeview.Target) bool {
	return a.Port == b.Port && (a.Endpoint == b.Endpoint || a.Endpoint.Equal(b.Endpoint))
}

// lastCompared is the result of the last comparison of two lists.
type lastCompared[T any] struct {
	a, b  *T
	count int
	same  bool
}

func (l *lastCompared[T]) equal(a, b []T, equal func(a, b T) bool) bool {
	switch {
	case len(a) != len(b):
		return false
	case len(a) == 0 || &a[0] == &b[0]:
		return true
	case &a[0] != l.a || &b[0] != l.b || len(a) != l.count:
		*l = lastCompared[T]{&a[0], &b[0], len(a), slices.EqualFunc(a, b, equal)}
	}
	return l.same
}

// known returns the old view, or nil if the handler may lack objects of this view.
func (t *transition) known() *api.View {
	if t.old.sure {
		return t.old.view
	}
	return nil
}

// note records the result of t in e.sent.
func (e *events) note(t *transition) {
	now := sent{view: t.old.view}
	if t.deleted {
		now = sent{t.new, t.err == nil}
	}
	if now.view == nil {
		delete(e.sent, t.key)
	} else {
		e.sent[t.key] = now
	}
}
