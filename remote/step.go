// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"maps"
	"slices"
	"sync"

	"github.com/kpng-project/kpng/api"
)

// step is the difference between two snapshots, with the operations that many clients
// share.
type step struct {
	from, to uint64
	changes  []stateChange // sorted by key
	// The nodes and zones that have their own view of a changed service, before or after
	// the change.
	nodes, zones map[string]struct{}

	mu  sync.Mutex
	ops map[stepKind]func() []frame // each function computes its operations once
}

// stepKind identifies the clients that get the same operations.
type stepKind struct {
	class
	who     audience
	batches bool
}

// maxSteps is the number of steps that a publisher keeps. It keeps several steps because,
// if changes are frequent, the streams are at several positions.
const maxSteps = 4

// step returns the step between the snapshots of d. It keeps the last steps, because many
// streams need them.
func (p *publisher) step(d statesDelta, v *views) *step {
	p.stepsMu.Lock()
	defer p.stepsMu.Unlock()
	from, to := d.Old.Revision(), d.New.Revision()
	for _, s := range p.steps {
		if s.from == from && s.to == to {
			return s
		}
	}
	s := newStep(d, v)
	if len(p.steps) == maxSteps {
		p.steps = slices.Delete(p.steps, 0, 1)
	}
	p.steps = append(p.steps, s)
	return s
}

// forgetSteps releases the memory of all steps.
func (p *publisher) forgetSteps() {
	p.stepsMu.Lock()
	defer p.stepsMu.Unlock()
	p.steps = nil
}

func newStep(d statesDelta, v *views) *step {
	s := &step{
		from: d.Old.Revision(), to: d.New.Revision(), changes: slices.Collect(d.Changes()),
		nodes: map[string]struct{}{}, zones: map[string]struct{}{}, ops: map[stepKind]func() []frame{},
	}
	for _, c := range s.changes {
		for _, state := range []*api.ServiceState{c.Old, c.New} {
			if state == nil {
				continue
			}
			shared := v.shared(state)
			maps.Copy(s.nodes, shared.nodes)
			maps.Copy(s.zones, shared.zones)
		}
	}
	return s
}

// sendStep sends the changes of a step to a client whose zone has not changed.
func (w *watch) sendStep(s *step, to *target) {
	if _, ok := s.nodes[w.name]; ok {
		w.sendPhases(slices.Values(w.deltas(slices.Values(s.changes), to)))
		return
	}
	kind := stepKind{class{frontends: w.frontends}, w.who, w.sender.batches}
	if _, ok := s.zones[to.zone]; ok {
		kind.zone = to.zone
	}
	s.mu.Lock()
	ops, ok := s.ops[kind]
	if !ok {
		here := *to // so that the argument to does not escape
		ops = sync.OnceValue(func() []frame { return w.shared(s, &here) })
		s.ops[kind] = ops
	}
	s.mu.Unlock()
	w.sender.ops(ops()...)
}

// shared returns the operations for all clients of the same kind as w. If the clients
// accept batches, it joins operations, so that each client has less work.
func (w *watch) shared(s *step, to *target) []frame {
	var ops []frame
	var joined frame
	deltas := w.deltas(slices.Values(s.changes), to)
	for phase := range len(wireDelta{}) {
		for _, d := range deltas {
			for _, f := range d[phase] {
				if !w.sender.batches {
					ops = append(ops, f)
					continue
				}
				if joined = append(joined, f...); len(joined) >= batchBytes {
					ops, joined = append(ops, joined), nil
				}
			}
		}
	}
	if len(joined) > 0 {
		ops = append(ops, joined)
	}
	return ops
}
