// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"context"
	"fmt"
	"reflect"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"k8s.io/apimachinery/pkg/types"
)

// Handler gets single events from [Events]. svc is the service that the object
// belongs to; for a delete it is the one delivered last.
//
// A set delivers a new object or a changed one: a service by its key, an endpoint by
// [api.Endpoint.Key], a frontend by its FrontendKey. A frontend comes with its
// endpoints, so it also changes when one of these does. A handler that does not need
// some objects returns nil for them.
//
// An error, or a panic, ends the events of its service for this Sync. When the service
// comes again, and in a pass, all its objects are set again, and deletes may be repeated,
// or be of objects whose set never came. But a DeleteFrontend that succeeded is not
// repeated, and none comes for an address and port that another service has: a handler
// may keep frontends by address and port alone.
type Handler interface {
	SetService(ctx context.Context, svc *api.Service) error
	DeleteService(ctx context.Context, svc *api.Service) error
	// SetEndpoint and DeleteEndpoint deliver the endpoints that this node balances to,
	// without draining ones.
	SetEndpoint(ctx context.Context, svc *api.Service, e *api.Endpoint) error
	DeleteEndpoint(ctx context.Context, svc *api.Service, e *api.Endpoint) error
	SetFrontend(ctx context.Context, svc *api.Service, f nodeview.Frontend) error
	DeleteFrontend(ctx context.Context, svc *api.Service, f nodeview.Frontend) error
}

// Events returns a sink that calls h for what changed, object by object. Over all
// services of a Changes, first frontends are deleted, then endpoints, then services;
// then services are set, then endpoints, then frontends. So nothing refers to an object
// that does not exist, and an address or port that goes from one service to another is
// free before it is taken. Where it is not, because the frontend of the first service
// could not be deleted, the frontend of the other one is held back: that service has
// failed too, and comes again. Within each of these steps the order is that of keys.
//
// In a pass (see [Changes]) the sink deletes what differs from what it delivered before,
// and sets all objects of every service again, as h may have lost them. Before it sets
// a frontend, it deletes one with the same address and port of a service that the pass
// has not reached. For this the sink holds the last view of every service that it
// delivered, which is memory of its own unless the source holds the same views.
//
// The services whose events failed are returned as [*Failed].
//
// The sink starts, stops, cleans up and verifies h, where h is a [Starter], [Stopper],
// [Drainer], [Cleaner] or [Verifier].
func Events(h Handler) Sink {
	return &events{
		Forwarder: Forwarder{h}, handler: h,
		told: map[types.NamespacedName]told{}, places: claims{},
	}
}

// events is the sink of Events. The methods of a sink are never called at once,
// so it needs no lock.
type events struct {
	Forwarder
	handler Handler
	told    map[types.NamespacedName]told
	// places tells whose frontends the handler may have, by claim.
	places claims
	pass   Pass
}

// told is what the handler was told of a service: every object of view if sure, else it
// may have any of them. Whatever is not of view was deleted. Its frontends are in places.
type told struct {
	view *api.ServiceEndpoints
	sure bool
}

// transition takes a service from what was told to its new view, nil if it is deleted.
type transition struct {
	key types.NamespacedName
	old told
	new *api.ServiceEndpoints
	// deleted says that all deletes have succeeded, so that nothing is left but objects
	// of new.
	deleted bool
	// err is what went wrong first; nothing is told after it.
	err error
}

func (e *events) Sync(ctx context.Context, c *Changes) error {
	transitions := e.transitions(c)
	e.makeRoom(ctx, transitions)
	tell(ctx, transitions, e.deleteFrontends, e.deleteEndpoints, e.deleteService)
	tell(ctx, transitions, e.setService, e.setEndpoints, e.setFrontends)

	var failed Failed
	for _, t := range transitions {
		e.note(t)
		failed.Add(t.key, t.err)
	}
	return failed.Err()
}

