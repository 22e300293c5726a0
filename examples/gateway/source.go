// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"iter"
	"net/netip"
	"sync/atomic"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/watcher/kube"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
)

// source reads gateways and their routes, and writes a service for each gateway.
type source struct {
	controller string // the name of this controller in GatewayClasses
	pools      []netip.Prefix
	writes     bool // whether this process assigns addresses and writes status
	client     dynamic.Interface
	kube       kube.Options // of the services to which routes lead

	informers map[string]cache.SharedIndexInformer // by kind
	services  atomic.Pointer[cluster.Snapshot]
	queue     workqueue.TypedRateLimitingInterface[item]
	owners    map[netip.Addr]types.NamespacedName // the Gateways of addresses; empty without writes
}

// item is an object that must be processed.
type item struct {
	kind string
	key  types.NamespacedName
}

// run writes the services of gateways to out until ctx ends.
func (s *source) run(ctx context.Context, out *cluster.State) error {
	s.informers, s.owners = map[string]cache.SharedIndexInformer{}, map[netip.Addr]types.NamespacedName{}
	s.queue = workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[item]())
	factory := dynamicinformer.NewDynamicSharedInformerFactory(s.client, 0)
	for kind, resource := range resources {
		s.informers[kind] = factory.ForResource(resource).Informer()
		if err := s.informers[kind].SetTransform(decode); err != nil {
			return err
		}
		if err := s.informers[kind].AddIndexers(cache.Indexers{"references": references}); err != nil {
			return err
		}
	}
	var synced []cache.InformerSynced
	for _, informer := range s.informers {
		registration, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    s.changed,
			UpdateFunc: func(old, new any) { s.changed(old); s.changed(new) },
			DeleteFunc: s.changed,
		})
		if err != nil {
			return err
		}
		synced = append(synced, registration.HasSynced)
	}
	services := cluster.New(cluster.Options{})
	group, ctx := errgroup.WithContext(ctx)
	defer context.AfterFunc(ctx, s.queue.ShutDown)()
	group.Go(func() error { return kube.Watch(ctx, services, s.kube) })
	factory.Start(ctx.Done())
	if !cache.WaitForCacheSync(ctx.Done(), append(synced, services.IsSynced)...) {
		return group.Wait()
	}
	s.services.Store(services.Snapshot())
	for _, o := range s.informers["Gateway"].GetStore().List() {
		for _, a := range s.usable(o.(*object)) {
			if s.writes {
				s.owners[a] = o.(*object).key()
			}
		}
	}
	group.Go(func() error {
		services.Follow(ctx, func(snapshot *cluster.Snapshot, changes iter.Seq[cluster.Change]) {
			s.services.Store(snapshot)
			out.Update(func(tx *cluster.Tx) {
				for _, node := range snapshot.Nodes.All() {
					tx.SetNode(node)
				}
			})
			for change := range changes {
				s.touch("Service " + change.Key.String())
			}
		})
		return nil
	})
	for {
		if s.queue.Len() == 0 {
			out.SetSynced()
		}
		next, end := s.queue.Get()
		if end {
			return group.Wait()
		}
		if err := s.process(ctx, out, next); err != nil {
			klog.FromContext(ctx).Error(err, "Cannot write status; retrying", "kind", next.kind, "object", next.key)
			s.queue.AddRateLimited(next)
		} else {
			s.queue.Forget(next)
		}
		s.queue.Done(next)
	}
}

// changed queues an object and what depends on it.
func (s *source) changed(changed any) {
	if last, ok := changed.(cache.DeletedFinalStateUnknown); ok {
		changed = last.Obj
	}
	o := changed.(*object)
	s.queue.Add(item{o.Kind, o.key()})
	for _, p := range o.Spec.ParentRefs {
		s.queue.Add(item{"Gateway", p.gateway(o)})
	}
	s.touch(o.reference())
}

// touch queues the objects with a reference, and what depends on them.
func (s *source) touch(reference string) {
	for _, informer := range s.informers {
		list, _ := informer.GetIndexer().ByIndex("references", reference)
		for _, o := range list {
			s.changed(o)
		}
	}
}

// get returns an object, or nil.
func (s *source) get(kind string, key types.NamespacedName) *object {
	o, _, _ := s.informers[kind].GetStore().GetByKey(cache.NewObjectName(key.Namespace, key.Name).String())
	found, _ := o.(*object)
	return found
}
