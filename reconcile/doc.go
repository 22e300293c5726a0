// SPDX-License-Identifier: Apache-2.0

// Package reconcile keeps the objects of a dataplane equal to the objects that services
// need.
//
// An object is anything that a dataplane has by key: a flow, a chain, a map element, a load
// balancer. You write a [Dataplane]: it plans the objects of a service, and it lists and
// changes objects. The sink that [New] returns does everything else:
//
//	func (d *dataplane) Plan(view *api.View, emit func(Key, Value)) error {
//		for f := range nodeview.Frontends(view) {
//			emit(keyOf(&f), valueOf(&f))
//		}
//		return nil
//	}
//
//	func (d *dataplane) List(ctx context.Context, emit func(Key, Value)) error { … }
//
//	func (d *dataplane) Apply(ctx context.Context, ops []reconcile.Op[Key, Value]) error { … }
//
//	app.Execute(app.Command(app.Options{
//		Name: "my-proxy", Sink: reconcile.New(&dataplane{}, reconcile.Options[Key, Value]{}),
//	}))
//
// The sink lists the dataplane when it starts, and applies only differences. So a restart
// writes nothing if all objects are in place. When services change, the sink compares
// their plans with its record of the dataplane. From time to time, it lists the dataplane
// again, and repairs objects that another program has changed. If the dataplane refuses
// an object, only the service of this object fails. A [Reconciler] can also delete all
// objects.
//
// The rest of this comment is for dataplanes with objects that refer to each other or are
// shared, and for dataplanes that are not transactional.
//
// # Shared objects
//
// An object is deleted when no service needs it. If services need an object with
// different values, the service that was delivered last owns the object, and the object
// has this owner's value. When the owner no longer needs the object, another service that
// needs it becomes the owner, and the object gets that service's value. So an address may
// move between services in any order of deliveries.
//
// Options.Depth must return a higher number for an object than for all objects that refer to
// it. The Reconciler sets an object before the objects that refer to it, and deletes it after
// them. Services that share an object at a depth above 0 must need it with the same value.
//
// # Failing services
//
// Services of a Sync that change the same objects form one part. Apply gets whole parts.
// If it refuses several parts, the Reconciler tries each half, until it has found the
// parts that fail. If an object fails, all services that change it fail. Until these
// services succeed, they keep their earlier objects. If Apply returns a [*Failed], it has
// executed all operations except those that the Failed names. So until these services
// succeed, they are half programmed.
//
// At the end of a pass, the Reconciler deletes the objects that no service needs. After a
// restart, it does not know which of these objects belong to failing services. So it waits
// until the failing services have succeeded. After ten minutes, it deletes the objects at
// depth 0, except objects in the plans of the failing services. A failing service may lose
// an object earlier if it shares the object with a service that no longer needs it.
//
// # Memory
//
// A Reconciler keeps no plans. It keeps its record of the dataplane. For each service, it
// keeps the view, and pointers to the objects. If it needs a value again, it calls Plan
// again. The value in the record is the value that the field New of an operation has
// after Apply. So Apply may replace a large value in New by a digest, or add an ID that
// the system has assigned. Then Options.Equal has to compare both forms.
//
// # What it does not do
//
// A Reconciler does not watch node addresses, track connections or serve health checks.
// If plans also depend on other things, wrap the Reconciler in another sink. When these
// things change, this sink has to return an error that wraps [sink.ErrStartOver]. A
// Reconciler delays no changes. If an object has to stay for some time, for example an
// endpoint with connections, Apply sets New to a value that says this.
//
// Like any sink, a Reconciler is not safe for concurrent use, except the method Suspect.
package reconcile
