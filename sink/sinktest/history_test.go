// SPDX-License-Identifier: Apache-2.0

package sinktest_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
)

var histories = flag.Int("histories", 100, "how many random `histories` to test")

// memory is a dataplane in memory, and the handler of an Events sink for it.
type memory struct {
	objects map[string]string
	fails   func() bool
}

var errMemory = errors.New("no memory")

func (m *memory) set(key, value string) error {
	if m.fails() {
		return errMemory
	}
	m.objects[key] = value
	return nil
}

func (m *memory) delete(key string) error {
	if m.fails() {
		return errMemory
	}
	delete(m.objects, key)
	return nil
}

func (m *memory) SetService(_ context.Context, s *api.Service) error {
	return m.set("service "+s.Key().String(), "")
}

func (m *memory) DeleteService(_ context.Context, s *api.Service) error {
	return m.delete("service " + s.Key().String())
}

func endpointKey(s *api.Service, e *api.Endpoint) string {
	return fmt.Sprint("endpoint ", s.Key(), e.Key())
}

func (m *memory) SetEndpoint(_ context.Context, s *api.Service, e *api.Endpoint) error {
	return m.set(endpointKey(s, e), "")
}

func (m *memory) DeleteEndpoint(_ context.Context, s *api.Service, e *api.Endpoint) error {
	return m.delete(endpointKey(s, e))
}

// frontendKey returns a key without the service, because a dataplane has one object for
// each address and port.
func frontendKey(f *nodeview.Frontend) string { return "frontend " + fmt.Sprint(f.Claim()) }

func (m *memory) SetFrontend(_ context.Context, s *api.Service, f nodeview.Frontend) error {
	return m.set(frontendKey(&f), fmt.Sprint(s.Key(), f.Elsewhere, f.Node, f.Affinity))
}

func (m *memory) DeleteFrontend(_ context.Context, _ *api.Service, f nodeview.Frontend) error {
	return m.delete(frontendKey(&f))
}

// newSubject returns a subject. The function open makes the sinks of this subject.
func newSubject(open func(*memory) sink.Sink) *sinktest.Subject {
	m := &memory{objects: map[string]string{}, fails: func() bool { return false }}
	return &sinktest.Subject{
		Open: func() sink.Sink { return open(m) },
		Objects: func() []string {
			var list []string
			for k, v := range m.objects {
				list = append(list, k+" = "+v)
			}
			return list
		},
		Disturb: func(r *rand.Rand) func() {
			m.fails = func() bool { return r.IntN(10) == 0 }
			return func() { m.fails = func() bool { return false } }
		},
	}
}

// eventsSubject keeps its Events sink through restarts, because a new Events sink does
// not know the objects of the earlier sink.
func eventsSubject(wrap func(sink.Handler) sink.Handler) func(testing.TB) *sinktest.Subject {
	return func(testing.TB) *sinktest.Subject {
		var s sink.Sink
		return newSubject(func(m *memory) sink.Sink {
			if s == nil {
				s = sink.Events(wrap(m))
			}
			return s
		})
	}
}

func TestHistoriesOfEvents(t *testing.T) {
	sinktest.TestHistories(t, *histories, eventsSubject(func(h sink.Handler) sink.Handler { return h }))
}

func TestHistoriesOfFullState(t *testing.T) {
	sinktest.TestHistories(t, *histories, func(testing.TB) *sinktest.Subject {
		return newSubject(func(m *memory) sink.Sink {
			return sink.FullState(func(_ context.Context, views []*api.View) error {
				if m.fails() {
					return errMemory
				}
				objects := map[string]string{}
				for _, v := range views {
					for f := range nodeview.Frontends(v) {
						objects[frontendKey(&f)] = fmt.Sprint(v.Key(), f.Elsewhere, f.Node, f.Affinity)
					}
				}
				m.objects = objects
				return nil
			})
		})
	})
}

// forgetful is a handler with a fault.
type forgetful struct {
	sink.Handler
	deletions int
}

func (f *forgetful) DeleteFrontend(ctx context.Context, s *api.Service, front nodeview.Frontend) error {
	if f.deletions++; f.deletions%20 == 0 {
		return nil
	}
	return f.Handler.DeleteFrontend(ctx, s, front)
}

// Two faulty sinks must not pass: the handler of the first sink sometimes ignores a
// deletion, and the second sink treats a failed service as programmed.
func TestHistoriesFindFaults(t *testing.T) {
	faults := map[string]func(testing.TB) *sinktest.Subject{
		"forgotten deletions": eventsSubject(func(h sink.Handler) sink.Handler { return &forgetful{Handler: h} }),
		"trust in the old view": func(testing.TB) *sinktest.Subject {
			return newSubject(func(m *memory) sink.Sink { return &trusting{m} })
		},
	}
	for name, newSubject := range faults {
		if n := sinktest.FailedHistories(t, 50, newSubject); n == 0 {
			t.Errorf("%s: no history fails", name)
		} else {
			t.Logf("%s: %d of 50 histories fail", name, n)
		}
	}
}

// trusting deletes only the frontends of Change.Old, even if the dataplane may have
// other frontends.
type trusting struct{ m *memory }

func (s *trusting) Sync(ctx context.Context, c *sink.Changes) error {
	var failed sink.Failed
	if c.First {
		clear(s.m.objects)
	}
	for ch := range c.Services {
		failed.Do(ch.Key, func() error {
			if ch.Old != nil {
				for f := range nodeview.Frontends(ch.Old) {
					if err := s.m.delete(frontendKey(&f)); err != nil {
						return err
					}
				}
			}
			if ch.New != nil {
				for f := range nodeview.Frontends(ch.New) {
					if err := s.m.SetFrontend(ctx, ch.New.Service, f); err != nil {
						return err
					}
				}
			}
			return nil
		})
	}
	return failed.Err()
}
