// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
)

var counterCases = []testCase{
	{name: "new connections are counted by endpoint", needs: []Feature{counters}, run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		s.counts(web, 0, s.connect(s.c, web.clusterIP()))
	}},
	{name: "the node's own connections are counted", needs: []Feature{counters}, run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		s.counts(web, 0, s.connect(s.node, web.clusterIP()))
	}},
	{name: "connections to all addresses of a service port are added up", needs: []Feature{counters}, run: func(s *scene) {
		web := s.addService("web").withExternalIP().withLoadBalancer().withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		s.counts(web, 0, s.connect(s.c, web.clusterIP()), s.connect(s.outside, web.externalIP()), s.connect(s.outside, web.loadBalancerIP()))
	}},
	{name: "connections to node ports are counted", needs: []Feature{counters, NodePorts}, run: func(s *scene) {
		web := s.addService("web").withNodePort().withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		s.counts(web, 0, s.connect(s.outside, web.nodePort(0)))
	}},
	{name: "services and ports with the same endpoints are counted separately", needs: []Feature{counters}, run: func(s *scene) {
		web := s.addService("web").addPort("more", 81, targetPort).withEndpoints(asReady(s.a))
		other, idle := s.addService("other").withEndpoints(asReady(s.a)), s.addService("idle").withEndpoints(asReady(s.a))
		s.publish()
		first, second := s.connect(s.c, web.clusterIP()), s.connect(s.c, withPort(web.clusterIP(), 81))
		third := s.connect(s.c, other.clusterIP())
		s.counts(web, 0, first)
		s.counts(web, 1, second)
		s.counts(other, 0, third)
		s.counts(idle, 0)
	}},
	{name: "each family of a dual-stack service is counted separately", needs: []Feature{counters}, runsOnce: true, run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a))
		s.publish()
		six := s.connect(s.c, web.at(web.Spec.ClusterIPs[1]))
		s.counts(web, 0, s.connect(s.c, web.at(web.Spec.ClusterIPs[0])), six)
	}},
	{name: "many datagrams of one UDP flow count once", needs: []Feature{UDP, counters}, run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a))
		s.publish()
		f := s.openFlow(s.c, api.UDP, web.clusterIP())
		for range 20 {
			f.mustReach(s.a)
		}
		s.counts(web, 0, connections{{api.UDP, s.a.target(s.family)}: 1})
	}},
	{name: "bytes are counted in both directions", needs: []Feature{counters}, run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a))
		s.publish()
		sent := map[api.Protocol]int64{}
		for _, protocol := range s.protocols {
			f := s.openFlow(s.c, protocol, web.clusterIP())
			for i := range 100 {
				f.mustReach(s.a)
				sent[protocol] += int64(len(fmt.Sprintln(i + 1))) // each answer is longer than its request
			}
		}
		s.awaitCounts(func(all map[counterKey]backends.Stats) error {
			for protocol, want := range sent {
				c := all[web.counter(0, protocol, s.a.target(s.family))]
				for direction, n := range map[string]int64{"from clients": c.FromClients, "to clients": c.ToClients} {
					if n < want && n != -1 {
						return fmt.Errorf("%s: %d bytes %s are counted, want %d or more", protocol, n, direction, want)
					}
				}
			}
			return nil
		})
	}},
	{name: "active TCP connections are counted until they end", needs: []Feature{counters}, run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a))
		s.publish()
		var flows []*flow
		for range 5 {
			flows = append(flows, s.openTo(s.c, web, s.a))
		}
		key := web.counter(0, api.TCP, s.a.target(s.family))
		active := func(want int64) {
			s.awaitCounts(func(all map[counterKey]backends.Stats) error {
				if n := all[key].Active; n != want && n != -1 {
					return fmt.Errorf("%d connections are active, want %d", n, want)
				}
				return nil
			})
		}
		active(5)
		for _, f := range flows {
			s.must(f.Conn.Conn.(*net.TCPConn).CloseWrite()) // the server closes the connection then
		}
		active(0)
	}},
	{name: "connections to a removed endpoint are not counted for others", needs: []Feature{counters}, run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		s.counts(web, 0, s.connect(s.c, web.clusterIP()))
		web.withEndpoints(asReady(s.d), asReady(s.e))
		s.publish()
		s.countsNew(web, s.c)
	}},
	{name: "connections from before an endpoint was added are not counted for it", needs: []Feature{counters}, run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.d))
		s.publish()
		s.counts(web, 0, s.connect(s.c, web.clusterIP()))
		web.withEndpoints(asReady(s.d), asReady(s.a))
		s.publish()
		s.countsNew(web, s.c)
	}},
	{name: "a change of another service leaves the counters", needs: []Feature{counters}, run: func(s *scene) {
		web, other := s.addService("web").withEndpoints(asReady(s.a), asReady(s.d)), s.addService("other").withEndpoints(asReady(s.a))
		s.publish()
		before := s.connect(s.c, web.clusterIP())
		s.counts(web, 0, before)
		other.withEndpoints(asReady(s.e))
		s.publish()
		s.counts(web, 0, before, s.connect(s.c, web.clusterIP()))
	}},
}

// connections are the numbers of connections by protocol and endpoint.
type connections map[connectionKey]int64

