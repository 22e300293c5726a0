// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/diffstore"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/remote"
	"github.com/kpng-project/kpng/remote/transport"
	watcher "github.com/kpng-project/kpng/watcher/remote"
	"go.uber.org/goleak"
	"k8s.io/apimachinery/pkg/types"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type writer struct{ tx *cluster.Tx }

func (w writer) SetService(s *api.Service)            { w.tx.SetService(s) }
func (w writer) DeleteService(k types.NamespacedName) { w.tx.DeleteService(k) }
func (w writer) SetSlice(s *api.EndpointSlice)        { w.tx.SetSlice(s) }
func (w writer) DeleteSlice(k types.NamespacedName)   { w.tx.DeleteSlice(k) }
func (w writer) SetNode(n *api.Node)                  { w.tx.SetNode(n) }
func (w writer) DeleteNode(name string)               { w.tx.DeleteNode(name) }

func update(s *cluster.State, write func(apitest.Writer)) {
	s.Update(func(tx *cluster.Tx) { write(writer{tx}) })
}

// start runs f until it is stopped.
func start(t *testing.T, f func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := f(ctx); err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("ended with %v", err)
		}
	}()
	stop = func() {
		cancel()
		<-ended
	}
	t.Cleanup(stop)
	return stop
}

func serve(t *testing.T, state *cluster.State, address string) (stop func()) {
	t.Helper()
	server, err := remote.NewServer(state, remote.ServerOptions{
		ServeCluster: true, BatchInterval: -1, Limits: remote.Limits{StreamRate: 1e6},
	})
	if err != nil {
		t.Fatal(err)
	}
	a, err := transport.ParseAddress(address)
	if err != nil {
		t.Fatal(err)
	}
	l, err := a.Listen(0)
	if err != nil {
		t.Fatal(err)
	}
	return start(t, func(ctx context.Context) error { return server.Serve(ctx, l) })
}

func follow(t *testing.T, state *cluster.State, address string) (stop func()) {
	return start(t, func(ctx context.Context) error {
		return watcher.Watch(ctx, state, watcher.Options{DialOptions: transport.DialOptions{
			Addresses: []string{address}, MinBackoff: time.Millisecond, MaxBackoff: 10 * time.Millisecond,
		}})
	})
}

// difference says what copied has otherwise than original.
func difference(original, copied *cluster.Snapshot) string {
	return compare(original.Services, copied.Services, (*api.Service).Equal) +
		compare(original.Slices, copied.Slices, (*api.EndpointSlice).Equal) +
		compare(original.Nodes, copied.Nodes, (*api.Node).Equal)
}

func compare[K comparable, V any](want, got *diffstore.Snapshot[K, V], equal func(a, b V) bool) string {
	text := ""
	for key, w := range want.All() {
		if g, ok := got.Get(key); !ok || !equal(w, g) {
			text += fmt.Sprintf("%v is not the same\n", key)
		}
	}
	for key := range got.All() {
		if _, ok := want.Get(key); !ok {
			text += fmt.Sprintf("%v should not be there\n", key)
		}
	}
	return text
}

// wait waits until copied is the same as original.
func wait(t *testing.T, original, copied *cluster.State) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for {
		snapshot := copied.Snapshot()
		d := "it has not synced"
		if copied.IsSynced() {
			if d = difference(original.Snapshot(), snapshot); d == "" {
				return
			}
		}
		select {
		case <-copied.Changed(snapshot.Revision):
		case <-ctx.Done():
			t.Fatal(d)
		}
	}
}

func TestTheStateIsCopied(t *testing.T) {
	world := apitest.NewWorld(rand.New(rand.NewPCG(1, 0)), 10, 500)
	original, copied := cluster.New(cluster.Options{Resumable: true}), cluster.New(cluster.Options{Resumable: true})
	update(original, world.WriteAll)
	address := "unix://" + filepath.Join(t.TempDir(), "s")
	stop := serve(t, original, address)
	unfollow := follow(t, copied, address)
	if copied.IsSynced() {
		t.Error("the copy has synced before the original has")
	}
	original.SetSynced()
	for round := range 30 {
		for range 20 {
			update(original, world.Change)
		}
		switch round % 6 {
		case 2:
			stop()
			update(original, world.Change)
			stop = serve(t, original, address)
		case 4:
			unfollow()
			update(original, world.Change)
			unfollow = follow(t, copied, address)
		}
		wait(t, original, copied)
	}
}

// TestARelistIsAMinimalDifference follows another server with almost the same.
func TestARelistIsAMinimalDifference(t *testing.T) {
	states := [2]*cluster.State{cluster.New(cluster.Options{Resumable: true}), cluster.New(cluster.Options{Resumable: true})}
	for i, s := range states {
		update(s, func(to apitest.Writer) {
			for n := range 100 {
				to.SetService(&api.Service{Namespace: "ns", Name: fmt.Sprint("s", n+i)})
			}
		})
		s.SetSynced()
	}
	address := "unix://" + filepath.Join(t.TempDir(), "s")
	copied := cluster.New(cluster.Options{Resumable: true})
	stop := serve(t, states[0], address)
	follow(t, copied, address)
	wait(t, states[0], copied)
	before := copied.Snapshot()
	stop()
	serve(t, states[1], address)
	wait(t, states[1], copied)
	var changed []string
	changes, _ := copied.Snapshot().States.Since(before.Revision)
	for key := range changes {
		changed = append(changed, key.Name)
	}
	if diff := cmp.Diff([]string{"s0", "s100"}, changed); diff != "" {
		t.Error(diff)
	}
}
