// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/elements"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/internal/revstore"
	"github.com/kpng-project/kpng/internal/shrink"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// refused has the services that exceed Options.MaxElements, and descriptions of the
// invalid fields that the source ignores. State.mu guards the fields.
type refused struct {
	// wanted has the source's objects of each service that is too large. They differ from
	// the objects in the joined state.
	wanted map[types.NamespacedName]api.ServiceState
	// sizes has the same keys. Its values say by how much a service exceeds the limit.
	sizes map[types.NamespacedName]string
	// invalid maps a service, and then the name of an EndpointSlice, to a description of
	// the ignored fields. For the Service object, the name is "".
	invalid map[types.NamespacedName]map[string]string
	// merged has the reasons of the states that [Merge] reads.
	merged map[types.NamespacedName]string
	// reasons has the reasons of existing services. Readers see these reasons in snapshots.
	reasons *revstore.Store[types.NamespacedName, string]
	// touched has the services that the present Update may refuse or accept, with their
	// reasons before the Update.
	touched map[types.NamespacedName]reason
}

// reason says why a service, or a part of it, is refused. It is zero if nothing is
// refused.
type reason struct{ size, invalid, merged string }

func (r reason) String() string {
	texts := []string{r.size, r.invalid, r.merged}
	return strings.Join(slices.DeleteFunc(texts, func(text string) bool { return text == "" }), "; ")
}

// verdict is the result of an Update for a service.
type verdict struct {
	key      types.NamespacedName
	was, now reason
}

