// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"bytes"
	"cmp"
	"compress/flate"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"github.com/kpng-project/kpng/remote"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"
)

// packClient implements the first answer as docs/reference/wire.md describes it, for all kinds of
// clients.
type packClient struct {
	node           string
	all, frontends bool

	// The received values, by set and path.
	values  map[localv1.Set]map[string]string
	buckets int
	reset   bool // the last answer had a Reset
	// The number of answers without Reset.
	continued int
}

// openStream begins a stream to a server. Tests use it for requests that kpng's client
// does not send.
func openStream(t *testing.T, address string) (stream localv1.Sets_WatchClient, end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(within(t))
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	if stream, err = localv1.NewSetsClient(conn).Watch(ctx); err != nil {
		t.Fatal(err)
	}
	return stream, func() {
		conn.Close()
		cancel()
	}
}

// begin receives a first answer. With the argument packed, the client sends Packed and, if
// it already has an answer, digests.
func (c *packClient) begin(t *testing.T, address string, packed bool) {
	t.Helper()
	stream, end := openStream(t, address)
	defer end()
	request := &localv1.WatchReq{
		NodeName: c.node, AllEndpoints: c.all, Frontends: c.frontends, Batches: true, Packed: packed,
		Resumption: &localv1.WatchReq_Resume{},
	}
	if packed && c.values != nil {
		request.Have = c.digests(t)
	}
	if err := stream.Send(request); err != nil {
		t.Fatal(err)
	}
	c.reset = false
	for {
		item, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		for _, op := range item.GetBatch() {
			if op.GetSync() != nil {
				if !c.reset {
					c.continued++
				}
				return
			}
			c.apply(t, op)
		}
	}
}

func (c *packClient) apply(t *testing.T, item *localv1.OpItem) {
	switch op := item.GetOp().(type) {
	case *localv1.OpItem_Reset_:
		c.reset = true
		c.values = map[localv1.Set]map[string]string{
			localv1.Set_ServicesSet: {}, localv1.Set_EndpointsSet: {}, localv1.Set_FrontendsSet: {},
		}
	case *localv1.OpItem_Packed:
		b, err := io.ReadAll(flate.NewReader(bytes.NewReader(op.Packed)))
		if err != nil {
			t.Fatal(err)
		}
		var packed localv1.OpItem
		unmarshal(t, b, &packed)
		for _, item := range packed.GetBatch() {
			c.apply(t, item)
		}
	case *localv1.OpItem_Discard:
		for _, set := range []localv1.Set{localv1.Set_ServicesSet, localv1.Set_FrontendsSet} {
			for path := range c.values[set] {
				if slices.Contains(op.Discard.GetNumbers(), uint32(c.bucket(path))) {
					c.delete(set, path)
				}
			}
		}
	case *localv1.OpItem_Replace:
		s := op.Replace.GetService()
		path := s.GetNamespace() + "/" + s.GetName()
		c.delete(localv1.Set_ServicesSet, path)
		c.values[localv1.Set_ServicesSet][path] = string(localv1.Marshal(s))
		for _, e := range op.Replace.GetEndpoints() {
			c.values[localv1.Set_EndpointsSet][path+"/"+e.GetKey()] = string(localv1.Marshal(e.GetEndpoint()))
		}
	case *localv1.OpItem_Set:
		c.values[op.Set.GetRef().GetSet()][op.Set.GetRef().GetPath()] = string(op.Set.GetBytes())
	case *localv1.OpItem_Delete:
		c.delete(op.Delete.GetSet(), op.Delete.GetPath())
	}
}

// delete deletes a value and, with a service, its endpoints.
func (c *packClient) delete(set localv1.Set, path string) {
	if _, ok := c.values[set][path]; !ok {
		return
	}
	delete(c.values[set], path)
	if set == localv1.Set_ServicesSet {
		maps.DeleteFunc(c.values[localv1.Set_EndpointsSet], func(e, _ string) bool { return strings.HasPrefix(e, path+"/") })
	}
}

func order(path string) uint32 {
	sum := sha256.Sum256([]byte(path))
	return binary.BigEndian.Uint32(sum[:])
}

