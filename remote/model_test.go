// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"bytes"
	"crypto/sha256"
	"flag"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/kpng-project/kpng/internal/wire/clusterv1"
	"github.com/kpng-project/kpng/internal/wire/localv1"
)

var modelDepth = flag.Int("model-depth", 3, "the `number` of actions after which TestModel ends")

// TestModel explores all sequences of actions up to a length. The actors are a server, a
// relay, and a client of the server or of the relay. The test calls the code of this
// package for servers and clients, without a network. It explores a state only once, even
// if several paths lead to the state.
//
// After each action, it checks the promises of docs/reference/wire.md; see model.receive.
func TestModel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		states, actions, err := explore(modelBegins, *modelDepth, fault{})
		if err != nil {
			t.Error(err)
		}
		t.Attr("states", fmt.Sprint(states))
		t.Attr("actions", fmt.Sprint(actions))
	})
}

// TestModelFindsFaults explores the model with faults. It must find each fault.
func TestModelFindsFaults(t *testing.T) {
	drop := func(is func(*localv1.OpItem) bool) func([]*localv1.OpItem) []*localv1.OpItem {
		return func(items []*localv1.OpItem) []*localv1.OpItem { return slices.DeleteFunc(items, is) }
	}
	for name, f := range map[string]fault{
		"client commits an incomplete answer": {commitIncomplete: true},
		"client ignores Reset":                {client: drop(func(i *localv1.OpItem) bool { return i.GetReset_() != nil })},
		"client ignores Discard":              {client: drop(func(i *localv1.OpItem) bool { return i.GetDiscard() != nil })},
		"server omits deletions": {answer: drop(func(i *localv1.OpItem) bool {
			return i.GetDelete().GetSet() == localv1.Set_ServicesSet && i.GetDelete() != nil
		})},
		"server omits the node's deletion": {answer: drop(func(i *localv1.OpItem) bool {
			return i.GetDelete().GetSet() == localv1.Set_NodesSet && i.GetDelete() != nil
		})},
		"server sends packed operations last": {answer: func(items []*localv1.OpItem) []*localv1.OpItem {
			slices.SortStableFunc(items, func(a, b *localv1.OpItem) int {
				rank := func(i *localv1.OpItem) int { return min(1, len(i.GetPacked())) }
				return rank(a) - rank(b)
			})
			return items
		}},
		"server sends everything in spite of a token": {request: func(m *model, s *modelServer, r *localv1.WatchReq) {
			r.Resumption, r.Have = &localv1.WatchReq_Resume{Resume: []byte{}}, nil
		}},
		"server accepts tokens of other servers": {request: func(m *model, s *modelServer, r *localv1.WatchReq) {
			for _, other := range m.all {
				if rest, ok := bytes.CutPrefix(r.GetResume(), other.server.instance); ok {
					r.Resumption = &localv1.WatchReq_Resume{Resume: slices.Concat(s.server.instance, rest)}
				}
			}
		}},
		"server accepts tokens for the node in another zone": {request: func(m *model, s *modelServer, r *localv1.WatchReq) {
			w := &watch{name: modelNode, who: complete}
			for _, zone := range modelZones {
				if revision := s.server.readToken(r.GetResume(), w.newTarget(nodeIn(zone)).facts); revision > 0 {
					r.Resumption = &localv1.WatchReq_Resume{Resume: s.server.newToken(revision, w.newTarget(s.node()).facts)}
				}
			}
		}},
		"client sends digests of an earlier time": {request: func(m *model, s *modelServer, r *localv1.WatchReq) {
			m.digests, r.Have = r.Have, m.digests
			r.Resumption = &localv1.WatchReq_Resume{Resume: []byte{}}
		}},
		"relay ignores deletions": {relayed: func(r *clusterv1.WatchResponse) { r.DeletedServices = nil }},
		"relay ignores resets":    {relayed: func(r *clusterv1.WatchResponse) { r.Reset_ = false }},
		"relay keeps its token for another server": {relayRequest: func(m *model, r *clusterv1.WatchRequest) {
			for _, other := range m.all {
				if rest, ok := bytes.CutPrefix(r.GetResume(), other.server.instance); ok {
					r.Resume = slices.Concat(m.servers[origin].server.instance, rest)
				}
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, actions, err := explore(modelBegins[1:], 4, f)
				if err == nil {
					t.Errorf("the fault is not found by %d actions", actions)
				}
				t.Logf("found after %d actions: %v", actions, err)
			})
		})
	}
}

// fault has functions that put a fault into the code of this package.
type fault struct {
	commitIncomplete bool
	answer, client   func([]*localv1.OpItem) []*localv1.OpItem
	request          func(*model, *modelServer, *localv1.WatchReq)
	relayed          func(*clusterv1.WatchResponse)
	relayRequest     func(*model, *clusterv1.WatchRequest)
}

// Exploration begins with the paths in modelBegins: an empty path, and a path that gives a
// client and a relay several services.
var modelBegins = [][]string{
	nil,
	{"put a2", "put b", "node in z1", "relay", "connect to origin", "answer"},
}

// explore plays paths that begin with one of the paths in frontier. The number of further
// actions is depth. It extends only the first path to each state.
func explore(frontier [][]string, depth int, f fault) (states, actions int, err error) {
	defer debug.SetGCPercent(debug.SetGCPercent(400)) // servers need much memory for a short time
	seen := map[[sha256.Size]byte]bool{}
	for range depth {
		var next [][]string
		for _, path := range frontier {
			m := replay(path, f)
			if m.err != nil {
				return len(seen), actions, fmt.Errorf("%s: %w", strings.Join(m.path, ", "), m.err)
			}
			for _, action := range modelActions {
				if !m.do(action) {
					continue
				}
				actions++
				if m.err != nil {
					return len(seen), actions, fmt.Errorf("%s: %w", strings.Join(m.path, ", "), m.err)
				}
				if hash := m.hash(); !seen[hash] {
					seen[hash] = true
					next = append(next, slices.Clip(m.path))
				}
				m.close()
				m = replay(path, f)
			}
			m.close()
		}
		frontier = next
	}
	return len(seen), actions, nil
}

func replay(path []string, f fault) *model {
	m := newModel(f)
	for _, action := range path {
		m.do(action)
	}
	return m
}

// The actions of the model. Each one is possible in some states only.
var modelActions = []string{
	// The source of the origin changes: service a with or without hints for zones, service b
	// with endpoints for the client's node, and the client's node.
	"put a1", "put a2", "delete a", "put b", "delete b", "node in z1", "node in z2", "delete node",
	// The client opens a stream, and loses its previous stream.
	"connect to origin", "connect to relay",
	// The server answers. With "part", the client loses the stream before the end of the
	// answer.
	"answer", "part",
	// The relay gets an answer from the origin. With "part", it gets only a part and then
	// loses its stream.
	"relay", "relay part",
	"restart origin", "restart relay",
	// So much time passes that servers may forget deletions.
	"wait",
}