func newRefused(s *State) refused {
	return refused{
		wanted:  map[types.NamespacedName]api.ServiceState{},
		sizes:   map[types.NamespacedName]string{},
		invalid: map[types.NamespacedName]map[string]string{},
		merged:  map[types.NamespacedName]string{},
		reasons: newStore(s, ordering.Keys, func(a, b string) bool { return a == b }),
		touched: map[types.NamespacedName]reason{},
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

// wantedServices yields all services that the source has. For a refused service, it may
// yield both versions.
func (s *State) wantedServices() iter.Seq[*api.Service] {
	return func(yield func(*api.Service) bool) {
		for service := range s.services() {
			if !yield(service) {
				return
			}
		}
		for _, want := range s.refused.wanted {
			if !yield(want.Service) {
				return
			}
		}
	}
}

// settle accepts or refuses the objects that the source has for a service, and updates the
// joined state. Options.MaxElements describes the rules.
func (s *State) settle(key types.NamespacedName, want api.ServiceState) {
	delete(s.own, key) // s.refused may keep the list of slices, so no later write may modify the list
	targets, accepted, tooLarge := targetsOf(want.Slices), want, ""
	size := elements.Of(want.Service, targets)
	if err := size.Check(s.opts.MaxElements); err != nil {
		last := s.lastAccepted(key)
		if last != nil && last.UID != want.Service.UID {
			last = nil // another object with the same name, which was deleted
		}
		smallest := elements.Of(want.Service, 2) // an EndpointSlice and its only endpoint
		if smallest.Check(s.opts.MaxElements) != nil || last != nil && size.Total() > elements.Of(last, targets).Total() {
			accepted.Service = last
		}
		accepted.Slices = fitting(accepted.Service, want.Slices, s.opts.MaxElements)
		tooLarge = "too large: " + err.Error()
		switch {
		case accepted.Service == nil:
			tooLarge += "; it is not served"
		case accepted.Service != want.Service:
			tooLarge += "; its last accepted version is served"
		default:
			tooLarge += "; it is served with a part of its endpoints"
		}
	}
	s.setSize(key, want, tooLarge)
	s.accept(key, accepted)
}

// lastAccepted returns the accepted version of a Service before the present Update.
// Until the state is synced, no reader has any service, so the result is nil. Otherwise
// the result would depend on the order of the objects in a listing.
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

// fitting returns the first slices with which the service has at most limit elements.
// The last slice of the result may have only a part of its endpoints.
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

// setSize records why the wanted objects of a service are too large. If size is "", it
// records that they are accepted.
func (s *State) setSize(key types.NamespacedName, want api.ServiceState, size string) {
	r := &s.refused
	if _, was := r.wanted[key]; !was && size == "" {
		return
	}
	s.touch(key)
	if size == "" {
		delete(r.wanted, key)
		delete(r.sizes, key)
		return
	}
	r.wanted[key], r.sizes[key] = want, size
}

// maxInvalid limits the length of the description of an object's invalid fields.
const maxInvalid = 512

// setInvalid records the invalid fields of a Service, or of one of its EndpointSlices.
func (s *State) setInvalid(key types.NamespacedName, slice string, problems []error) {
	if len(problems) == 0 {
		return
	}
	s.touch(key)
	text := errors.Join(problems...).Error()
	text = strings.ToValidUTF8(text[:min(len(text), maxInvalid)], "")
	if s.refused.invalid[key] == nil {
		s.refused.invalid[key] = map[string]string{}
	}
	s.refused.invalid[key][slice] = strings.ReplaceAll(text, "\n", "; ")
}

// forgetInvalid forgets the invalid fields of a Service, or of one of its EndpointSlices.
func (s *State) forgetInvalid(key types.NamespacedName, slice string) {
	objects := s.refused.invalid[key]
	if len(objects) == 0 {
		return
	}
	s.touch(key)
	if delete(objects, slice); len(objects) == 0 {
		delete(s.refused.invalid, key)
	}
}

// forgetInvalidSlice forgets the invalid fields of an EndpointSlice, unless the argument
// new is the object that the state already has.
func (s *State) forgetInvalidSlice(key types.NamespacedName, new *api.EndpointSlice) {
	if len(s.refused.invalid) == 0 {
		return
	}
	if slice := s.slices.get(key); slice != nil && slice != new {
		s.forgetInvalid(serviceOf(slice), slice.Name)
	}
}

// setMerged records the reasons for a service in the states that Merge reads.
func (s *State) setMerged(key types.NamespacedName, text string) {
	if text == s.refused.merged[key] {
		return
	}
	s.touch(key)
	if s.refused.merged[key] = text; text == "" {
		delete(s.refused.merged, key)
	}
}

// touch must be called before the present Update changes the reason of a service.
func (s *State) touch(key types.NamespacedName) {
	if _, ok := s.refused.touched[key]; !ok {
		s.refused.touched[key] = s.reason(key)
	}
}

// reason returns why a service is refused. It names only one object with invalid
// fields, because many objects of the service may have such fields.
func (s *State) reason(key types.NamespacedName) reason {
	now := reason{size: s.refused.sizes[key], merged: s.refused.merged[key]}
	objects := s.refused.invalid[key]
	if len(objects) == 0 || s.wanted(key).Service == nil {
		return now
	}
	first, found := "", false
	for slice := range objects {
		if !found || slice < first {
			first, found = slice, true
		}
	}
	now.invalid = "invalid fields ignored: "
	if first != "" {
		now.invalid += "EndpointSlice " + first + ": "
	}
	now.invalid += objects[first]
	if more := len(objects) - 1; more > 0 {
		now.invalid += fmt.Sprintf("; and those of %d more objects", more)
	}
	return now
}

// verdicts updates the reasons, and returns the services whose reasons the present Update
// has changed.
func (s *State) verdicts() []verdict {
	var list []verdict
	for key, was := range s.refused.touched {
		now := s.reason(key)
		if now == (reason{}) {
			s.refused.reasons.Delete(key)
		} else {
			s.refused.reasons.Set(key, now.String())
		}
		if now != was {
			list = append(list, verdict{key, was, now})
		}
	}
	s.refused.touched = shrink.Cleared(s.refused.touched)
	slices.SortFunc(list, func(a, b verdict) int { return ordering.Keys(a.key, b.key) })
	return list
}

// maxLogged limits the services that one Update logs.
const maxLogged = 10

// report logs services that are newly too large, or small enough again, and calls
// Options.OnRefused. It does not log invalid fields, because sources do. The caller
// must not hold s.mu.
func (s *State) report(list []verdict) {
	log, changed := klog.Background(), 0
	for _, v := range list {
		tooLarge := v.now.size != "" && v.was.size == ""
		if tooLarge || v.now.size == "" && v.was.size != "" {
			switch changed++; {
			case changed > maxLogged:
			case tooLarge:
				log.Error(errors.New(v.now.size), "Service too large", "service", v.key)
			default:
				log.Info("Service is no longer too large, or deleted", "service", v.key)
			}
		}
		invalid := v.now.invalid != "" && v.now.invalid != v.was.invalid
		merged := v.now.merged != "" && v.now.merged != v.was.merged
		if (tooLarge || invalid || merged) && s.opts.OnRefused != nil {
			s.opts.OnRefused(v.key, errors.New(v.now.String()))
		}
	}
	if changed > maxLogged {
		log.Info("More services too large, no longer too large, or deleted", "services", changed-maxLogged)
	}
}
