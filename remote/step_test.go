// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/wire/localv1"
)

// Clients that share an answer get the same operations as clients that do not share it.
func TestSharedAnswersEqualOwnOnes(t *testing.T) {
	const nodes = 12
	r := rand.New(rand.NewPCG(1, 2))
	world, state := apitest.NewWorld(r, nodes, 20), cluster.New(cluster.Options{Resumable: true})
	state.Update(func(tx *cluster.Tx) { world.WriteAll(tx) })
	server, err := NewServer(state, ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var watches []*watch
	for n := range nodes + 1 { // one node does not exist
		for kind := range 4 {
			req := &localv1.WatchReq{NodeName: apitest.NodeName(n), AllEndpoints: kind == 0, Batches: kind != 1, Frontends: kind == 2}
			w := server.newWatch(&sent{ctx: t.Context()}, caller{}, req)
			if _, err := w.send(state.Objects()); err != nil {
				t.Fatal(err)
			}
			watches = append(watches, w)
		}
	}
	shared := 0
	for round := range 200 {
		state.Update(func(tx *cluster.Tx) {
			for range r.IntN(4) {
				world.Change(tx)
			}
		})
		snapshot := state.Objects()
		for _, w := range watches {
			if r.IntN(10) == 0 {
				continue // this client is slow, so that its next answer has several changes
			}
			stream := w.sender.stream.(*sent)
			stream.take()
			own := &watch{server: w.server, name: w.name, who: w.who, frontends: w.frontends, target: w.target}
			own.sender = opSender{sender: sender{server: server, stream: &sent{ctx: t.Context()}}, batches: w.sender.batches}
			own.sender.begin(snapshot)
			d := w.cursor.Until(statesOf(snapshot.Snapshot))
			to := w.targetIn(snapshot)
			changes := d.Changes()
			if to.zone != w.target.zone {
				changes = d.All()
			}
			own.sendPhases(slices.Values(own.deltas(changes, &to)))
			if own.sender.sent+own.sender.size > 0 {
				own.sender.ops(syncFrame(nil, false))
			}
			own.sender.flush()
			if _, err := w.send(snapshot); err != nil {
				t.Fatal(err)
			}
			got, want := bytes.Join(stream.take(), nil), bytes.Join(own.sender.stream.(*sent).take(), nil)
			if !bytes.Equal(got, want) {
				t.Fatalf("round %d: node %s, kind %v %v %v: received\n%q, want\n%q", round, w.name, w.who, w.frontends, w.sender.batches, got, want)
			}
		}
		for _, s := range server.published.steps {
			shared += len(s.ops)
		}
	}
	if shared == 0 {
		t.Error("no answer was shared")
	}
}

// If clients share an answer with many changes, it costs each client as little as one
// change.
func TestSharedAnswersAreCheap(t *testing.T) {
	allocations := func(changes int) float64 {
		state := cluster.New(cluster.Options{})
		server, err := NewServer(state, ServerOptions{})
		if err != nil {
			t.Fatal(err)
		}
		const clients = 20
		var watches []*watch
		for range clients + 2 { // AllocsPerRun calls the function once more; the first client prepares the answer
			w := server.newWatch(&sent{ctx: t.Context()}, caller{}, &localv1.WatchReq{NodeName: "n", AllEndpoints: true, Batches: true})
			if _, err := w.send(state.Objects()); err != nil {
				t.Fatal(err)
			}
			watches = append(watches, w)
		}
		state.Update(func(tx *cluster.Tx) {
			for i := range changes {
				tx.SetService(&api.Service{Namespace: "ns", Name: fmt.Sprint("s", i), Type: api.ClusterIP})
			}
		})
		snapshot := state.Objects()
		next := 0
		send := func() {
			if _, err := watches[next].send(snapshot); err != nil {
				t.Error(err)
			}
			next++
		}
		send()
		return testing.AllocsPerRun(clients, send)
	}
	if one, many := allocations(1), allocations(200); many > one+2 {
		t.Errorf("%v allocations for an answer with 200 changes, %v with one", many, one)
	} else {
		t.Logf("%v allocations", one)
	}
}

// A client does not wait for the operations of clients of another kind.
func TestOtherKindsDoNotWait(t *testing.T) {
	state := cluster.New(cluster.Options{})
	server, err := NewServer(state, ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w := server.newWatch(&sent{ctx: t.Context()}, caller{}, &localv1.WatchReq{NodeName: "n", Batches: true})
	s := &step{ops: map[stepKind]func() []frame{}}
	s.ops[stepKind{batches: true}] = func() []frame {
		other := server.newWatch(&sent{ctx: t.Context()}, caller{}, &localv1.WatchReq{NodeName: "n"})
		other.sendStep(s, &target{})
		return nil
	}
	w.sendStep(s, &target{})
	if len(s.ops) != 2 {
		t.Errorf("operations of %d kinds, want 2", len(s.ops))
	}
}
