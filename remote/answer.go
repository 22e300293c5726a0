// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"errors"
	"fmt"
	"iter"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/api/localv1"
	"github.com/kpng-project/kpng/diffstore"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/types"
)

// answer gathers operations up to a Sync. Nobody sees any of it before.
type answer struct {
	client *Client
	synced bool
	token  []byte

	reset bool
	// services are those that operations named, nil if they are gone. After a
	// reset they are all there are.
	services map[types.NamespacedName]*draft
	node     *api.Node
	nodeGone bool
}

func newAnswer(c *Client) *answer {
	return &answer{client: c, services: map[types.NamespacedName]*draft{}}
}

// take applies one message. With the Sync the client has all of it.
func (a *answer) take(item *localv1.OpItem) error {
	for _, i := range item.GetBatch() {
		if a.synced {
			return errors.New("a batch goes on after its Sync")
		}
		if err := a.apply(i); err != nil {
			return err
		}
	}
	return a.apply(item)
}

// apply applies one operation. What it does not know it skips: that is of a server
// that knows more.
func (a *answer) apply(item *localv1.OpItem) error {
	switch op := item.GetOp().(type) {
	case *localv1.OpItem_Reset_:
		*a = answer{client: a.client, services: map[types.NamespacedName]*draft{}, reset: true}
	case *localv1.OpItem_Replace:
		return a.replace(op.Replace)
	case *localv1.OpItem_Set:
		return a.set(op.Set)
	case *localv1.OpItem_Delete:
		return a.delete(op.Delete)
	case *localv1.OpItem_Sync:
		a.synced, a.token = true, item.GetResume()
		return a.client.commit(a)
	}
	return nil
}

func (a *answer) replace(whole *localv1.WholeService) error {
	service, err := whole.GetService().ToView()
	if err != nil {
		return err
	}
	list := make([]keyedEndpoint, len(whole.GetEndpoints()))
	for i, e := range whole.GetEndpoints() {
		if list[i], err = newKeyedEndpoint(e.GetKey(), e.GetEndpoint()); err != nil {
			return fmt.Errorf("service %s: %w", service.Key(), err)
		}
	}
	a.services[service.Key()] = &draft{entry: newEntry(service, list)}
	return nil
}

func (a *answer) set(value *localv1.Value) error {
	path := value.GetRef().GetPath()
	switch value.GetRef().GetSet() {
	case localv1.Set_ServicesSet:
		var m localv1.Service
		if err := proto.Unmarshal(value.GetBytes(), &m); err != nil {
			return fmt.Errorf("service %s: %w", path, err)
		}
		service, err := m.ToView()
		if err != nil {
			return err
		}
		a.draft(service.Key()).service = service
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
			return fmt.Errorf("service %s: %w", service, err)
		}
		a.draft(service).endpoints[key] = e
	case localv1.Set_NodesSet:
		var m localv1.Node
		if err := proto.Unmarshal(value.GetBytes(), &m); err != nil {
			return fmt.Errorf("node %s: %w", path, err)
		}
		node, err := m.ToNode()
		if err != nil {
			return err
		}
		a.node, a.nodeGone = node, false
	}
	return nil
}

func (a *answer) delete(ref *localv1.Ref) error {
	switch ref.GetSet() {
	case localv1.Set_ServicesSet:
		namespace, name, ok := strings.Cut(ref.GetPath(), "/")
		if !ok || strings.Contains(name, "/") {
			return fmt.Errorf("%q is no path of a service", ref.GetPath())
		}
		a.services[types.NamespacedName{Namespace: namespace, Name: name}] = nil
	case localv1.Set_EndpointsSet:
		service, key, err := splitPath(ref.GetPath())
		if err != nil {
			return err
		}
		delete(a.draft(service).endpoints, key)
	case localv1.Set_NodesSet:
		a.node, a.nodeGone = nil, true
	}
	return nil
}

func splitPath(path string) (service types.NamespacedName, key string, err error) {
	namespace, rest, _ := strings.Cut(path, "/")
	name, key, ok := strings.Cut(rest, "/")
	if !ok {
		return service, "", fmt.Errorf("%q is no path of an endpoint", path)
	}
	return types.NamespacedName{Namespace: namespace, Name: name}, key, nil
}

// draft returns the draft of a service, to be changed.
func (a *answer) draft(key types.NamespacedName) *draft {
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

// entries are an answer's services as the client will have them, nil for those that
// are gone.
type entries map[types.NamespacedName]*entry

func (a *answer) entries() (entries, error) {
	out := make(entries, len(a.services))
	for key, d := range a.services {
		e, err := d.close()
		if err != nil {
			return nil, fmt.Errorf("service %s: %w", key, err)
		}
		out[key] = e
	}
	return out, nil
}

// all yields the services that are there.
func (e entries) all() iter.Seq2[types.NamespacedName, *entry] {
	return func(yield func(types.NamespacedName, *entry) bool) {
		for key, entry := range e {
			if entry != nil && !yield(key, entry) {
				return
			}
		}
	}
}

// write makes a store have what the entries say.
func (e entries) write(s *diffstore.Store[types.NamespacedName, *entry]) {
	for key, entry := range e {
		if entry == nil {
			s.Delete(key)
		} else {
			s.Set(key, entry)
		}
	}
}
