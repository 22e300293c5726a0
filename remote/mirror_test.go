// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/diffstore"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/revstore"
	"github.com/kpng-project/kpng/internal/wire/clusterv1"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"github.com/kpng-project/kpng/remote"
	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/types"
)

// mirror keeps state equal to the state of the server at the address.
func mirror(t testing.TB, state *cluster.State, address string) (stop func()) {
	return start(t, func(ctx context.Context) error {
		return remote.Watch(ctx, state, remote.Quick(remote.DialOptions{Addresses: []string{address}}))
	})
}

// serveCluster runs a server of the given state, for mirror.
func serveCluster(t testing.TB, state *cluster.State, address string) (stop func()) {
	opts := quick
	opts.ServeCluster = true
	_, stop = serve(t, state, address, opts)
	return stop
}

// scriptedCluster is a server that answers the n-th request with the n-th of its answers.
type scriptedCluster struct {
	clusterv1.UnimplementedClusterServer
	answers []*clusterv1.WatchResponse
}

func (s scriptedCluster) Watch(stream grpc.BidiStreamingServer[clusterv1.WatchRequest, clusterv1.WatchResponse]) error {
	for _, answer := range s.answers {
		if _, err := stream.Recv(); err != nil {
			return err
		}
		if err := stream.Send(answer); err != nil {
			return err
		}
	}
	<-stream.Context().Done()
	return nil
}

// TestUnreadableObjectOfClusterIsIgnored sends some unreadable objects. The client must keep
// earlier versions of these objects.
func TestUnreadableObjectOfClusterIsIgnored(t *testing.T) {
	service := func(name, ip string) *localv1.Service {
		return &localv1.Service{Namespace: "ns", Name: name, IPs: &localv1.ServiceIPs{ClusterIPs: &localv1.IPSet{V4: []string{ip}}}}
	}
	slice := func(name, ip string) *clusterv1.EndpointSlice {
		return &clusterv1.EndpointSlice{Namespace: "ns", Name: name, ServiceName: "s", Endpoints: []*clusterv1.SliceEndpoint{{Addr: ip}}}
	}
	node := func(name, ip string) *localv1.Node {
		return &localv1.Node{Name: name, Addresses: []*localv1.NodeAddress{{IP: ip}}}
	}
	answer := func(reset bool, ip, marker string) *clusterv1.WatchResponse {
		return &clusterv1.WatchResponse{
			Reset_: reset, Token: []byte(marker),
			Services: []*localv1.Service{service("a", ip), service("b", "10.0.0.2"), service(marker, "10.0.0.3")},
			Slices:   []*clusterv1.EndpointSlice{slice("a", ip), slice("b", "10.0.0.2")},
			Nodes:    []*localv1.Node{node("a", ip), node("b", "10.0.0.2")},
		}
	}
	for _, reset := range []bool{false, true} {
		address := "unix://" + filepath.Join(t.TempDir(), "s")
		l := listen(t, address)
		server := grpc.NewServer()
		clusterv1.RegisterClusterServer(server, scriptedCluster{answers: []*clusterv1.WatchResponse{answer(true, "10.0.0.1", "one"), answer(reset, "x", "two")}})
		go server.Serve(l)
		t.Cleanup(server.Stop)
		want, copied := cluster.New(cluster.Options{}), cluster.New(cluster.Options{})
		want.Update(func(tx *cluster.Tx) {
			for i, name := range []string{"a", "b", "one", "two"} {
				if name == "one" && reset {
					continue
				}
				ip := netip.AddrFrom4([4]byte{10, 0, 0, byte(min(i+1, 3))})
				tx.SetService(&api.Service{Namespace: "ns", Name: name, IPs: api.ServiceIPs{ClusterIPs: api.NewIPSet(ip)}})
				if i < 2 {
					tx.SetSlice(&api.EndpointSlice{Namespace: "ns", Name: name, ServiceName: "s", Endpoints: []api.SliceEndpoint{
						{Addr: ip, Conditions: api.Conditions{Ready: true, Serving: true}},
					}})
					tx.SetNode(&api.Node{Name: name, Addresses: []api.NodeAddress{{IP: ip}}})
				}
			}
		})
		mirror(t, copied, address)
		wait(t, want, copied)
	}
}

// TestRelayOfStaleStateIsStale follows a server. The state of this server becomes stale.
func TestRelayOfStaleStateIsStale(t *testing.T) {
	original, copied := cluster.New(cluster.Options{Resumable: true}), cluster.New(cluster.Options{Resumable: true})
	original.SetSynced()
	address := "unix://" + filepath.Join(t.TempDir(), "s")
	serveCluster(t, original, address)
	mirror(t, copied, address)
	for i, stale := range []bool{true, false, true} {
		original.Update(func(tx *cluster.Tx) {
			tx.SetStale(stale)
			tx.SetService(&api.Service{Namespace: "ns", Name: fmt.Sprint("s", i)})
		})
		wait(t, original, copied)
		if got := copied.Snapshot().Stale; got != stale {
			t.Errorf("stale %t, want %t", got, stale)
		}
	}
}

