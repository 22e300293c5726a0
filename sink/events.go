// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"k8s.io/apimachinery/pkg/types"
)

// Handler gets single events from [Events]. svc is the service that the object
// belongs to; for a delete it is the one that was told last.
//
// A set tells a new object or a changed one: a service by its key, an endpoint by
// [api.Endpoint.Key], a frontend by its FrontendKey. A frontend comes with its
// endpoints, so it also changes when one of these does. A handler that has no
// use for some objects returns nil for them.
//
// An error, or a panic, ends the events of its service for this Sync. When the
// service comes again, all its objects are set again, and deletes may be
// repeated, or be of objects whose set was never told. But a DeleteFrontend that
// succeeded is not repeated, and none is told of a place that another service
// has: a handler may keep frontends by address and port alone.
type Handler interface {
	SetService(ctx context.Context, svc *api.Service) error
	DeleteService(ctx context.Context, svc *api.Service) error
	// SetEndpoint and DeleteEndpoint tell the endpoints this node balances to;
	// Draining ones are not among them.
	SetEndpoint(ctx context.Context, svc *api.Service, e *api.Endpoint) error
	DeleteEndpoint(ctx context.Context, svc *api.Service, e *api.Endpoint) error
	SetFrontend(ctx context.Context, svc *api.Service, f nodeview.Frontend) error
	DeleteFrontend(ctx context.Context, svc *api.Service, f nodeview.Frontend) error
}

// Events returns a sink that tells h what changed, object by object. Over all
// services of a Changes, first frontends are deleted, then endpoints, then
// services; then services are set, then endpoints, then frontends. So nothing
// refers to what is not there, and an address or port that goes from one service
// to another is free before it is taken. Where it is not, because the first
// service failed before its frontend was deleted, the frontend of the other one
// is held back: that service has failed too, and is told again. Within each of
// these steps the order is that of keys.
//
// A full Changes is told as the difference to what h was told before. For this
// the sink holds the last view of every service that it told, which is memory of
// its own unless the source holds the same views.
//
// The services whose events failed are returned as [*Failed]. If an error of h
// wraps [ErrStartOver], the full Changes that follows sets all there is again.
//
// The sink starts, stops, cleans up and verifies h, where h is a [Starter],
// [Stopper], [Cleaner] or [Verifier].
func Events(h Handler) Sink {
	return &events{handler: h, told: map[types.NamespacedName]told{}, stuck: map[types.NamespacedName]bool{}}
}

// events is the sink of Events. The methods of a sink are never called at once,
// so it needs no lock.
type events struct {
	handler Handler
	told    map[types.NamespacedName]told
	// stuck are the services some of whose deletes have not succeeded yet: their
	// frontends may be where others are to be.
	stuck map[types.NamespacedName]bool
}

// told is what the handler was told of a service: every object of view if sure,
// else it may have any of them but the frontends in absent. Whatever is not of
// view was deleted.
type told struct {
	view   *api.ServiceEndpoints
	sure   bool
	absent map[nodeview.FrontendKey]bool
}

// transition takes a service from what was told to its new view, nil if it goes.
type transition struct {
	key types.NamespacedName
	old told
	new *api.ServiceEndpoints
	// deleted is whether all deletes have succeeded, so that nothing is left but
	// objects of new.
	deleted bool
	// absent are frontends that the handler does not have: of old until deleted,
	// then of new.
	absent map[nodeview.FrontendKey]bool
	// heldBack says why frontends of new are held back, nil if none are.
	heldBack error
	// err is what went wrong first; nothing is told after it.
	err error
}

func (e *events) Sync(ctx context.Context, c *Changes) error {
	transitions := e.transitions(c)
	tell(ctx, transitions, e.deleteFrontends, e.deleteEndpoints, e.deleteService)
	for _, t := range transitions {
		e.note(t)
	}
	e.holdBack(transitions)
	tell(ctx, transitions, e.setService, e.setEndpoints, e.setFrontends)

	var failed Failed
	for _, t := range transitions {
		e.note(t)
		failed.Add(t.key, t.err)
	}
	return e.distrust(failed.Err())
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
		old := e.told[key]
		transitions = append(transitions, &transition{key: key, old: old, new: new, absent: maps.Clone(old.absent)})
	}
	for s := range c.Services {
		add(s.Key, s.New)
	}
	if c.Full {
		kept := make(map[types.NamespacedName]bool, len(transitions))
		for _, t := range transitions {
			kept[t.key] = true
		}
		for key := range e.told {
			if !kept[key] {
				add(key, nil)
			}
		}
		slices.SortFunc(transitions, func(a, b *transition) int { return api.CompareKeys(a.key, b.key) })
	}
	return transitions
}