func (c *packClient) bucket(path string) int {
	return int(uint64(order(path)) * uint64(c.buckets) >> 32)
}

func (c *packClient) digests(t *testing.T) *localv1.Digests {
	contents := map[string][sha256.Size]byte{}
	for path, value := range c.values[localv1.Set_FrontendsSet] {
		contents[path] = sha256.Sum256([]byte(value))
	}
	endpoints := map[string][]*localv1.KeyedEndpoint{}
	for _, path := range slices.Sorted(maps.Keys(c.values[localv1.Set_EndpointsSet])) {
		e := &localv1.KeyedEndpoint{Key: path[strings.LastIndex(path, "/")+1:], Endpoint: &localv1.Endpoint{}}
		unmarshal(t, []byte(c.values[localv1.Set_EndpointsSet][path]), e.Endpoint)
		service := path[:strings.LastIndex(path, "/")]
		endpoints[service] = append(endpoints[service], e)
	}
	for path, value := range c.values[localv1.Set_ServicesSet] {
		whole := &localv1.WholeService{Service: &localv1.Service{}, Endpoints: endpoints[path]}
		unmarshal(t, []byte(value), whole.Service)
		contents[path] = sha256.Sum256(localv1.Marshal(whole))
	}
	c.buckets = 64
	d := &localv1.Digests{Salt: []byte("0123456789abcdef")}
	paths := slices.SortedFunc(maps.Keys(contents), func(a, b string) int { return cmp.Compare(order(a), order(b)) })
	for b := range c.buckets {
		h := sha256.New()
		h.Write(d.Salt)
		for _, path := range paths {
			if c.bucket(path) == b {
				sum := contents[path]
				h.Write(sum[:])
			}
		}
		d.Buckets = append(d.Buckets, h.Sum(nil)[:8]...)
	}
	return d
}

// fewHints removes all hints, except for some services.
type fewHints struct{ apitest.Writer }

func (w fewHints) SetSlice(s *api.EndpointSlice) {
	for i := range s.Endpoints {
		if !strings.Contains(s.ServiceName, "7") || len(s.ServiceName) > len("svc-77") {
			s.Endpoints[i].Details.Hints = nil
		}
	}
	w.Writer.SetSlice(s)
}

// Clients of each kind get the same values with and without Packed. This holds for a
// changing state, and for a client that moves to another server.
func TestPackedAnswersEqualOthers(t *testing.T) {
	for name, filter := range map[string]func(apitest.Writer) apitest.Writer{
		"many hints": func(w apitest.Writer) apitest.Writer { return w },
		"few hints":  func(w apitest.Writer) apitest.Writer { return fewHints{w} },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(9, 6, 1)
			w.World = apitest.NewWorld(rand.New(rand.NewPCG(9, 0)), 6, 300)
			update(w.state, func(to apitest.Writer) { w.WriteAll(filter(to)) })
			first, second := socket(t), socket(t)
			serve(t, w.state, first, quick)
			serve(t, w.state, second, quick)
			var clients []*packClient
			for n := range 7 { // the last node does not exist
				for _, c := range []packClient{{}, {all: true}, {frontends: true}, {all: true, frontends: true}} {
					c.node = apitest.NodeName(n)
					clients = append(clients, &c)
				}
			}
			for round := range 2 {
				for _, address := range []string{first, second} {
					for _, c := range clients {
						update(w.state, func(to apitest.Writer) { w.Change(filter(to)) })
						w.mark()
						waitMark(t, address, w.step)
						c.begin(t, address, true)
						plain := packClient{node: c.node, all: c.all, frontends: c.frontends}
						plain.begin(t, address, false)
						if d := differ(t, c, &plain); d != nil {
							t.Fatalf("round %d, %s, client %s all %t frontends %t: %v", round, address, c.node, c.all, c.frontends, d[:min(len(d), 5)])
						}
					}
				}
			}
			continued := map[bool]int{}
			for _, c := range clients {
				continued[c.frontends] += c.continued
			}
			if continued[false] == 0 || continued[true] == 0 {
				t.Errorf("no client used digests: %v", continued)
			}
		})
	}
}

