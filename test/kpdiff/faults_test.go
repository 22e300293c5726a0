// SPDX-License-Identifier: Apache-2.0

package kpdiff

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/watcher/kube"
	"k8s.io/apimachinery/pkg/types"
)

// TestHistoriesFindFaults checks that TestHistories finds each of these faults with the
// number of histories of a quick run.
func TestHistoriesFindFaults(t *testing.T) {
	discardLogs()
	for name, f := range map[string]faults{
		"a watcher misses deletions of slices":        {watch: watchWithoutDeletions},
		"a watcher misses updates of services":        {watch: watchWithoutUpdates},
		"a driver misses deletions":                   {driver: dropDeletions},
		"a driver does not repeat services that fail": {driver: ignoreFailures},
		"a view lacks unusable ports":                 {view: withoutUnusable},
		"a view lacks an endpoint":                    {view: withoutLast},
	} {
		t.Run(name, func(t *testing.T) {
			found := playAll(t, 0, 300, f)
			if found.err == nil {
				t.Errorf("%d histories do not find the fault", found.histories)
			}
			t.Logf("found by history %d", found.histories)
		})
	}
}

// watchWithoutDeletions keeps slices that the API server has deleted.
func watchWithoutDeletions(ctx context.Context, out *cluster.State, opts kube.Options) error {
	return watchInto(ctx, out, opts, func(old, new *api.ServiceState) {
		for _, slice := range old.Slices {
			if !slices.ContainsFunc(new.Slices, func(s *api.EndpointSlice) bool { return s.Name == slice.Name }) {
				new.Slices = append(new.Slices, slice)
			}
		}
	})
}

// watchWithoutUpdates keeps the first version of each service.
func watchWithoutUpdates(ctx context.Context, out *cluster.State, opts kube.Options) error {
	return watchInto(ctx, out, opts, func(old, new *api.ServiceState) {
		if old.Service != nil && new.Service != nil {
			new.Service = old.Service
		}
	})
}

// watchInto is kube.Watch with a function that changes each new state of a service.
func watchInto(ctx context.Context, out *cluster.State, opts kube.Options, change func(old, new *api.ServiceState)) error {
	in, last := cluster.New(cluster.Options{}), map[types.NamespacedName]api.ServiceState{}
	var merging sync.WaitGroup
	merging.Go(func() {
		cluster.Merge(ctx, out, func(key types.NamespacedName, in []*cluster.Snapshot) (*api.Service, []*api.EndpointSlice) {
			var new api.ServiceState
			if state, _ := in[0].States.Get(key); state != nil {
				new = api.ServiceState{Service: state.Service, Slices: slices.Clone(state.Slices)}
			}
			old := last[key]
			change(&old, &new)
			last[key] = new
			return new.Service, new.Slices
		}, in)
	})
	defer merging.Wait()
	return kube.Watch(ctx, in, opts)
}

// dropDeletions drops deletions of services, except at the end of a pass.
func dropDeletions(s sink.Sink) sink.Sink {
	return wrapped{s, func(ctx context.Context, c *sink.Changes) error {
		all := c.Services
		c.Services = func(yield func(sink.Change) bool) {
			for ch := range all {
				if (ch.New != nil || c.Last) && !yield(ch) {
					return
				}
			}
		}
		return s.Sync(ctx, c)
	}}
}

// ignoreFailures acknowledges services that have failed in the sink.
func ignoreFailures(s sink.Sink) sink.Sink {
	return wrapped{s, func(ctx context.Context, c *sink.Changes) error {
		err := s.Sync(ctx, c)
		if _, ok := errors.AsType[*sink.Failed](err); ok {
			return nil
		}
		return err
	}}
}

// wrapped is a sink with another method Sync.
type wrapped struct {
	sink.Sink
	sync func(context.Context, *sink.Changes) error
}

func (w wrapped) Sync(ctx context.Context, c *sink.Changes) error { return w.sync(ctx, c) }
func (w wrapped) Unwrap() sink.Sink                               { return w.Sink }

// withoutUnusable returns a view that does not list the ports without a usable
// endpoint.
func withoutUnusable(view *api.View) *api.View {
	changed := *view
	changed.Unusable = nil
	return &changed
}

// withoutLast returns a view without its last endpoint, if it has several endpoints.
func withoutLast(view *api.View) *api.View {
	changed := *view
	if n := len(view.Endpoints); n > 2 {
		changed.Endpoints = view.Endpoints[:n-1]
	}
	return &changed
}