type connectionKey struct {
	protocol api.Protocol
	endpoint netip.AddrPort
}

// counterKey identifies the numbers of a service port at an endpoint.
type counterKey struct {
	service, port string
	protocol      api.Protocol
	endpoint      netip.AddrPort
}

// counter returns the key of the port number i of each protocol.
func (svc *service) counter(i int, protocol api.Protocol, endpoint netip.AddrPort) counterKey {
	key := counterKey{service: svc.Name, protocol: protocol, endpoint: endpoint}
	for _, p := range svc.Spec.Ports {
		if string(p.Protocol) == protocol.String() {
			if i == 0 {
				key.port = p.Name
				break
			}
			i--
		}
	}
	return key
}

// target returns the address and port of p as an endpoint.
func (p person) target(family api.Family) netip.AddrPort {
	return netip.AddrPortFrom(p.Addr(family), targetPort)
}

// connect opens connections over each protocol, and returns how many reached an endpoint.
func (s *scene) connect(from person, to netip.AddrPort) connections {
	reached := connections{}
	for _, protocol := range s.protocols {
		for range 20 {
			name := s.reachedEndpoint(protocol, from, to)
			for _, p := range []person{s.a, s.b, s.d, s.e} {
				if p.Name == name {
					reached[connectionKey{protocol, p.target(api.FamilyOf(to.Addr()))}]++
				}
			}
		}
	}
	return reached
}

// counts checks that exactly these connections to port number i of a service are counted.
func (s *scene) counts(svc *service, i int, made ...connections) {
	want := map[counterKey]int64{}
	for _, some := range made {
		for c, n := range some {
			want[svc.counter(i, c.protocol, c.endpoint)] += n
		}
	}
	s.awaitCounts(func(all map[counterKey]backends.Stats) error {
		return differentCounts(all, nil, want, func(key counterKey) bool {
			return key.service == svc.Name && key.port == svc.counter(i, key.protocol, key.endpoint).port
		})
	})
}

// countsNew opens connections and checks that the counters increase by exactly these
// connections.
func (s *scene) countsNew(svc *service, from person) {
	before, err := s.readCounts()
	s.must(err)
	want := map[counterKey]int64{}
	for _, p := range []person{s.a, s.e} { // a new endpoint begins with zero connections
		for _, protocol := range s.protocols {
			key := svc.counter(0, protocol, p.target(s.family))
			if n := before[key].Connections; n != 0 && slices.ContainsFunc(svc.slices[0].endpoints, func(e endpoint) bool { return e.Name == p.Name }) {
				s.failf("endpoint %s has %d connections over %s before it gets any", p.Name, n, protocol)
			}
		}
	}
	for c, n := range s.connect(from, svc.clusterIP()) {
		want[svc.counter(0, c.protocol, c.endpoint)] += n
	}
	s.awaitCounts(func(all map[counterKey]backends.Stats) error {
		return differentCounts(all, before, want, func(key counterKey) bool {
			_, still := all[key]
			return still && key.service == svc.Name
		})
	})
}

// differentCounts returns an error if the connections since the counts in "before" are not
// those in want. It ignores a key that is not in want if match returns false.
func differentCounts(all, before map[counterKey]backends.Stats, want map[counterKey]int64, match func(counterKey) bool) error {
	for key, n := range want {
		if got := all[key].Connections - before[key].Connections; got != n {
			return fmt.Errorf("%v: %d connections are counted, want %d", key, got, n)
		}
	}
	for key, c := range all {
		if n := c.Connections - before[key].Connections; match(key) && n != want[key] {
			return fmt.Errorf("%v: %d connections are counted, want %d", key, n, want[key])
		}
	}
	return nil
}

// readCounts reads the counters of the proxy.
func (s *scene) readCounts() (map[counterKey]backends.Stats, error) {
	counter, ok := s.subject.(interface {
		stats(context.Context) ([]backends.Stats, error)
	})
	if !ok {
		s.unavailable("the kit reads the counters of sinks only")
	}
	ctx, cancel := context.WithTimeout(s.ctx, s.opts.Patience)
	defer cancel()
	list, err := counter.stats(ctx)
	all := map[counterKey]backends.Stats{}
	for _, c := range list {
		key := counterKey{c.Service.Name, c.Port, c.Protocol, c.Endpoint}
		sum := all[key]
		sum.Connections += c.Connections
		sum.Active = addCounts(sum.Active, c.Active)
		sum.FromClients = addCounts(sum.FromClients, c.FromClients)
		sum.ToClients = addCounts(sum.ToClients, c.ToClients)
		all[key] = sum
	}
	return all, err
}

// addCounts adds two numbers. If one of them is -1, the sum is -1.
func addCounts(a, b int64) int64 {
	if a == -1 || b == -1 {
		return -1
	}
	return a + b
}

// awaitCounts reads the counters until wrong returns nil, because a dataplane may count a
// little later. After opts.Patience, it fails with the last error.
func (s *scene) awaitCounts(wrong func(map[counterKey]backends.Stats) error) {
	for deadline := time.Now().Add(s.opts.Patience); ; {
		all, err := s.readCounts()
		s.must(err)
		if err = wrong(all); err == nil {
			return
		}
		if time.Now().After(deadline) {
			s.must(err)
		}
		s.sleep(20 * time.Millisecond)
	}
}
