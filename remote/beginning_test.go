// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"bytes"
	"compress/flate"
	"slices"
	"testing"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/feed"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"github.com/kpng-project/kpng/remote"
	"github.com/kpng-project/kpng/sink/sinktest"
	"google.golang.org/grpc"
)

// Clients begin after increasingly many changes, and then move to other servers. Each
// client must have the same views as a sink in the server's process. The other servers
// must send much less than the whole state.
func TestAnotherServerContinues(t *testing.T) {
	w := newWorld(7, 12, 400)
	first, second, relayed := socket(t), socket(t), socket(t)
	serve(t, w.state, first, remote.Batching(-1, remote.ServerOptions{StreamRate: 1e6, ServeCluster: true}))
	serve(t, w.state, second, quick) // this server has another identity, like a restarted server
	copied := cluster.New(cluster.Options{Resumable: true})
	mirror(t, copied, first)
	serve(t, copied, relayed, quick)

	type node struct {
		here, there *screen
		gate        *gate
	}
	var nodes []node
	compare := func() {
		t.Helper()
		for i, n := range nodes {
			if want, got := n.here.waitOutput(t, w.step), n.there.waitOutput(t, w.step); !bytes.Equal(want, got) {
				t.Fatalf("step %d, node %d: over the wire\n%s\nin process\n%s", w.step, i, got, want)
			}
		}
	}
	for i := range 14 { // the last two nodes do not exist
		n := node{newScreen(), newScreen(), newGate(t)}
		n.gate.openTo(first)
		drive(t, feed.New(w.state, apitest.NodeName(i)), n.here.sink())
		client, _ := follow(t, apitest.NodeName(i), n.gate.address)
		drive(t, client.Source(), sinktest.NewRecorder(t, n.there.sink()))
		nodes = append(nodes, n)
		compare()
		w.change(5)
	}
	compare()
	var whole int64
	for _, n := range nodes {
		whole += n.gate.received.Load()
	}
	for _, address := range []string{second, relayed, first, relayed, second} {
		for _, n := range nodes {
			n.gate.close()
			n.gate.received.Store(0)
		}
		w.change(5)
		for _, n := range nodes {
			n.gate.openTo(address)
		}
		compare()
		var again int64
		for _, n := range nodes {
			again += n.gate.received.Load()
		}
		if again > whole/2 {
			t.Errorf("after a change of the server, %d bytes were received; the whole state and 70 changes had %d", again, whole)
		}
	}
}

// If a request has digests that the server cannot use, the server sends the whole
// state.
func TestInvalidDigestsAreIgnored(t *testing.T) {
	w := newWorld(3, 4, 50)
	address := socket(t)
	server, _ := serve(t, w.state, address, quick)
	node, _ := w.state.Snapshot().Nodes.Get(apitest.NodeName(1))
	good := server.DigestsFor(w.state.Objects(), node)
	for name, have := range map[string]*localv1.Digests{
		"none":                {},
		"no salt":             {Buckets: good.Buckets},
		"long salt":           {Salt: make([]byte, 1000), Buckets: good.Buckets},
		"odd size":            {Salt: good.Salt, Buckets: good.Buckets[1:]},
		"not a power of two":  {Salt: good.Salt, Buckets: good.Buckets[:24]},
		"too many buckets":    {Salt: good.Salt, Buckets: make([]byte, 8*2048-2048)},
		"other salt":          {Salt: bytes.Repeat([]byte{1}, len(good.Salt)), Buckets: good.Buckets},
		"one bucket, and bad": {Salt: good.Salt, Buckets: make([]byte, 8)},
	} {
		if reset := resets(t, address, node.Name, have); !reset {
			t.Errorf("%s: the answer does not begin with Reset", name)
		}
	}
	if resets(t, address, node.Name, good) {
		t.Error("good digests: the answer begins with Reset")
	}
}

// resets reports whether the first answer to a request with the digests has a Reset.
func resets(t *testing.T, address, node string, have *localv1.Digests) (reset bool) {
	t.Helper()
	stream, end := openStream(t, address)
	defer end()
	if err := stream.Send(&localv1.WatchReq{NodeName: node, AllEndpoints: true, Batches: true, Packed: true, Have: have, Resumption: &localv1.WatchReq_Resume{}}); err != nil {
		t.Fatal(err)
	}
	for {
		item, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		for _, op := range item.GetBatch() {
			if op.GetReset_() != nil {
				reset = true
			}
			if op.GetSync() != nil {
				return reset
			}
		}
	}
}

