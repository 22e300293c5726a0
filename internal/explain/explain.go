// SPDX-License-Identifier: Apache-2.0

// Package explain implements the public package explain. Commands of kpng also use
// parts that are not public: questions without their answers, and explanations for a
// client that has only views.
package explain

import (
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/updates"
	"github.com/kpng-project/kpng/nodeview"
	"k8s.io/apimachinery/pkg/types"
)

// ErrNotFound means that a question names an unknown service. Errors wrap it. The service
// may exist without being selected for the proxy; see watcher.Options.Unselected.
var ErrNotFound = errors.New("not found")

// Explain yields the explanations that answer q, sorted by service. Without an answer, it
// yields one error. This error names the service or address, and lists frontends at the
// same address. The node must not be nil. If the node has no addresses, questions about
// an address of the node find no node ports.
func (q Question) Explain(s *cluster.Snapshot, node *api.Node) iter.Seq2[*nodeview.Explanation, error] {
	return q.answers(&services{
		node: node,
		keys: keysOf(s.States.All()),
		explain: func(key types.NamespacedName) (e *nodeview.Explanation, exists bool) {
			state, ok := s.States.Get(key)
			if !ok {
				return nil, false
			}
			return nodeview.Explain(s.WithWinners(state), node), state.Service != nil
		},
		refused: s.Refused.Get,
		hasEndpoint: func(key types.NamespacedName, addr netip.Addr) bool {
			state, _ := s.States.Get(key)
			return state != nil && slices.ContainsFunc(state.Slices, func(slice *api.EndpointSlice) bool {
				return slices.ContainsFunc(slice.Endpoints, func(ep api.SliceEndpoint) bool { return ep.Addr == addr })
			})
		},
	})
}

// ExplainViews is like Explain for a client of a kpng server. Such a client has only
// views. The explanations have no reasons why endpoints are used or not.
func (q Question) ExplainViews(u *updates.Update, node *api.Node) iter.Seq2[*nodeview.Explanation, error] {
	return q.answers(&services{
		node: node,
		keys: keysOf(u.After(types.NamespacedName{})),
		explain: func(key types.NamespacedName) (e *nodeview.Explanation, exists bool) {
			view := u.View(key)
			if view == nil {
				return nil, false
			}
			return nodeview.ExplainView(view, node), true
		},
		refused: func(types.NamespacedName) (string, bool) { return "", false },
		hasEndpoint: func(key types.NamespacedName, addr netip.Addr) bool {
			view := u.View(key)
			return view != nil && slices.ContainsFunc(view.Endpoints, func(ep api.Endpoint) bool { return ep.Addr == addr })
		},
	})
}

// services provides a program's data about services.
type services struct {
	node *api.Node
	keys iter.Seq[types.NamespacedName]
	// explain reports whether the service exists. If only EndpointSlices refer to the
	// service, the explanation says so.
	explain func(types.NamespacedName) (e *nodeview.Explanation, exists bool)
	// refused returns the reason why a service is refused.
	refused func(types.NamespacedName) (string, bool)
	// hasEndpoint reports whether a service has an endpoint at an address.
	hasEndpoint func(types.NamespacedName, netip.Addr) bool
}

func keysOf[V any](services iter.Seq2[types.NamespacedName, V]) iter.Seq[types.NamespacedName] {
	return func(yield func(types.NamespacedName) bool) {
		for key := range services {
			if !yield(key) {
				return
			}
		}
	}
}

func (q Question) answers(s *services) iter.Seq2[*nodeview.Explanation, error] {
	if q.service.Name != "" {
		return func(yield func(*nodeview.Explanation, error) bool) { yield(s.named(q.service)) }
	}
	return func(yield func(*nodeview.Explanation, error) bool) {
		found := false
		for key := range s.keys {
			e, _ := s.explain(key)
			if e == nil || q != (Question{}) && !e.Narrow(func(k nodeview.FrontendKey) bool { return q.matches(k, s.node) }) {
				continue
			}
			found = true
			if !yield(e, nil) {
				return
			}
		}
		if !found && q != (Question{}) {
			yield(nil, q.notFound(s))
		}
	}
}

// named explains one service.
func (s *services) named(key types.NamespacedName) (*nodeview.Explanation, error) {
	if e, exists := s.explain(key); exists {
		return e, nil
	}
	if reason, ok := s.refused(key); ok {
		return nil, fmt.Errorf("service %s is refused: %s", key, reason)
	}
	return nil, fmt.Errorf("service %s %w", key, ErrNotFound)
}

// notFound returns the error for an address and port without a service. The error lists
// services that use the address with other ports. If the node's addresses are unknown,
// the error lists services that have the port as a node port.
func (q Question) notFound(s *services) error {
	var there, nodePorts, endpointOf []string
	samePort := Question{nodePorts: api.FamilyOf(q.addr), port: q.port, protocol: q.protocol}
	for e := range (Question{}).answers(s) {
		if s.hasEndpoint(e.Service, q.addr) {
			endpointOf = append(endpointOf, e.Service.String())
		}
		for _, f := range e.Frontends {
			switch k := f.FrontendKey; {
			case (Question{addr: q.addr}).matches(k, s.node):
				there = append(there, fmt.Sprintf("%s of %s", k, e.Service))
			case len(s.node.Addresses) == 0 && q.port != 0 && samePort.matches(k, s.node):
				nodePorts = append(nodePorts, fmt.Sprintf("%s has node port %d/%s", e.Service, k.Port, k.Protocol))
			}
		}
	}
	const most = 10
	for _, list := range []*[]string{&there, &endpointOf} {
		if len(*list) > most {
			*list = append((*list)[:most], fmt.Sprintf("and %d more", len(*list)-most))
		}
	}
	switch bracketed := brackets(q.address()); {
	case bracketed != "":
		return fmt.Errorf("no service is served at %s, which is an address without a port; with a port, write %s", q.address(), bracketed)
	case len(nodePorts) > 0:
		return fmt.Errorf("no service is served at %s; addresses of node %s are unknown, and %s", q.address(), s.node.Name, strings.Join(nodePorts, ", "))
	case len(there) > 0:
		return fmt.Errorf("no service is served at %s; the address has: %s", q.address(), strings.Join(there, ", "))
	}
	if len(endpointOf) > 0 {
		return fmt.Errorf("no service is served at %s; the address is an endpoint of: %s", q.address(), strings.Join(endpointOf, ", "))
	}
	if q.nodePorts == 0 {
		q = Question{addr: q.addr} // the address has no service at all
	}
	return fmt.Errorf("no service is served at %s", q.address())
}
