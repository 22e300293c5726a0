// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
)

const (
	// holdTimeout is how long a new service without a selector waits for the
	// list of its slices before it goes into the state without.
	holdTimeout = 5 * time.Second
	// maxOwnWatches is how many services without a selector have a watch of
	// their own each. Once there are more, those that come share one.
	maxOwnWatches = 32
)

// merger writes services and slices into the state where slices come from
// several watches: the common one, of those that bear the proxy's label, and
// those of the slices of services without a selector, which may lack it. It is
// used with a ServiceProxyName only.
type merger struct {
	*watch
	// startOwn watches the unlabelled slices of one service until it is stopped,
	// and startShared those of all services.
	startOwn    func(service types.NamespacedName, to viewWriter) (stop context.CancelFunc)
	startShared func(to viewWriter)

	mu       sync.Mutex
	closed   bool
	views    []*view
	services map[types.NamespacedName]*ownService

	// shared says that there is a watch for all services, and listed that its
	// first list is in. Own watches from before stay: they may be ahead of it.
	shared, listed bool

	// What the next commit has to do: touched are the slices to be brought up to
	// date, ready those services for which the gate need not wait any more.
	touched []types.NamespacedName
	ready   []*ownService
}

// ownService is a service without a selector.
type ownService struct {
	key types.NamespacedName
	// view is that of its own watch, which stop ends. Both are nil without one.
	view *view
	stop context.CancelFunc
	// held is the service while it is kept out of the state, until the list of
	// its slices is in or the timer fires.
	held  *api.Service
	timer *time.Timer
}

// String says what is waited for, with the other services without a selector.
func (own *ownService) String() string { return endpointSlices + " of services without a selector" }

func newMerger(w *watch) *merger {
	return &merger{watch: w, services: map[types.NamespacedName]*ownService{}}
}

// close makes sure that nothing is written any more.
func (m *merger) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	for _, own := range m.services {
		own.release()
	}
}

// commit writes to the state; write may be nil. The caller holds m.mu.
func (m *merger) commit(write func(tx *cluster.Tx)) {
	if m.closed {
		return
	}
	m.state.Update(func(tx *cluster.Tx) {
		if write != nil {
			write(tx)
		}
		for _, key := range m.touched {
			m.write(tx, key)
		}
	})
	for _, own := range m.ready {
		m.gate.done(own)
	}
	m.touched, m.ready = nil, nil
}

// add begins to serve a service that has no selector. If hold is set, which is
// the service, it goes into the state with its first list.
func (m *merger) add(key types.NamespacedName, hold *api.Service) *ownService {
	own := &ownService{key: key}
	m.services[key] = own
	m.touchUnlabelled(key)
	if m.listed {
		return own
	}
	m.gate.wait(own)
	m.wantShared(len(m.services))
	if !m.shared {
		own.view = m.newView()
		own.view.listed = func(tx *cluster.Tx) { m.publish(tx, own) }
		own.stop = m.startOwn(key, viewWriter{m, own.view})
	}
	if hold != nil {
		own.held = hold
		own.timer = time.AfterFunc(holdTimeout, func() { m.giveUp(own) })
	}
	return own
}

// wantShared starts the watch for all services if they are too many for own ones.
func (m *merger) wantShared(services int) {
	if !m.shared && services > maxOwnWatches {
		m.shared = true
		v := m.newView()
		v.listed = m.sharedListed
		m.startShared(viewWriter{m, v})
	}
}

// sharedListed says that the first list of the watch for all services is in.
func (m *merger) sharedListed(tx *cluster.Tx) {
	if m.listed {
		return
	}
	m.listed = true
	for _, own := range m.services {
		m.publish(tx, own)
	}
}

// drop ends serving a service without a selector, if it is one.
func (m *merger) drop(key types.NamespacedName) {
	own := m.services[key]
	if own == nil {
		return
	}
	own.release()
	if own.view != nil {
		m.endView(own.view)
	}
	delete(m.services, key)
	m.touchUnlabelled(key)
	m.ready = append(m.ready, own)
}

// publish writes the service if it was held back for its list of slices.
func (m *merger) publish(tx *cluster.Tx, own *ownService) {
	if own.held != nil {
		own.timer.Stop()
		tx.SetService(own.held)
		own.held = nil
	}
	m.ready = append(m.ready, own)
}

// giveUp publishes a service whose list does not come.
func (m *merger) giveUp(own *ownService) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if own.held == nil || m.services[own.key] != own {
		return
	}
	m.logger.Info("No list of its endpoint slices for a service without selector, going on", "service", klog.KRef(own.key.Namespace, own.key.Name), "waited", holdTimeout)
	m.commit(func(tx *cluster.Tx) { m.publish(tx, own) })
}

// release ends the service's own watch and its wait.
func (own *ownService) release() {
	if own.view != nil {
		own.stop()
	}
	if own.timer != nil {
		own.timer.Stop()
	}
}

// isNew reports whether readers have not seen the service yet, but would at once.
func (m *merger) isNew(key types.NamespacedName) bool {
	if !m.state.IsSynced() {
		return false
	}
	_, published := m.state.Snapshot().Services.Get(key)
	return !published
}

// mergedServices writes what the watch of services delivers.
type mergedServices struct{ *merger }

func (m mergedServices) set(i *item[api.Service]) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !i.selectorless {
		m.drop(i.key)
	} else if m.hold(i) {
		return
	}
	m.commit(func(tx *cluster.Tx) { tx.SetService(i.value) })
}

// hold serves a service without a selector and reports whether it is to be kept
// out of the state for now.
func (m mergedServices) hold(i *item[api.Service]) bool {
	own := m.services[i.key]
	switch {
	case own != nil && own.held != nil:
		own.held = i.value
	case own == nil && m.isNew(i.key):
		own = m.add(i.key, i.value)
	case own == nil:
		own = m.add(i.key, nil)
	}
	return own.held != nil
}

func (m mergedServices) remove(key types.NamespacedName) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.drop(key)
	m.commit(func(tx *cluster.Tx) { tx.DeleteService(key) })
}

func (m mergedServices) replace(all []*item[api.Service]) {
	m.mu.Lock()
	defer m.mu.Unlock()
	selectorless := map[types.NamespacedName]bool{}
	for _, i := range all {
		if i.selectorless {
			selectorless[i.key] = true
		}
	}
	for key := range m.services {
		if !selectorless[key] {
			m.drop(key)
		}
	}
	m.wantShared(len(selectorless))
	publish := make([]*item[api.Service], 0, len(all))
	for _, i := range all {
		if !i.selectorless || !m.hold(i) {
			publish = append(publish, i)
		}
	}
	m.commit(func(tx *cluster.Tx) { tx.ReplaceServices(values(publish)) })
}
