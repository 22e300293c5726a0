// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"errors"
	"iter"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/elements"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/internal/revstore"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// refused has the services that exceed Options.MaxElements. State.mu guards the fields.
type refused struct {
	// wanted has the objects of the source for each refused service, which differ from the
	// joined state.
	wanted map[types.NamespacedName]api.ServiceState
	// reasons has the same keys. Readers see it in snapshots.
	reasons *revstore.Store[types.NamespacedName, string]
	// touched has the services that the present Update has refused or accepted.
	touched map[types.NamespacedName]struct{}
}

// verdict is the result of an Update for a service. The reason is empty if the service is
// accepted again.
type verdict struct {
	key    types.NamespacedName
	reason string
}

func newRefused(s *State) refused {
	return refused{
		wanted:  map[types.NamespacedName]api.ServiceState{},
		reasons: newStore(s, ordering.Keys, func(a, b string) bool { return a == b }),
		touched: map[types.NamespacedName]struct{}{},
	}
}

// wanted returns the objects that the source has for a service. The caller may modify the
// result.
func (s *State) wanted(key types.NamespacedName) api.ServiceState {
	if want, ok := s.refused.wanted[key]; ok {
		return want
	}
	return s.state(key)
}

// wantedServices yields all services that the source has, in the order of their keys. For
// a refused service, it yields any version.
func (s *State) wantedServices() iter.Seq[*api.Service] {
	if len(s.refused.wanted) == 0 {
		return s.services()
	}
	list := slices.Collect(s.services())
	for key, want := range s.refused.wanted {
		if s.state(key).Service == nil {
			list = append(list, want.Service)
		}
	}
	slices.SortFunc(list, func(a, b *api.Service) int { return ordering.Keys(a.Key(), b.Key()) })
	return slices.Values(list)
}

// settle accepts or refuses the objects that the source has for a service, and updates the
// joined state. Options.MaxElements describes the rules.
func (s *State) settle(key types.NamespacedName, want api.ServiceState) {
	delete(s.own, key) // s.refused may keep the list of slices, too
	targets, accepted, reason := targetsOf(want.Slices), want, ""
	size := elements.Of(want.Service, targets)
	if err := size.Check(s.opts.MaxElements); err != nil {
		last := s.lastAccepted(key)
		if last != nil && last.UID != want.Service.UID {
			last = nil // a deleted object of the same name
		}
		smallest := elements.Of(want.Service, 2) // a slice with one endpoint
		if smallest.Check(s.opts.MaxElements) != nil || last != nil && size.Total() > elements.Of(last, targets).Total() {
			accepted.Service = last
		}
		accepted.Slices = fitting(accepted.Service, want.Slices, s.opts.MaxElements)
		switch {
		case accepted.Service == nil:
			reason = err.Error() + "; it is not served"
		case accepted.Service != want.Service:
			reason = err.Error() + "; its last accepted version is served"
		default:
			reason = err.Error() + "; it is served with a part of its endpoints"
		}
	}
	s.refused.set(key, want, reason)
	s.accept(key, accepted)
}

// lastAccepted returns the accepted version of a Service before the present Update. Until
// the state is synced, no reader has any service, so the result is nil. Otherwise it would
// depend on the order of the objects in a listing.
func (s *State) lastAccepted(key types.NamespacedName) *api.Service {
	if !s.IsSynced() {
		return nil
	}
	before, _ := s.published.get()
	if state, ok := before.States.Get(key); ok {
		return state.Service
	}
	return nil
}

// fitting returns the first slices with which the service has at most limit elements. The
// last one may have only a part of its endpoints.
func fitting(service *api.Service, list []*api.EndpointSlice, limit int) []*api.EndpointSlice {
	each := elements.Of(service, 1).Targets
	if each == 0 {
		return list
	}
	room := (int64(cmp.Or(limit, elements.DefaultMax)) - elements.Of(service, 0).Total()) / each
	for i, slice := range list {
		n := int64(1 + len(slice.Endpoints))
		if n <= room {
			room -= n
			continue
		}
		list = slices.Clone(list[:i])
		if room > 1 {
			part := *slice
			part.Endpoints = part.Endpoints[:room-1]
			list = append(list, &part)
		}
		return list
	}
	return list
}

// set records that the wanted objects of a service are refused for a reason, or accepted if
// the reason is "".
func (r *refused) set(key types.NamespacedName, want api.ServiceState, reason string) {
	if _, was := r.wanted[key]; !was && reason == "" {
		return
	}
	r.touched[key] = struct{}{}
	if reason == "" {
		delete(r.wanted, key)
		r.reasons.Delete(key)
		return
	}
	r.wanted[key] = want
	r.reasons.Set(key, reason)
}

// verdicts compares the services with a snapshot from before the present Update. It returns
// those that are newly refused, and those that exist and are accepted again.
func (s *State) verdicts(before *Snapshot) []verdict {
	var list []verdict
	for key := range s.refused.touched {
		_, was := before.Refused.Get(key)
		reason, is := s.refused.reasons.Get(key)
		if is && !was || was && !is && s.state(key).Service != nil {
			list = append(list, verdict{key, reason})
		}
	}
	clear(s.refused.touched)
	slices.SortFunc(list, func(a, b verdict) int { return ordering.Keys(a.key, b.key) })
	return list
}

// maxLogged limits the services that one Update logs.
const maxLogged = 10

// report logs verdicts and calls Options.OnRefused. The caller does not hold s.mu.
func (s *State) report(list []verdict) {
	log := klog.Background()
	for i, v := range list {
		reason := errors.New(v.reason)
		switch {
		case i == maxLogged:
			log.Info("More services too large or accepted again", "services", len(list)-maxLogged)
		case i > maxLogged:
		case v.reason == "":
			log.Info("Service accepted again", "service", v.key)
		default:
			log.Error(reason, "Service too large", "service", v.key)
		}
		if v.reason != "" && s.opts.OnRefused != nil {
			s.opts.OnRefused(v.key, reason)
		}
	}
}
