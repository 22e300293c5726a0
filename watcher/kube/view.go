// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"math/big"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
)

// view is what one watch shows of the endpoint slices. A slice whose labels
// change leaves one view and enters another, in whatever order the two watches
// deliver that: for a while it may be in both, or in none.
type view struct {
	versions map[types.NamespacedName]*item[api.EndpointSlice]
	// unlabelled has the names of the slices that lack the proxy's label, by the
	// service that they are for.
	unlabelled map[types.NamespacedName][]string
	// listed is called within the commit of each full listing; may be nil.
	listed func(tx *cluster.Tx)
	ended  bool
}

func newView() *view {
	return &view{versions: map[types.NamespacedName]*item[api.EndpointSlice]{}, unlabelled: map[types.NamespacedName][]string{}}
}

func (v *view) put(i *item[api.EndpointSlice]) {
	if old := v.versions[i.key]; old != nil && old.value.Equal(i.value) {
		i.value = old.value // which the state keeps; one of them is enough
	}
	v.drop(i.key)
	v.versions[i.key] = i
	if !i.labelled {
		service := i.value.ServiceKey()
		v.unlabelled[service] = append(v.unlabelled[service], i.key.Name)
	}
}

func (v *view) drop(key types.NamespacedName) {
	i := v.versions[key]
	if i == nil {
		return
	}
	delete(v.versions, key)
	if i.labelled {
		return
	}
	service := i.value.ServiceKey()
	names := v.unlabelled[service]
	if len(names) == 1 {
		delete(v.unlabelled, service)
		return
	}
	n := slices.Index(names, key.Name)
	v.unlabelled[service] = slices.Delete(names, n, n+1)
}

// newer reports whether a is a later version than b of the same slice. Versions
// that cannot be compared are none later than the other. KEP-5504 has the rule;
// client-go has a function for it from v0.35 on.
func newer(a, b *item[api.EndpointSlice]) bool {
	x, okA := new(big.Int).SetString(a.revision, 10)
	y, okB := new(big.Int).SetString(b.revision, 10)
	return okA && okB && x.Cmp(y) > 0
}

// newView adds a view to those that are merged.
func (m *merger) newView() *view {
	v := newView()
	m.views = append(m.views, v)
	return v
}

// endView takes a view out of those that are merged. What its watch delivers
// from now on is ignored.
func (m *merger) endView(v *view) {
	v.ended = true
	m.views = slices.DeleteFunc(m.views, func(other *view) bool { return other == v })
	for key := range v.versions {
		m.touched = append(m.touched, key)
	}
}

// put sets a slice in a view. That other views have a newer version is no reason
// not to: after a restore of etcd they all do.
func (m *merger) put(v *view, i *item[api.EndpointSlice]) {
	v.put(i)
	m.outdate(i)
	m.touched = append(m.touched, i.key)
}

// outdate drops the versions that are older than i, which has been seen. A watch
// that lags would bring one back if the newer one went first.
func (m *merger) outdate(i *item[api.EndpointSlice]) {
	for _, v := range m.views {
		if old := v.versions[i.key]; old != nil && newer(i, old) {
			v.drop(i.key)
		}
	}
}

// touchUnlabelled says that the service came to be without a selector, or ceased
// to be, so that its unlabelled slices belong into the state or do not.
func (m *merger) touchUnlabelled(service types.NamespacedName) {
	for _, v := range m.views {
		for _, name := range v.unlabelled[service] {
			m.touched = append(m.touched, keyOf(service.Namespace, name))
		}
	}
}

// write brings the state's version of a slice up to date: the newest that any
// view has, unless it is of no use to the proxy.
func (m *merger) write(tx *cluster.Tx, key types.NamespacedName) {
	var newest *item[api.EndpointSlice]
	for _, v := range m.views {
		if i := v.versions[key]; i != nil && (newest == nil || newer(i, newest)) {
			newest = i
		}
	}
	if newest != nil && (newest.labelled || m.services[newest.value.ServiceKey()] != nil) {
		tx.SetSlice(newest.value)
	} else {
		tx.DeleteSlice(key)
	}
}

// viewWriter brings what a watch delivers into its view, and the outcome into
// the state.
type viewWriter struct {
	*merger
	view *view
}

func (w viewWriter) set(i *item[api.EndpointSlice]) {
	w.update(func() { w.put(w.view, i) }, nil)
}

func (w viewWriter) remove(key types.NamespacedName) {
	w.update(func() {
		if i := w.view.versions[key]; i != nil {
			w.view.drop(key)
			w.outdate(i)
			w.touched = append(w.touched, key)
		}
	}, nil)
}

func (w viewWriter) replace(all []*item[api.EndpointSlice]) {
	w.update(func() {
		listed := make(map[types.NamespacedName]bool, len(all))
		for _, i := range all {
			listed[i.key] = true
			w.put(w.view, i)
		}
		for key := range w.view.versions {
			if !listed[key] {
				w.view.drop(key)
				w.touched = append(w.touched, key)
			}
		}
	}, w.view.listed)
}

// update changes the view and commits, unless the view is no longer merged.
func (w viewWriter) update(change func(), write func(tx *cluster.Tx)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.view.ended {
		change()
		w.commit(write)
	}
}
