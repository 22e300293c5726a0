// SPDX-License-Identifier: Apache-2.0

package sinkscript

import (
	"sync"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/updates"
	"github.com/kpng-project/kpng/sink/sinktest"
	"k8s.io/apimachinery/pkg/types"
)

// Source is a [sinktest.Source] with more methods: a test can make the source fail, and
// can read its node.
type Source struct {
	*sinktest.Source

	mu     sync.Mutex
	err    error
	panics types.NamespacedName
	node   *api.Node
}

// NewSource returns a source that has no services and no node, and is not synced.
func NewSource() *Source { return &Source{Source: sinktest.NewSource()} }

// Fail makes Next return err, until Fail(nil) is called.
func (s *Source) Fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

// PanicIn makes the computation of one service's view panic. With the zero key, no
// computation panics.
func (s *Source) PanicIn(key types.NamespacedName) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.panics = key
}

// SetNode sets the node. It has no effect if the present node is equal.
func (s *Source) SetNode(node *api.Node) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.node = node
	s.Source.SetNode(node)
}

// Node returns the node.
func (s *Source) Node() *api.Node {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.node
}

// Next implements [sink.Source].
func (s *Source) Next() (*updates.Update, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return nil, s.err
	}
	u, err := s.Source.Next()
	if u != nil {
		view := u.View
		u.View = func(key types.NamespacedName) *api.View {
			s.mu.Lock()
			defer s.mu.Unlock()
			if key == s.panics {
				panic("no view")
			}
			return view(key)
		}
	}
	return u, err
}