func TestOutageIsTheSourceError(t *testing.T) {
	original, copied := cluster.New(cluster.Options{Resumable: true}), cluster.New(cluster.Options{})
	original.SetSynced()
	awaitError := func() {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); copied.SourceError() == nil; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("no source error without a server")
			}
		}
	}
	address := "unix://" + filepath.Join(t.TempDir(), "s")
	mirror(t, copied, address)
	awaitError()
	stop := serveCluster(t, original, address)
	wait(t, original, copied)
	if err := copied.SourceError(); err != nil {
		t.Errorf("source error %v after an answer", err)
	}
	stop()
	awaitError()
}

// difference describes the differences between two states.
func difference(original, copied *cluster.Objects) string {
	return compare(original.Services, copied.Services, (*api.Service).Equal) +
		compare(original.Slices, copied.Slices, (*api.EndpointSlice).Equal) +
		compare(original.Nodes, copied.Nodes, (*api.Node).Equal)
}

func compare[K comparable, V any](want, got *diffstore.Snapshot[K, V], equal func(a, b V) bool) string {
	text := ""
	for key, w := range want.All() {
		if g, ok := got.Get(key); !ok || !equal(w, g) {
			text += fmt.Sprintf("%v differs\n", key)
		}
	}
	for key := range got.All() {
		if _, ok := want.Get(key); !ok {
			text += fmt.Sprintf("%v should not exist\n", key)
		}
	}
	return text
}

// wait waits until both states are equal.
func wait(t *testing.T, original, copied *cluster.State) {
	t.Helper()
	for {
		snapshot := copied.Objects()
		d := "the copy has not synced"
		if copied.IsSynced() {
			if d = difference(original.Objects(), snapshot); d == "" {
				return
			}
		}
		select {
		case <-copied.Changed(snapshot.Revision):
		case <-time.After(time.Minute): // no change of the copy for a minute
			t.Fatal(d)
		}
	}
}

func TestStateIsCopied(t *testing.T) {
	world := apitest.NewWorld(rand.New(rand.NewPCG(1, 0)), 10, 500)
	original, copied := cluster.New(cluster.Options{Resumable: true}), cluster.New(cluster.Options{Resumable: true})
	update(original, world.WriteAll)
	address := "unix://" + filepath.Join(t.TempDir(), "s")
	stop := serveCluster(t, original, address)
	unmirror := mirror(t, copied, address)
	if copied.IsSynced() {
		t.Error("the copy synced before the original")
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
			stop = serveCluster(t, original, address)
		case 4:
			unmirror()
			update(original, world.Change)
			unmirror = mirror(t, copied, address)
		}
		wait(t, original, copied)
	}
}

// TestRelistChangesOnlyDifferences moves a client to a server with almost the same state.
func TestRelistChangesOnlyDifferences(t *testing.T) {
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
	stop := serveCluster(t, states[0], address)
	mirror(t, copied, address)
	wait(t, states[0], copied)
	before := copied.Snapshot()
	stop()
	serveCluster(t, states[1], address)
	wait(t, states[1], copied)
	var changed []string
	changes, _ := (*revstore.Snapshot[types.NamespacedName, *api.ServiceState])(copied.Snapshot().States).Since(before.Revision)
	for key := range changes {
		changed = append(changed, key.Name)
	}
	if diff := cmp.Diff([]string{"s0", "s100"}, changed); diff != "" {
		t.Error(diff)
	}
}

// If an object is too large for a message, followers still receive the other objects.
func TestTooLargeObjectIsLeftOut(t *testing.T) {
	state := cluster.New(cluster.Options{Resumable: true})
	service := func(name, text string) *api.Service {
		return &api.Service{Namespace: "ns", Name: name, Annotations: map[string]string{"text": text}}
	}
	state.Update(func(tx *cluster.Tx) {
		tx.SetService(service("a", strings.Repeat("x", 20<<20)))
		tx.SetService(service("b", ""))
	})
	state.SetSynced()
	address := "unix://" + filepath.Join(t.TempDir(), "s")
	serveCluster(t, state, address)
	copied := cluster.New(cluster.Options{})
	mirror(t, copied, address)
	select {
	case <-copied.Changed(0):
	case <-time.After(time.Minute):
		t.Fatal("no answer")
	}
	var names []string
	for key := range copied.Snapshot().States.All() {
		names = append(names, key.Name)
	}
	if !slices.Equal(names, []string{"b"}) {
		t.Errorf("the copy has the services %q, want b", names)
	}
}