func (e *events) deleteFrontends(ctx context.Context, t *transition) error {
	kept := frontends(t.new)
	for f := range nodeview.Frontends(t.old.view) {
		if _, ok := kept[f.FrontendKey]; ok || t.absent[f.FrontendKey] {
			continue
		}
		if err := e.handler.DeleteFrontend(ctx, t.old.view.Service, f); err != nil {
			return fmt.Errorf("delete frontend %s: %w", f.FrontendKey, err)
		}
		t.setAbsent(f.FrontendKey)
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
	t.deleted, t.absent = true, nil
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

func (e *events) setFrontends(ctx context.Context, t *transition) error {
	known := frontends(t.known())
	for f := range nodeview.Frontends(t.new) {
		if old, ok := known[f.FrontendKey]; ok && frontendsEqual(&old, &f) || t.absent[f.FrontendKey] {
			continue
		}
		if err := e.handler.SetFrontend(ctx, t.new.Service, f); err != nil {
			return fmt.Errorf("set frontend %s: %w", f.FrontendKey, err)
		}
	}
	return t.heldBack
}

// known returns the view that the handler has for certain, nil if it has none.
func (t *transition) known() *api.ServiceEndpoints {
	if t.old.sure {
		return t.old.view
	}
	return nil
}

func (t *transition) setAbsent(k nodeview.FrontendKey) {
	if t.absent == nil {
		t.absent = map[nodeview.FrontendKey]bool{}
	}
	t.absent[k] = true
}

// note notes what t has told so far.
func (e *events) note(t *transition) {
	now := told{view: t.old.view, absent: t.absent}
	if t.deleted {
		now.view, now.sure = t.new, t.err == nil
	}
	if now.view == nil {
		delete(e.told, t.key)
	} else {
		e.told[t.key] = now
	}
	if t.deleted || now.view == nil {
		delete(e.stuck, t.key)
	} else {
		e.stuck[t.key] = true
	}
}

// distrust returns err, and if that asks to start over, takes nothing that was
// told for certain any more.
func (e *events) distrust(err error) error {
	if errors.Is(err, ErrStartOver) {
		for key, t := range e.told {
			t.sure = false
			e.told[key] = t
		}
	}
	return err
}

// Start implements Starter.
func (e *events) Start(ctx context.Context) error {
	if s, ok := e.handler.(Starter); ok {
		return s.Start(ctx)
	}
	return nil
}

// Stop implements Stopper.
func (e *events) Stop(ctx context.Context) error {
	if s, ok := e.handler.(Stopper); ok {
		return s.Stop(ctx)
	}
	return nil
}

// Cleanup implements Cleaner.
func (e *events) Cleanup(ctx context.Context) error {
	if s, ok := e.handler.(Cleaner); ok {
		return s.Cleanup(ctx)
	}
	return nil
}

// Verify implements Verifier.
func (e *events) Verify(ctx context.Context) error {
	if s, ok := e.handler.(Verifier); ok {
		return e.distrust(s.Verify(ctx))
	}
	return nil
}

// frontends returns the frontends of a view.
func frontends(se *api.ServiceEndpoints) map[nodeview.FrontendKey]nodeview.Frontend {
	all := map[nodeview.FrontendKey]nodeview.Frontend{}
	for f := range nodeview.Frontends(se) {
		all[f.FrontendKey] = f
	}
	return all
}

// frontendsEqual reports whether two frontends at the same place say the same.
func frontendsEqual(a, b *nodeview.Frontend) bool {
	samePort := a.ServicePort == b.ServicePort ||
		a.ServicePort != nil && b.ServicePort != nil && *a.ServicePort == *b.ServicePort
	return samePort &&
		trafficEqual(&a.Elsewhere, &b.Elsewhere) && trafficEqual(&a.Node, &b.Node) &&
		a.Sources.Restricted == b.Sources.Restricted &&
		slices.Equal(a.Sources.Ranges, b.Sources.Ranges) && slices.Equal(a.Sources.Own, b.Sources.Own) &&
		a.Masquerade == b.Masquerade && a.Affinity == b.Affinity
}

func trafficEqual(a, b *nodeview.Traffic) bool {
	return a.Verdict == b.Verdict &&
		slices.EqualFunc(a.Endpoints, b.Endpoints, func(a, b nodeview.Target) bool {
			return a.Port == b.Port && a.Endpoint.Equal(b.Endpoint)
		})
}
