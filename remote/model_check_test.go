// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"

	"github.com/go-logr/logr"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/revstore"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"k8s.io/apimachinery/pkg/types"
)

// receivePart gives the client all incomplete parts of an answer, each part on its own
// stream. These parts must not change the client's state.
func (m *model) receivePart(items []*localv1.OpItem) {
	before, _ := m.client.get()
	token := m.client.token
	for n := range items {
		a := newAnswer(m.client, logr.Discard(), m.stream.buckets)
		for _, item := range items[:n] {
			if err := a.take(item); err != nil {
				m.failf("%w", err)
			}
		}
		if a.synced {
			m.failf("an operation follows the Sync")
		}
		if m.fault.commitIncomplete {
			m.client.commit(a)
		}
	}
	if after, _ := m.client.get(); after != before || !bytes.Equal(token, m.client.token) {
		m.failf("an incomplete answer changes the client")
	}
	m.lose(m.stream.server)
}

// receive gives the client a complete answer. Afterwards, the client must have the server's
// view. The answer must contain only what wire.md permits:
//   - after a valid token, and for later requests on the stream, the changes since
//     then;
//   - after an invalid token of a client with digests, the services that differ, unless they
//     are more than half of all services;
//   - otherwise, a Reset and everything.
func (m *model) receive(items []*localv1.OpItem) {
	s := m.stream
	snapshot, zone := s.server.state.Objects(), s.server.node().Zone()
	had, _ := m.client.get()
	differ := m.inBuckets(s.server, m.differences(s.server))

	a := newAnswer(m.client, logr.Discard(), s.buckets)
	named, reset := map[string]bool{}, false
	taken := slices.Clone(items)
	if m.fault.client != nil {
		taken = m.fault.client(taken)
	}
	for _, item := range taken {
		if err := a.take(item); err != nil {
			m.failf("%w", err)
		}
	}
	for _, item := range items {
		reset = reset || item.GetReset_() != nil || item.GetPacked() != nil
		switch op := item.GetOp().(type) {
		case *localv1.OpItem_Replace:
			named[op.Replace.GetService().GetName()] = true
		case *localv1.OpItem_Set:
			named[nameOf(op.Set.GetRef())] = true
		case *localv1.OpItem_Delete:
			named[nameOf(op.Delete)] = true
		}
	}
	if !a.synced || len(a.token) == 0 {
		m.failf("the answer has no Sync with a token at its end")
		return
	}
	valid := m.has != nil && m.has.server == s.server && m.has.zone == zone && m.has.revision >= s.server.forgotten
	unknown := m.has == nil || m.has.server != s.server || m.has.zone != zone
	permit := func(what string, names map[string]bool) {
		if reset {
			m.failf("the answer begins with Reset, %s", what)
		}
		for name := range named {
			if !names[name] && name != "node" {
				m.failf("the answer has service %s, %s", name, what)
			}
		}
	}
	switch {
	case !s.first:
		if zone == s.zone && s.has >= s.server.forgotten {
			permit("which has not changed since the last answer", s.server.changed(s.has))
		}
	case valid:
		permit("which has not changed since the token", s.server.changed(m.has.revision))
	case unknown && had.revision > 0 && 2*s.server.count(differ) <= len(s.server.views()):
		permit("which the client has", differ)
	case unknown && !reset:
		m.failf("the answer does not begin with Reset")
	}
	m.client.commit(a)
	m.check()
	m.has = &modelToken{s.server, snapshot.Revision, zone, a.token}
	s.first, s.has, s.zone = false, snapshot.Revision, zone
}

func nameOf(ref *localv1.Ref) string {
	if ref.GetSet() == localv1.Set_NodesSet {
		return "node"
	}
	return strings.Split(ref.GetPath(), "/")[1]
}

// differences returns the names of the services that the client lacks or that differ at the
// client.
func (m *model) differences(s *modelServer) map[string]bool {
	names := map[string]bool{}
	want := s.views()
	state, _ := m.client.get()
	for key, e := range state.views.All() {
		if !e.shown.Equal(want[key.Name]) {
			names[key.Name] = true
		}
		delete(want, key.Name)
	}
	for name := range want {
		names[name] = true
	}
	return names
}

// inBuckets returns the given names, and the names of the server's services in the same
// buckets.
func (m *model) inBuckets(s *modelServer, names map[string]bool) map[string]bool {
	bucket := func(name string) int {
		return bucketOf(orderOf(types.NamespacedName{Namespace: "ns", Name: name}), max(1, m.stream.buckets))
	}
	all := maps.Clone(names)
	for name := range s.views() {
		for other := range names {
			if bucket(name) == bucket(other) {
				all[name] = true
			}
		}
	}
	return all
}