// tell takes all transitions, but for those that fail, through one step after
// the other.
func tell(ctx context.Context, transitions []*transition, steps ...func(context.Context, *transition) error) {
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

// transitions returns what c is to do, in order of keys.
func (e *events) transitions(c *Changes) []*transition {
	var transitions []*transition
	add := func(key types.NamespacedName, new *api.ServiceEndpoints) {
		transitions = append(transitions, &transition{key: key, old: e.told[key], new: new})
	}
	e.pass.Begin(c)
	if c.First {
		for key, t := range e.told { // the handler may have lost any of it
			t.sure = false
			e.told[key] = t
		}
	}
	for s := range c.Services {
		add(s.Key, s.New)
	}
	if c.Last {
		for key := range e.told {
			if e.pass.Stale(key) {
				add(key, nil)
			}
		}
		slices.SortFunc(transitions, func(a, b *transition) int { return api.CompareKeys(a.key, b.key) })
	}
	return transitions
}

// makeRoom deletes the frontends of services without a transition that are where
// frontends of others are to be.
func (e *events) makeRoom(ctx context.Context, transitions []*transition) {
	for _, t := range transitions {
		for f := range nodeview.Frontends(t.new) {
			for _, other := range e.places.meet(f.Claim(), t.key) {
				_, found := slices.BinarySearchFunc(transitions, other, func(t *transition, key types.NamespacedName) int {
					return api.CompareKeys(t.key, key)
				})
				if !found {
					e.evict(ctx, other, f.Claim())
				}
			}
		}
	}
}

// evict deletes the frontends of a service that exclude claim. One that cannot be
// deleted stays in places.
func (e *events) evict(ctx context.Context, key types.NamespacedName, claim api.Claim) {
	t := &transition{key: key, old: told{view: e.told[key].view}}
	e.told[key] = t.old
	for f := range nodeview.Frontends(t.old.view) {
		if excludes(f.Claim(), claim) {
			_ = guard(ctx, "event handler", func(ctx context.Context) error { return e.deleteFrontend(ctx, t, f) })
		}
	}
}

// deleteFrontend deletes a frontend of t.old, if the handler may have it.
func (e *events) deleteFrontend(ctx context.Context, t *transition, f nodeview.Frontend) error {
	if !e.places.has(f.Claim(), t.key) {
		return nil
	}
	if err := e.handler.DeleteFrontend(ctx, t.old.view.Service, f); err != nil {
		return fmt.Errorf("delete frontend %s: %w", f.FrontendKey, err)
	}
	e.places.unset(f.Claim(), t.key)
	return nil
}

func (e *events) deleteFrontends(ctx context.Context, t *transition) error {
	kept := frontends(t.new)
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

// setFrontends sets the frontends of t.new. It holds back those that exclude a frontend
// of another service which could not be deleted.
func (e *events) setFrontends(ctx context.Context, t *transition) error {
	var heldBack error
	known := frontends(t.known())
	for f := range nodeview.Frontends(t.new) {
		if old, ok := known[f.FrontendKey]; ok && reflect.DeepEqual(old, f) {
			continue
		}
		if others := e.places.meet(f.Claim(), t.key); len(others) > 0 {
			heldBack = fmt.Errorf("set frontend %s: service %s may still have it", f.FrontendKey, others[0])
			continue
		}
		e.places.set(f.Claim(), t.key)
		if err := e.handler.SetFrontend(ctx, t.new.Service, f); err != nil {
			return fmt.Errorf("set frontend %s: %w", f.FrontendKey, err)
		}
	}
	return heldBack
}

// known returns the view that the handler has for certain, nil if it has none.
func (t *transition) known() *api.ServiceEndpoints {
	if t.old.sure {
		return t.old.view
	}
	return nil
}

// note notes what t has told so far.
func (e *events) note(t *transition) {
	now := told{view: t.old.view}
	if t.deleted {
		now = told{t.new, t.err == nil}
	}
	if now.view == nil {
		delete(e.told, t.key)
	} else {
		e.told[t.key] = now
	}
}

// frontends returns the frontends of a view.
func frontends(se *api.ServiceEndpoints) map[nodeview.FrontendKey]nodeview.Frontend {
	all := map[nodeview.FrontendKey]nodeview.Frontend{}
	for f := range nodeview.Frontends(se) {
		all[f.FrontendKey] = f
	}
	return all
}
