// SPDX-License-Identifier: Apache-2.0

package sinkscript

import (
	"sync"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/updates"
	"github.com/kpng-project/kpng/sink/sinktest"
)

// Source is a [sinktest.Source] that a test can make fail, and whose node it can read.
type Source struct {
	*sinktest.Source

	mu   sync.Mutex
	err  error
	node *api.Node
}

// NewSource returns a source that has no services and no node, and is not synced.
func NewSource() *Source { return &Source{Source: sinktest.NewSource()} }

// Fail makes Next return err, until Fail(nil) is called.
func (s *Source) Fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
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
	return s.Source.Next()
}
