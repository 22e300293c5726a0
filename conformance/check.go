// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/conformance/internal/world"
)

// answerTimeout is the time without an answer after which a connection counts as dropped.
// An answer normally takes a fraction of this time. On a very busy machine, a check that
// expects no answer may miss a wrong answer that arrives later. A correct proxy still
// passes, because a check that expects an answer waits longer.
const answerTimeout = 300 * time.Millisecond

// connectionsPerCheck is the number of connections that a check opens to see which
// endpoints they reach. If one in four connections reaches a wrong endpoint, about 1 in
// 1,000 checks does not detect this.
const connectionsPerCheck = 24

// answer opens a new connection, sends a request and returns the server's answer, which
// must arrive within opts.Patience. Over UDP, it repeats the request.
func (s *scene) answer(from person, protocol api.Protocol, to netip.AddrPort) (world.Answer, error) {
	ctx, cancel := context.WithTimeout(s.ctx, s.opts.Patience)
	defer cancel()
	return from.AskRepeatedly(ctx, protocol, from.source, to)
}

// ask opens a new connection, sends one request and reads the answer.
func (s *scene) ask(from person, protocol api.Protocol, to netip.AddrPort, patience time.Duration) (world.Answer, error) {
	ctx, cancel := context.WithTimeout(s.ctx, patience)
	defer cancel()
	return from.Ask(ctx, protocol, from.source, to)
}

// describe returns a description of a connection for messages.
func describe(from person, protocol api.Protocol, to netip.AddrPort) string {
	return fmt.Sprintf("from %s to %s/%s", from, to, protocol)
}

// mustReach asserts that connections reach all of these persons and no other host. It
// returns the source addresses that the persons saw.
func (s *scene) mustReach(from person, to netip.AddrPort, persons ...person) []netip.Addr {
	var peers []netip.Addr
	for _, protocol := range s.protocols {
		for _, peer := range s.mustReachOver(protocol, from, to, persons...) {
			if !slices.Contains(peers, peer) {
				peers = append(peers, peer)
			}
		}
	}
	return peers
}

func (s *scene) mustReachOver(protocol api.Protocol, from person, to netip.AddrPort, persons ...person) []netip.Addr {
	missing := map[string]bool{}
	for _, p := range persons {
		missing[p.Name] = true
	}
	wanted := names(persons)
	var peers []netip.Addr
	// With eight endpoints, the probability that an endpoint gets none of 400 connections by
	// chance is 1 in 10^22.
	for i := 0; i < connectionsPerCheck || len(missing) > 0; i++ {
		if i == 400 {
			s.failf("%s: %d connections, and some of %s got none", describe(from, protocol, to), i, wanted)
		}
		answer, err := s.answer(from, protocol, to)
		if err != nil {
			s.failf("%s, want %s: %w", describe(from, protocol, to), wanted, err)
		}
		if !slices.ContainsFunc(persons, func(p person) bool { return p.Name == answer.Name }) {
			s.failf("%s: answer from %s, want %s", describe(from, protocol, to), answer.Name, wanted)
		}
		delete(missing, answer.Name)
		if !slices.Contains(peers, answer.Peer.Addr()) {
			peers = append(peers, answer.Peer.Addr())
		}
	}
	return peers
}

func names(persons []person) string {
	var all []string
	for _, p := range persons {
		all = append(all, p.Name)
	}
	return strings.Join(all, ", ")
}

// mustRefuse asserts that connections are refused. TCP connections get a reset, and
// connections of other protocols get ICMP or ICMPv6 port unreachable.
func (s *scene) mustRefuse(from person, to netip.AddrPort) {
	for _, protocol := range s.protocols {
		if answer, err := s.ask(from, protocol, to, s.opts.Patience); !world.Refused(err) {
			s.must(unexpected(describe(from, protocol, to)+" must be refused", answer, err))
		}
	}
}

