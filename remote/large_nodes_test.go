// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"math/rand/v2"
	"net/netip"
	"sync"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/apitest"
)

// spread gives each service an endpoint on each of 60 nodes.
type spread struct{ apitest.Writer }

func (w spread) SetSlice(s *api.EndpointSlice) {
	if len(s.Endpoints) > 0 {
		one := s.Endpoints[0]
		s.Endpoints = nil
		for n := range 60 {
			e := one
			b := e.Addr.AsSlice()
			b[1] = byte(n)
			e.Addr, _ = netip.AddrFromSlice(b)
			d := one.Details.Value()
			d.NodeName = apitest.NodeName(n)
			e.Details = &d
			if n%7 == 0 {
				e.Conditions = api.Conditions{Serving: true, Terminating: true}
			}
			s.Endpoints = append(s.Endpoints, e)
		}
	}
	w.Writer.SetSlice(s)
}

// If a service has endpoints on many nodes, the nodes share the marshalled endpoints. Each
// node must get its own views, while other nodes begin.
func TestFirstAnswersWithEndpointsOnManyNodes(t *testing.T) {
	w := newWorld(12, 60, 1)
	w.World = apitest.NewWorld(rand.New(rand.NewPCG(12, 0)), 60, 40)
	update(w.state, func(to apitest.Writer) { w.WriteAll(spread{to}) })
	w.mark()
	first, second := socket(t), socket(t)
	serve(t, w.state, first, quick)
	serve(t, w.state, second, quick)
	waitMark(t, first, w.step)
	waitMark(t, second, w.step)
	var wg sync.WaitGroup
	for n := range 12 {
		wg.Go(func() {
			c, plain := packClient{node: apitest.NodeName(n), all: true}, packClient{node: apitest.NodeName(n), all: true}
			plain.begin(t, first, false)
			for _, address := range []string{first, second} {
				c.begin(t, address, true)
				if d := differ(t, &c, &plain); d != nil {
					t.Errorf("client %s: %v", c.node, d[:min(len(d), 5)])
				}
			}
			if c.continued != 1 {
				t.Errorf("client %s: %d answers without Reset", c.node, c.continued)
			}
		})
	}
	wg.Wait()
}
