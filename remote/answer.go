// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"bytes"
	"compress/flate"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// An answer collects the operations up to a Sync. Until the Sync has arrived, readers see
// none of these operations.
//
// The client logs and ignores unreadable objects, and applies all other objects. If a
// service or node is unreadable, the client keeps its earlier version. If an endpoint is
// unreadable, the client also keeps its earlier version, unless the operation is a
// Replace of the whole service.
type answer struct {
	client *Client
	log    klog.Logger

	synced, stale bool
	token         []byte

	// The number of buckets in the digests of the first request.
	buckets int
	inflate io.ReadCloser // for packed operations; nil until the first one

	reset bool
	// The drafts of the services that occurred in operations. The draft of a deleted service
	// is nil. After a reset, the map contains all services.
	services map[types.NamespacedName]*draft
	// For each service of this answer that the client refuses, the reason.
	refused map[types.NamespacedName]string
	// nodeNamed is true if an operation has set or deleted the node. After a deletion,
	// the field node is nil.
	node      *api.Node
	nodeNamed bool
}

func newAnswer(c *Client, log klog.Logger, buckets int) *answer {
	return &answer{client: c, log: log, buckets: buckets, services: map[types.NamespacedName]*draft{}, refused: map[types.NamespacedName]string{}}
}

// take applies one message. It ignores operations after the Sync. It returns an error if
// packed operations cannot be decoded.
func (a *answer) take(item *localv1.OpItem) error {
	for _, i := range append(item.GetBatch(), item) {
		if a.synced {
			return nil
		}
		if op, ok := i.GetOp().(*localv1.OpItem_Packed); ok {
			if err := a.unpack(op.Packed); err != nil {
				return fmt.Errorf("packed operations: %w", err)
			}
		} else if err := a.apply(i); err != nil {
			a.leftOut(err)
		}
	}
	return nil
}

// maxUnpacked is the maximum size of packed operations. It limits the memory that a short
// message can use.
const maxUnpacked = 4 << 20

// unpack applies packed operations, which are Sets and Replaces.
func (a *answer) unpack(packed []byte) error {
	if a.inflate == nil {
		a.inflate = flate.NewReader(bytes.NewReader(packed))
	} else {
		a.inflate.(flate.Resetter).Reset(bytes.NewReader(packed), nil) // cannot fail
	}
	message, err := io.ReadAll(io.LimitReader(a.inflate, maxUnpacked+1))
	if err != nil {
		return err
	}
	if len(message) > maxUnpacked {
		return fmt.Errorf("they exceed %d bytes", maxUnpacked)
	}
	var item localv1.OpItem
	if err := proto.Unmarshal(message, &item); err != nil {
		return err
	}
	for _, i := range item.GetBatch() {
		if err := a.apply(i); err != nil {
			a.leftOut(err)
		}
	}
	return nil
}

func (a *answer) leftOut(err error) {
	a.log.Error(err, "Ignored an unreadable object from the server")
}

// apply applies one operation. It skips unknown operations of newer servers.
func (a *answer) apply(item *localv1.OpItem) error {
	switch op := item.GetOp().(type) {
	case *localv1.OpItem_Reset_:
		a.services = map[types.NamespacedName]*draft{}
		a.reset, a.node, a.nodeNamed = true, nil, true
	case *localv1.OpItem_Replace:
		a.replace(op.Replace)
	case *localv1.OpItem_Set:
		return a.set(op.Set)
	case *localv1.OpItem_Delete:
		return a.delete(op.Delete)
	case *localv1.OpItem_Discard:
		return a.discard(op.Discard.GetNumbers())
	case *localv1.OpItem_Sync:
		a.synced, a.token, a.stale = true, item.GetResume(), item.GetStale()
	}
	return nil
}

// discard deletes the services in some buckets.
func (a *answer) discard(buckets []uint32) error {
	if a.buckets == 0 {
		return errors.New("discard of buckets without digests")
	}
	chosen := make([]bool, a.buckets)
	for _, b := range buckets {
		if int64(b) >= int64(len(chosen)) {
			return fmt.Errorf("bucket %d of %d", b, len(chosen))
		}
		chosen[b] = true
	}
	for key := range a.client.views.Snapshot().All() {
		if chosen[bucketOf(orderOf(key), len(chosen))] {
			a.services[key] = nil
		}
	}
	return nil
}

func (a *answer) replace(whole *localv1.WholeService) {
	key, service := a.service(whole.GetService())
	if service == nil {
		return
	}
	list := make([]keyedEndpoint, 0, len(whole.GetEndpoints()))
	for _, m := range whole.GetEndpoints() {
		if e, err := newKeyedEndpoint(m.GetKey(), m.GetEndpoint()); err != nil {
			a.leftOut(fmt.Errorf("service %s: endpoint %s: %w", key, m.GetKey(), err))
		} else {
			list = append(list, e)
		}
	}
	a.services[key] = &draft{entry: newEntry(service, list)}
}