// mustDrop asserts that several concurrent connections get no response.
func (s *scene) mustDrop(from person, to ...netip.AddrPort) {
	var mu sync.Mutex
	var wrong error
	var group sync.WaitGroup
	for _, protocol := range s.protocols {
		for _, to := range to {
			group.Go(func() {
				answer, err := s.ask(from, protocol, to, answerTimeout)
				if !world.TimedOut(err) {
					mu.Lock()
					defer mu.Unlock()
					wrong = unexpected(describe(from, protocol, to)+" must be dropped", answer, err)
				}
			})
		}
	}
	group.Wait()
	s.must(wrong)
}

// unexpected returns an error that contains the required result and the actual one. The
// actual result is err or, if err is nil, the answer.
func unexpected(required string, answer world.Answer, err error) error {
	if err == nil {
		err = fmt.Errorf("answer from %s", answer.Name)
	}
	return fmt.Errorf("%s: %w", required, err)
}

// mustIgnore asserts that the proxy does not handle connections. Unhandled connections
// reach the host World.Beyond, which has all addresses of services.
func (s *scene) mustIgnore(from person, to netip.AddrPort) {
	s.mustReach(from, to, person{Host: s.world.Beyond})
}

// mustKeepSource asserts that persons see the client's address as the source of
// connections.
func (s *scene) mustKeepSource(from person, to netip.AddrPort, persons ...person) {
	for _, peer := range s.mustReach(from, to, persons...) {
		if !slices.Contains(slices.Collect(from.Addrs.All()), peer.Unmap()) {
			s.failf("from %s to %s: %s sees %s, want the client's address", from, to, names(persons), peer)
		}
	}
}

// mustMasquerade asserts that persons see a node address as the source of connections.
func (s *scene) mustMasquerade(from person, to netip.AddrPort, persons ...person) {
	for _, peer := range s.mustReach(from, to, persons...) {
		if !slices.Contains(slices.Collect(s.node.Addrs.All()), peer.Unmap()) {
			s.failf("from %s to %s: %s sees %s, want an address of the node", from, to, names(persons), peer)
		}
	}
}

// flow is an open connection or, for UDP, a socket whose packets have one source port.
type flow struct {
	*world.Conn
	scene *scene
	what  string
}

// openFlow starts a flow. The flow is closed at the end of the case.
func (s *scene) openFlow(from person, protocol api.Protocol, to netip.AddrPort) *flow {
	ctx, cancel := context.WithTimeout(s.ctx, s.opts.Patience)
	defer cancel()
	c, err := from.Dial(ctx, protocol, from.source, to)
	if err != nil {
		s.failf("%s: %w", describe(from, protocol, to), err)
	}
	s.addCleanup(c.Close)
	return &flow{c, s, describe(from, protocol, to)}
}

// mustReach checks that the flow reaches one of these persons. It returns the reached
// person.
func (f *flow) mustReach(persons ...person) person {
	answer, err := f.AskRepeatedly(time.Now().Add(f.scene.opts.Patience))
	if err != nil {
		f.scene.failf("flow %s: %w", f.what, err)
	}
	i := slices.IndexFunc(persons, func(p person) bool { return p.Name == answer.Name })
	if i < 0 {
		f.scene.failf("flow %s: answer from %s, want %s", f.what, answer.Name, names(persons))
	}
	return persons[i]
}

// mustDistributeEvenly asserts that connections are distributed evenly over persons.
func (s *scene) mustDistributeEvenly(from person, to netip.AddrPort, persons ...person) {
	const total = 800
	each := float64(total / len(persons))
	for _, protocol := range s.protocols {
		count := map[string]int{}
		for range total {
			count[s.reachedEndpoint(protocol, from, to)]++
		}
		var chi2 float64
		for _, p := range persons {
			d := float64(count[p.Name]) - each
			chi2 += d * d / each
		}
		// If the distribution over four endpoints is even, chi2 exceeds this limit once in 13
		// million checks. With two endpoints, this is even rarer. If one endpoint gets twice as
		// many connections as any other endpoint, chi2 is 89 for two endpoints and 96 for four.
		if limit := 36.0; chi2 > limit {
			s.failf("%s: %d connections are distributed as %v: chi-squared is %.0f, limit %.0f", describe(from, protocol, to), total, count, chi2, limit)
		}
	}
}