// A client that waits for its turn gets messages from the server, so that it does not
// leave.
func TestWaitingClientGetsEmptyMessages(t *testing.T) {
	w := newWorld(5, 2, 10)
	address := socket(t)
	server, _ := serve(t, w.state, address, quick)
	release := server.HoldTurns()
	client, _ := follow(t, "n", address)
	stream, end := openStream(t, address)
	defer end()
	if err := stream.Send(&localv1.WatchReq{NodeName: "n", Batches: true, Packed: true, Resumption: &localv1.WatchReq_Resume{}}); err != nil {
		t.Fatal(err)
	}
	item, err := stream.Recv()
	if err != nil || proto.Size(item) != 0 {
		t.Errorf("the first message is %v, error %v", item, err)
	}
	release()
	for synced := false; !synced; {
		if item, err = stream.Recv(); err != nil {
			t.Fatal(err)
		}
		synced = slices.ContainsFunc(item.GetBatch(), func(i *localv1.OpItem) bool { return i.GetSync() != nil })
	}
	for client.Views() == nil {
		if stream.Context().Err() != nil {
			t.Fatal("the client has no answer")
		}
		time.Sleep(time.Millisecond)
	}
}

// waitMark waits until the server sends the marker service with the given step.
func waitMark(t *testing.T, address string, step int) {
	t.Helper()
	c := packClient{node: "no-node", all: true}
	for ctx := within(t); ; {
		c.begin(t, address, false)
		var s localv1.Service
		unmarshal(t, []byte(c.values[localv1.Set_ServicesSet][marker(0).Key().String()]), &s)
		if s.GetAnnotations()[markerAnnotation] == fmt.Sprint(step) {
			return
		}
		if ctx.Err() != nil {
			t.Fatal("the server does not send the last change")
		}
	}
}

// differ returns the differences between the values of two clients. It ignores the
// winners of lost claims, because the winners may be from an earlier state.
func differ(t *testing.T, a, b *packClient) (lines []string) {
	withoutWinners := func(value string) string {
		var s localv1.Service
		unmarshal(t, []byte(value), &s)
		for _, l := range s.GetLost() {
			l.WinnerNamespace, l.WinnerName = "", ""
		}
		return string(localv1.Marshal(&s))
	}
	for set := range b.values {
		got, want := maps.Clone(a.values[set]), maps.Clone(b.values[set])
		if set == localv1.Set_ServicesSet {
			for _, values := range []map[string]string{got, want} {
				for path, value := range values {
					values[path] = withoutWinners(value)
				}
			}
		}
		lines = append(lines, diffMaps(got, want)...)
	}
	return lines
}

// Tenants choose names. If most services are in one bucket and one of them changes, clients
// of another server get the whole state. This answer is shared and compressed.
func TestOneBucketWithMostServices(t *testing.T) {
	state := cluster.New(cluster.Options{Resumable: true})
	set := func(name string, port int32) {
		update(state, func(to apitest.Writer) { to.SetService(plain(name, port)) })
	}
	var names []string
	for i := 0; len(names) < 150; i++ {
		if name := fmt.Sprint("s", i); len(names) >= 100 || order("plain/"+name)>>26 == 5 { // of 64 buckets
			names = append(names, name)
			set(name, 1)
		}
	}
	state.SetSynced()
	address, another := socket(t), socket(t)
	serve(t, state, address, quick)
	c := packClient{node: "n", all: true}
	c.begin(t, address, true)
	for _, test := range []struct {
		name  string
		reset bool
	}{{names[len(names)-1], false}, {names[0], true}} {
		set(test.name, 2)
		var stop func()
		_, stop = serve(t, state, another, remote.Batching(-1, remote.ServerOptions{}))
		c.begin(t, another, true)
		if c.reset != test.reset || len(c.values[localv1.Set_ServicesSet]) != len(names) {
			t.Errorf("after a change of %s: reset %t, %d services", test.name, c.reset, len(c.values[localv1.Set_ServicesSet]))
		}
		stop()
	}
}