// packedServer sends one message, and then waits.
type packedServer struct {
	localv1.UnimplementedSetsServer
	items []*localv1.OpItem
}

func (s packedServer) Watch(stream grpc.BidiStreamingServer[localv1.WatchReq, localv1.OpItem]) error {
	for _, item := range s.items {
		if err := stream.Send(item); err != nil {
			return err
		}
	}
	<-stream.Context().Done()
	return nil
}

// A short message may unpack to gigabytes. The client must leave the server.
func TestClientLeavesServerWithUnusablePack(t *testing.T) {
	zeros := func(n int) []byte {
		var b bytes.Buffer
		w, _ := flate.NewWriter(&b, flate.BestCompression)
		w.Write(make([]byte, n))
		w.Close()
		return b.Bytes()
	}
	sync := &localv1.OpItem{Op: &localv1.OpItem_Sync{Sync: &localv1.EmptyOp{}}}
	packed := func(b []byte) []*localv1.OpItem {
		return []*localv1.OpItem{{Op: &localv1.OpItem_Packed{Packed: b}}, sync}
	}
	for name, items := range map[string][]*localv1.OpItem{
		"too large":     packed(zeros(64 << 20)),
		"not DEFLATE":   packed([]byte("kpng")),
		"not an OpItem": packed(zeros(10)),
	} {
		t.Run(name, func(t *testing.T) {
			l := listen(t, socket(t))
			server := grpc.NewServer()
			localv1.RegisterSetsServer(server, packedServer{items: items})
			go server.Serve(l)
			defer server.Stop()
			client, err := remote.NewClient(remote.ClientOptions{NodeName: "n", DialOptions: remote.DialOptions{Addresses: []string{"unix://" + l.Addr().String()}, FailFast: true}})
			if err != nil {
				t.Fatal(err)
			}
			if err := client.Run(within(t)); err == nil || client.Views() != nil {
				t.Errorf("error %v, views %v", err, client.Views())
			}
		})
	}
}

// A Discard without digests, or of unknown buckets, is an invalid operation. The client
// reports it and applies the other operations.
func TestInvalidDiscardIsIgnored(t *testing.T) {
	var items []*localv1.OpItem
	for _, n := range []uint32{0, 1, 1 << 31} {
		items = append(items, &localv1.OpItem{Op: &localv1.OpItem_Discard{Discard: &localv1.Buckets{Numbers: []uint32{n}}}})
	}
	items = append(items,
		&localv1.OpItem{Op: &localv1.OpItem_Replace{Replace: &localv1.WholeService{Service: localv1.FromService(plain("a", 1))}}},
		&localv1.OpItem{Op: &localv1.OpItem_Sync{Sync: &localv1.EmptyOp{}}})
	l := listen(t, socket(t))
	server := grpc.NewServer()
	localv1.RegisterSetsServer(server, packedServer{items: items})
	go server.Serve(l)
	defer server.Stop()
	client, _ := follow(t, "n", "unix://"+l.Addr().String())
	rec := sinktest.NewRecorder(t, nil)
	drive(t, client.Source(), rec)
	if err := rec.Wait(within(t), atLeast(1)); err != nil {
		t.Fatal(err)
	}
	if got := keys(rec.Syncs()[0]); !slices.Equal(got, []string{"a"}) {
		t.Errorf("services %v", got)
	}
}

// The server encodes a service, and the client decodes it. Both must compute the same
// digest. The test uses random services with all fields.
func TestDigestsSurviveTheWire(t *testing.T) {
	w := newWorld(11, 5, 300)
	address := socket(t)
	server, _ := serve(t, w.state, address, quick)
	for i := range 5 {
		node, _ := w.state.Snapshot().Nodes.Get(apitest.NodeName(i))
		client, _ := follow(t, node.Name, address)
		rec := sinktest.NewRecorder(t, nil)
		drive(t, client.Source(), rec)
		if err := rec.Wait(within(t), atLeast(1)); err != nil {
			t.Fatal(err)
		}
		want := server.DigestsFor(w.state.Objects(), node)
		if got := client.Digests(want.Salt); !bytes.Equal(got.Buckets, want.Buckets) {
			t.Errorf("node %d: the client has digests\n%x\nthe server\n%x", i, got.Buckets, want.Buckets)
		}
	}
}
