// SPDX-License-Identifier: Apache-2.0

// Package explain answers what a node does with a service, or with the services at an
// address, and why. If no service answers a question, it returns the reason.
//
//	for e, err := range explain.Answers(proxy.State().Snapshot(), proxy.NodeName(), "10.96.0.10:53/udp") {
//		if err != nil {
//			return err // no service is served at 10.96.0.10:53/udp; the address has: …
//		}
//		fmt.Println(e)
//	}
package explain

import (
	"iter"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/explain"
	"github.com/kpng-project/kpng/nodeview"
)

// ErrNotFound is in the error of a question that names an unknown service. The service
// may exist without being selected for the proxy; see watcher.Options.Unselected.
var ErrNotFound = explain.ErrNotFound

// Answers yields the explanations that answer a question, sorted by service. The question is
// NAME, NAMESPACE/NAME, IP, IP:PORT or IP:PORT/PROTOCOL. In place of the IP of a node port,
// it may have IPv4 or IPv6. A NAME alone is in the namespace "default". The empty question
// asks about all services.
//
// Without an answer, Answers yields one error, which names the service or address and lists
// frontends at the same address. It also yields an error if it cannot parse the question. If
// the snapshot has no addresses of the node, no question about an address of the node finds
// a node port.
func Answers(s *cluster.Snapshot, nodeName, question string) iter.Seq2[*nodeview.Explanation, error] {
	var q explain.Question
	if question != "" {
		var err error
		if q, err = explain.Parse(question); err != nil {
			return func(yield func(*nodeview.Explanation, error) bool) { yield(nil, err) }
		}
	}
	node, known := s.Nodes.Get(nodeName)
	if !known {
		node = &api.Node{Name: nodeName}
	}
	return q.Explain(s, node)
}
