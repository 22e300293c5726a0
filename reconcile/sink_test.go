// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
)

// frontends is a fake with the frontends of services. Each frontend refers to the group
// of its endpoints.
type frontends struct{ *fake }

func (frontends) Plan(view *api.View, emit func(k, v string)) error {
	for f := range nodeview.Frontends(view) {
		group := fmt.Sprint("g", view.Key(), f.Elsewhere.List, f.Elsewhere.Verdict)
		text := ""
		for _, e := range f.Elsewhere.Endpoints {
			text += fmt.Sprint(" ", e.AddrPort())
		}
		emit(group, text)
		emit(fmt.Sprint("f", f.Addr, f.Kind == nodeview.NodePort, f.Protocol, f.Port), group)
	}
	return nil
}

// TestSinkHistories plays the histories of package sinktest.
func TestSinkHistories(t *testing.T) {
	sinktest.TestHistories(t, min(*histories, 1000)/8, func(t testing.TB) *sinktest.Subject {
		f := newFake()
		t.Cleanup(func() {
			if len(f.faults) > 0 {
				t.Errorf("%q", f.faults)
			}
		})
		return &sinktest.Subject{
			Open: func() sink.Sink {
				return New(frontends{f}, Options[string, string]{Depth: depth, VerifyInterval: -1})
			},
			Objects: func() (all []string) {
				for k, v := range f.objects {
					all = append(all, k+"="+v)
				}
				return all
			},
			Disturb: func(random *rand.Rand) func() {
				keys := slices.Sorted(maps.Keys(f.objects))
				for range min(len(keys), 3) {
					f.bad[keys[random.IntN(len(keys))]], f.stuck[keys[random.IntN(len(keys))]] = true, true
				}
				f.atomic, f.broken = random.IntN(2) == 0, random.IntN(8)-4
				return func() {
					clear(f.bad)
					clear(f.stuck)
					f.broken = -1
				}
			},
			Drift: func(random *rand.Rand) {
				for _, k := range slices.Sorted(maps.Keys(f.objects)) {
					if k[0] == 'f' && random.IntN(4) == 0 {
						delete(f.objects, k)
					}
				}
				f.objects["extra"] = ""
			},
		}
	})
}
