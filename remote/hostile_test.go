// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"context"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api/apitest"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/remote"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
)

// besieged is a server that has a good client beside what a test does to it.
type besieged struct {
	*world
	server  *remote.Server
	address string // host:port
	screen  *screen
	heap    uint64
}

func besiege(t *testing.T, opts remote.ServerOptions) *besieged {
	t.Helper()
	b := &besieged{world: newWorld(6, 5, 400), screen: newScreen()}
	l := listen(t, "127.0.0.1:0")
	good := listen(t, socket(t))
	server, err := remote.NewServer(b.state, opts)
	if err != nil {
		t.Fatal(err)
	}
	start(t, func(ctx context.Context) error { return server.Serve(ctx, l, good) })
	b.server, b.address = server, l.Addr().String()
	client, _ := follow(t, "node-1", "unix://"+good.Addr().String())
	drive(t, client, b.screen.sink())
	b.undisturbed(t)
	b.heap = heap()
	return b
}

// undisturbed expects the good client to follow changes.
func (b *besieged) undisturbed(t *testing.T) {
	t.Helper()
	for range 5 {
		b.mark()
		if _, err := b.screen.at(within(t), b.step); err != nil {
			t.Fatal(err)
		}
	}
}

// contained expects that what was done took no memory to speak of.
func (b *besieged) contained(t *testing.T, allowed uint64) {
	t.Helper()
	if now := heap(); now > b.heap+allowed {
		t.Errorf("the heap grew from %d KB to %d KB", b.heap>>10, now>>10)
	}
	b.undisturbed(t)
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

func TestGarbage(t *testing.T) {
	b := besiege(t, quick)
	r := rand.New(rand.NewPCG(1, 1))
	const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	for i := range 50 {
		conn, err := net.Dial("tcp", b.address)
		if err != nil {
			t.Fatal(err)
		}
		if i%2 == 0 {
			io.WriteString(conn, preface)
		}
		garbage := make([]byte, 1+r.IntN(50_000))
		for i := range garbage {
			garbage[i] = byte(r.Uint32())
		}
		conn.Write(garbage)
		conn.(*net.TCPConn).CloseWrite()
		io.Copy(io.Discard, conn) // until the server closes it
		conn.Close()
	}
	b.contained(t, 4<<20)
}

func TestAMessageOf100MB(t *testing.T) {
	b := besiege(t, quick)
	huge := strings.Repeat("x", 100<<20)
	before := heap()
	for range 3 {
		c := newTableClient(t, within(t), "tcp://"+b.address, huge)
		request := protowire.AppendString(protowire.AppendTag(nil, watchReqNodeName, protowire.BytesType), huge)
		c.stream.SendMsg(&request)
		var answer []byte
		if err := c.stream.RecvMsg(&answer); status.Code(err) != codes.ResourceExhausted {
			t.Errorf("error %v, want ResourceExhausted", err)
		}
	}
	if now := heap(); now > before+110<<20 { // one request is the test's own
		t.Errorf("the heap grew from %d MB to %d MB", before>>20, now>>20)
	}
	b.undisturbed(t)
}

func TestAMillionRequests(t *testing.T) {
	b := besiege(t, quick)
	ctx, cancel := context.WithCancel(within(t))
	defer cancel()
	c := newTableClient(t, ctx, "tcp://"+b.address, "node-1")
	c.next()
	sent := make(chan int, 1)
	go func() {
		request := protowire.AppendString(protowire.AppendTag(nil, watchReqNodeName, protowire.BytesType), "node-1")
		for i := range 1_000_000 {
			if c.stream.SendMsg(&request) != nil {
				sent <- i
				return
			}
		}
		sent <- 1_000_000
	}()
	for range 20 {
		b.undisturbed(t)
	}
	b.contained(t, 8<<20)
	cancel()
	if n := <-sent; n == 1_000_000 {
		t.Error("the server took a million requests")
	}
}

func TestAClientThatNeverReads(t *testing.T) {
	opts := quick
	opts.Limits.SendTimeout = 50 * time.Millisecond
	b := besiege(t, opts)
	ctx := within(t)
	c := newTableClient(t, ctx, "tcp://"+b.address, "node-1")
	request := protowire.AppendString(protowire.AppendTag(nil, watchReqNodeName, protowire.BytesType), "node-1")
	if err := c.stream.SendMsg(&request); err != nil {
		t.Fatal(err)
	}
	for state := connectivity.Ready; state == connectivity.Ready; state = c.conn.GetState() {
		if !c.conn.WaitForStateChange(ctx, state) {
			t.Fatal("the connection stays")
		}
	}
	b.contained(t, 4<<20)
	for b.server.Stats().Stalled == 0 {
		if ctx.Err() != nil {
			t.Fatal("no stalled connection was counted")
		}
		runtime.Gosched()
	}
}

func TestStreamsAreLimited(t *testing.T) {
	opts := remote.ServerOptions{BatchInterval: -1, Limits: remote.Limits{StreamsPerPeer: 3, StreamRate: 1e-9}}
	state := cluster.New(cluster.Options{})
	state.SetSynced()
	l := listen(t, "127.0.0.1:0")
	server, _ := serveOn(t, state, l, opts)
	address := "tcp://" + l.Addr().String()
	refused := func() error {
		c := newTableClient(t, within(t), address, "n")
		request := []byte{}
		// A stream that is refused already says EOF here, and why below.
		if err := c.stream.SendMsg(&request); err != nil && err != io.EOF {
			t.Fatal(err)
		}
		var answer []byte
		return c.stream.RecvMsg(&answer)
	}
	ctx, cancel := context.WithCancel(within(t))
	defer cancel()
	for range 3 {
		newTableClient(t, ctx, address, "n").next()
	}
	expect(t, refused(), "3 streams")
	cancel()
	for server.Stats().Streams > 0 {
		runtime.Gosched()
	}
	expect(t, refused(), "too fast")
	if n := server.Stats().Refused; n != 2 {
		t.Errorf("%d refused, want 2", n)
	}
}

func TestConnectionsAreLimited(t *testing.T) {
	opts := quick
	opts.Limits.ConnectionsPerPeer = 2
	b := besiege(t, opts)
	for range 2 {
		newTableClient(t, within(t), "tcp://"+b.address, "node-1").next()
	}
	c, err := net.Dial("tcp", b.address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if n, err := c.Read(make([]byte, 1)); err == nil {
		t.Errorf("read %d bytes", n)
	}
	b.undisturbed(t)
}

func TestAStreamIsForOneNode(t *testing.T) {
	w := newWorld(7, 3, 3)
	l := listen(t, "127.0.0.1:0")
	serveOn(t, w.state, l, quick)
	c := newTableClient(t, within(t), "tcp://"+l.Addr().String(), apitest.NodeName(1))
	c.next()
	request := protowire.AppendString(protowire.AppendTag(nil, watchReqNodeName, protowire.BytesType), "another")
	if err := c.stream.SendMsg(&request); err != nil {
		t.Fatal(err)
	}
	w.change(5)
	for {
		var answer []byte
		if err := c.stream.RecvMsg(&answer); err != nil {
			expect(t, err, "InvalidArgument")
			return
		}
	}
}