// count returns how many of the names belong to services of the client's node.
func (s *modelServer) count(names map[string]bool) (n int) {
	for name := range s.views() {
		if names[name] {
			n++
		}
	}
	return n
}

// check checks that the client has the views of its server.
func (m *model) check() {
	s := m.stream.server
	if differ := m.differences(s); len(differ) > 0 {
		m.failf("the client differs from its server in services %v", slices.Sorted(maps.Keys(differ)))
	}
	if got, want := m.client.Node(), s.node(); !got.Equal(want) {
		m.failf("the client has node %v, want %v", got, want)
	}
}

// modelContent describes the state of a server.
func modelContent(s *modelServer) string {
	var b strings.Builder
	objects := s.state.Objects()
	for _, service := range objects.Services.All() {
		fmt.Fprintf(&b, "%s %v\n", service.Name, service.IPs)
	}
	for _, slice := range objects.Slices.All() {
		fmt.Fprintf(&b, "%s %v\n", slice.Name, slice.Endpoints[0].Details.Hints)
	}
	fmt.Fprintf(&b, "node %s", s.node().Zone())
	return b.String()
}

// since describes the changes that a server can send to a client at a revision.
func since[K comparable, V any](b *strings.Builder, s *revstore.Snapshot[K, V], revision uint64) {
	changes, ok := s.Since(revision)
	fmt.Fprint(b, " since ", ok)
	if ok {
		keys(b, changes)
	}
}

func keys[K comparable, V any](b *strings.Builder, all iter.Seq2[K, V]) {
	var names []string
	for key := range all {
		names = append(names, fmt.Sprint(key))
	}
	slices.Sort(names)
	fmt.Fprint(b, names)
}

// hash returns a hash of all facts on which the future of the model depends. Instead of
// instances and revisions, it hashes the changes that servers can send to a client that
// has them.
func (m *model) hash() [sha256.Size]byte {
	var b strings.Builder
	for i, s := range m.servers {
		snapshot := s.state.Objects()
		fmt.Fprintf(&b, "server %d: synced %t waited %t\n%s\n", i, s.state.IsSynced(), s.waited, modelContent(s))
		if x := s.server.beginnings.last; x != nil {
			fmt.Fprint(&b, "beginning ", beginningContent(x.snapshot))
			since(&b, statesOf(snapshot.Snapshot), x.snapshot.Revision)
		}
		for _, zone := range modelZones {
			w := &watch{name: modelNode, who: complete}
			revision := s.server.readToken(m.client.token, w.newTarget(nodeIn(zone)).facts)
			fmt.Fprint(&b, "\nclient's token in ", zone)
			since(&b, statesOf(snapshot.Snapshot), revision)
		}
	}
	client, _ := m.client.get()
	fmt.Fprintf(&b, "\nclient: any %t node %s", client.revision > 0, client.node.Zone())
	for _, d := range client.digested() {
		fmt.Fprintf(&b, " %s %x", d.key, d.content[:4])
	}
	if s := m.stream; s != nil {
		snapshot := s.server.state.Objects()
		delta := s.watch.cursor.Until(statesOf(snapshot.Snapshot))
		fmt.Fprintf(&b, "\nstream: relay %t first %t zone %s full %t expires %t resume %t have %t", s.server == m.servers[relayer], s.first,
			s.watch.target.zone, delta.Full(), !s.first && s.watch.mayExpire(snapshot), s.watch.resume != nil, s.watch.have != nil)
		if !delta.Full() {
			for c := range delta.Changes() {
				fmt.Fprintf(&b, " %s %s", c.Key, versionOf(c.Old))
			}
		}
	}
	snapshot := m.servers[origin].state.Objects()
	for _, revision := range []uint64{m.servers[origin].server.readToken(m.mirror.token, nil), m.relayRevision()} {
		fmt.Fprint(&b, "\nrelay's position")
		since(&b, (*revstore.Snapshot[types.NamespacedName, *api.Service])(snapshot.Services), revision)
		since(&b, (*revstore.Snapshot[types.NamespacedName, *api.EndpointSlice])(snapshot.Slices), revision)
		since(&b, nodesOf(snapshot), revision)
	}
	return sha256.Sum256([]byte(b.String()))
}

func (m *model) relayRevision() uint64 {
	if m.relayed == nil {
		return 0
	}
	return m.relayed.revision
}

func beginningContent(o *cluster.Objects) string {
	text := ""
	for key, state := range o.States.All() {
		text += key.Name + versionOf(state) + " "
	}
	return text
}

func versionOf(state *api.ServiceState) string {
	if state == nil || state.Service == nil {
		return "none"
	}
	return fmt.Sprint(state.Service.IPs, state.Lost)
}