// service decodes m. If m is unreadable, it returns the client's earlier version of the
// service, or nil if there is none.
func (a *answer) service(m *localv1.Service) (types.NamespacedName, *api.View) {
	key := types.NamespacedName{Namespace: m.GetNamespace(), Name: m.GetName()}
	service, err := m.ToView()
	if err != nil {
		a.leftOut(err)
		if e, ok := a.client.views.Get(key); ok {
			return key, e.view
		}
		return key, nil
	}
	return key, service
}

func (a *answer) set(value *localv1.Value) error {
	path := value.GetRef().GetPath()
	switch value.GetRef().GetSet() {
	case localv1.Set_ServicesSet:
		var m localv1.Service
		if err := proto.Unmarshal(value.GetBytes(), &m); err != nil {
			return fmt.Errorf("service %s: %w", path, err)
		}
		if key, service := a.service(&m); service != nil {
			a.openDraft(key).service = service
		}
	case localv1.Set_EndpointsSet:
		service, key, err := splitPath(path)
		if err != nil {
			return err
		}
		var m localv1.Endpoint
		if err := proto.Unmarshal(value.GetBytes(), &m); err != nil {
			return fmt.Errorf("endpoint %s: %w", path, err)
		}
		e, err := newKeyedEndpoint(key, &m)
		if err != nil {
			return fmt.Errorf("endpoint %s: %w", path, err)
		}
		a.openDraft(service).endpoints[key] = e
	case localv1.Set_NodesSet:
		var m localv1.Node
		err := proto.Unmarshal(value.GetBytes(), &m)
		if err == nil {
			a.node, err = m.ToNode()
		}
		if a.nodeNamed = err == nil; err != nil {
			return fmt.Errorf("node %s: %w", path, err)
		}
	}
	return nil
}

func (a *answer) delete(ref *localv1.Ref) error {
	switch ref.GetSet() {
	case localv1.Set_ServicesSet:
		namespace, name, ok := strings.Cut(ref.GetPath(), "/")
		if !ok || strings.Contains(name, "/") {
			return fmt.Errorf("%q is not the path of a service", ref.GetPath())
		}
		a.services[types.NamespacedName{Namespace: namespace, Name: name}] = nil
	case localv1.Set_EndpointsSet:
		service, key, err := splitPath(ref.GetPath())
		if err != nil {
			return err
		}
		delete(a.openDraft(service).endpoints, key)
	case localv1.Set_NodesSet:
		a.node, a.nodeNamed = nil, true
	}
	return nil
}

func splitPath(path string) (service types.NamespacedName, key string, err error) {
	namespace, rest, _ := strings.Cut(path, "/")
	name, key, ok := strings.Cut(rest, "/")
	if !ok {
		return service, "", fmt.Errorf("%q is not the path of an endpoint", path)
	}
	return types.NamespacedName{Namespace: namespace, Name: name}, key, nil
}

// openDraft returns the draft of a service. The draft is open, so that it can be changed.
func (a *answer) openDraft(key types.NamespacedName) *draft {
	d, named := a.services[key]
	if d == nil {
		d = &draft{}
		if !named && !a.reset {
			d.entry, _ = a.client.views.Get(key)
		}
		a.services[key] = d
	}
	d.open()
	return d
}

// close turns a draft into an entry. If the service does not exist, the result is nil.
func (a *answer) close(key types.NamespacedName, d *draft) *entry {
	switch {
	case d == nil:
		return nil
	case d.endpoints == nil:
		return a.limited(key, d.entry)
	case d.service != nil:
		return a.limited(key, newEntry(d.service, slices.Collect(maps.Values(d.endpoints))))
	case len(d.endpoints) > 0:
		a.leftOut(fmt.Errorf("service %s: received endpoints without the service", key))
	}
	return nil
}

// limited returns e. If the view of e is too large, limited refuses this view.
func (a *answer) limited(key types.NamespacedName, e *entry) *entry {
	before, _ := a.client.state.views.Get(key)
	e.limit(a.client.opts.MaxElements, before)
	if e.refused != "" {
		a.refused[key] = "too large: " + e.refused
	}
	switch was := before != nil && before.refused != ""; {
	case e.refused != "" && !was:
		a.log.Error(errors.New(e.refused), "View of service too large; keeping the last accepted view, if any", "service", key)
	case e.refused == "" && was:
		a.log.Info("View of service accepted again", "service", key)
	}
	return e
}

// entries yields all services. Call it only after a reset, when a.services is complete.
func (a *answer) entries() iter.Seq2[types.NamespacedName, *entry] {
	return func(yield func(types.NamespacedName, *entry) bool) {
		for key, d := range a.services {
			if e := a.close(key, d); e != nil && !yield(key, e) {
				return
			}
		}
	}
}
