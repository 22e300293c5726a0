// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"slices"
	"sync"
)

// gate opens when everything it was told to wait for is done.
type gate struct {
	open    func()
	mu      sync.Mutex
	waiting map[any]struct{}
}

// wait makes the gate wait for things. Once it is open that has no effect.
func (g *gate) wait(things ...any) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.waiting == nil {
		g.waiting = map[any]struct{}{}
	}
	for _, t := range things {
		g.waiting[t] = struct{}{}
	}
}

// done says that a thing is done or of no interest any more.
func (g *gate) done(thing any) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, ok := g.waiting[thing]; !ok {
		return
	}
	delete(g.waiting, thing)
	if len(g.waiting) == 0 {
		g.open()
	}
}

// pending names what is waited for, in order.
func (g *gate) pending() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	var names []string
	for thing := range g.waiting {
		names = append(names, fmt.Sprint(thing))
	}
	slices.Sort(names)
	return slices.Compact(names)
}
