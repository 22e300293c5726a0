// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/transport"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"github.com/kpng-project/kpng/remote"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
)

// besieged is a server that a test attacks while a good client uses it.
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
	client, err := remote.NewClient(remote.ClientOptions{NodeName: "node-1", DialOptions: remote.DialOptions{
		Addresses: []string{"unix://" + good.Addr().String()}, TLS: opts.TLS,
	}})
	if err != nil {
		t.Fatal(err)
	}
	start(t, client.Run)
	drive(t, client.Source(), b.screen.sink())
	b.checkGoodClient(t)
	b.heap = heap()
	return b
}

// checkGoodClient checks that the good client still receives changes.
func (b *besieged) checkGoodClient(t *testing.T) {
	t.Helper()
	for range 5 {
		b.mark()
		b.screen.waitOutput(t, b.step)
	}
}

// checkMemory checks that the heap grew by at most the given number of bytes.
func (b *besieged) checkMemory(t *testing.T, allowed uint64) {
	t.Helper()
	if now := heap(); now > b.heap+allowed {
		t.Errorf("the heap grew from %d KB to %d KB", b.heap>>10, now>>10)
	}
	b.checkGoodClient(t)
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// The test sends invalid HTTP/2, and valid HTTP/2 that no real client sends.
func TestGarbage(t *testing.T) {
	b := besiege(t, quick)
	r := rand.New(rand.NewPCG(1, 1))
	garbage := func(n int) []byte {
		bytes := make([]byte, n)
		for i := range bytes {
			bytes[i] = byte(r.Uint32())
		}
		return bytes
	}
	headers := http2Frame(http2Headers, endHeaders, 1, watchHeaders)
	for _, test := range []struct {
		name string
		send func() []byte
	}{
		{"bytes that are not HTTP/2", func() []byte { return garbage(1 + r.IntN(50_000)) }},
		{"bytes that are not frames", func() []byte { return slices.Concat(http2Hello, garbage(1+r.IntN(50_000))) }},
		{"frames of any type with random content", func() []byte {
			frames := http2Hello
			for range 20 {
				frames = slices.Concat(frames, http2Frame(byte(r.IntN(12)), byte(r.Uint32()), uint32(r.IntN(4)), garbage(r.IntN(500))))
			}
			return frames
		}},
		{"headers that cannot be decoded", func() []byte {
			return slices.Concat(http2Hello, http2Frame(http2Headers, endHeaders, 1, garbage(1000)))
		}},
		{"headers without an end", func() []byte {
			frames := slices.Concat(http2Hello, http2Frame(http2Headers, 0, 1, watchHeaders))
			for range 500 {
				frames = append(frames, http2Frame(http2Continuation, 0, 1, hpackField("x", strings.Repeat("x", 1000)))...)
			}
			return frames
		}},
		{"a stream's frames without a stream", func() []byte { return slices.Concat(http2Hello, http2Frame(http2Data, 0, 77, garbage(1000))) }},
		{"a message that is not a WatchReq", func() []byte {
			return slices.Concat(http2Hello, headers, http2Frame(http2Data, 0, 1, slices.Concat([]byte{0, 0, 0, 3, 232}, garbage(1000))))
		}},
		{"the beginning of a message of 4 GB", func() []byte {
			return slices.Concat(http2Hello, headers, http2Frame(http2Data, 0, 1, []byte{0, 255, 255, 255, 255, 1, 2, 3}))
		}},
		{"pings and settings without an end", func() []byte {
			both := slices.Concat(http2Frame(http2Ping, 0, 0, make([]byte, 8)), http2Frame(http2Settings, 0, 0, nil))
			return slices.Concat(http2Hello, bytes.Repeat(both, 5000))
		}},
		{"streams that are reset immediately", func() []byte {
			frames := http2Hello
			for id := uint32(1); id < 2000; id += 2 {
				frames = append(frames, http2Frame(http2Headers, endHeaders, id, watchHeaders)...)
				frames = append(frames, http2Frame(http2Reset, 0, id, []byte{0, 0, 0, 8})...)
			}
			return frames
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			for range 10 {
				conn, err := net.Dial("tcp", b.address)
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				conn.SetDeadline(time.Now().Add(time.Minute))
				conn.Write(test.send()) // may fail, because the server need not read everything
				conn.(*net.TCPConn).CloseWrite()
				if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
					t.Fatal("the connection is still open")
				}
			}
			b.checkMemory(t, 4<<20)
			for ctx := within(t); b.server.Stats().Streams > 1; runtime.Gosched() {
				if ctx.Err() != nil {
					t.Fatalf("%d streams, want only the good client's", b.server.Stats().Streams)
				}
			}
		})
	}
}

// Constants of HTTP/2 (RFC 9113).
const (
	http2Data, http2Headers, http2Reset, http2Settings, http2Ping, http2Continuation = 0, 1, 3, 4, 6, 9

	endHeaders = 4
)

var (
	// A client sends http2Hello at the beginning of an HTTP/2 connection.
	http2Hello = append([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), http2Frame(http2Settings, 0, 0, nil)...)
	// A call of Watch begins with the header fields in watchHeaders.
	watchHeaders = slices.Concat(
		hpackField(":method", "POST"), hpackField(":scheme", "http"), hpackField(":path", localv1.Sets_Watch_FullMethodName),
		hpackField(":authority", "localhost"), hpackField("content-type", "application/grpc"), hpackField("te", "trailers"))
)

func http2Frame(kind, flags byte, stream uint32, payload []byte) []byte {
	n := len(payload)
	return append(binary.BigEndian.AppendUint32([]byte{byte(n >> 16), byte(n >> 8), byte(n), kind, flags}, stream), payload...)
}

// hpackField encodes a header field as a literal without indexing (RFC 7541, 6.2.2).
func hpackField(name, value string) []byte {
	b := []byte{0}
	for _, s := range []string{name, value} {
		if len(s) < 127 {
			b = append(b, byte(len(s)))
		} else {
			b = binary.AppendUvarint(append(b, 127), uint64(len(s)-127))
		}
		b = append(b, s...)
	}
	return b
}

// hugeCodec replaces every message by the bytes in piece, repeated many times.
type hugeCodec struct {
	bytesCodec
	piece []byte
	times int
}

// Marshal implements encoding.CodecV2.
func (c hugeCodec) Marshal(any) (mem.BufferSlice, error) {
	return slices.Repeat(mem.BufferSlice{mem.SliceBuffer(c.piece)}, c.times), nil
}

// The test counts all allocated bytes, even if they are already freed.
func TestAMessageOf100MB(t *testing.T) {
	b := besiege(t, quick)
	c := newTableClient(t, t.Context(), "tcp://"+b.address, "node-1")
	huge := hugeCodec{piece: make([]byte, 1<<20), times: 100}
	before := allocated()
	for range 3 {
		stream, err := c.conn.NewStream(within(t), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, localv1.Sets_Watch_FullMethodName, grpc.ForceCodecV2(huge))
		if err != nil {
			t.Fatal(err)
		}
		stream.SendMsg(struct{}{})
		var answer []byte
		if err := stream.RecvMsg(&answer); status.Code(err) != codes.ResourceExhausted {
			t.Errorf("error %v, want ResourceExhausted", err)
		}
	}
	if n := allocated() - before; n > 20<<20 {
		t.Errorf("client and server allocated %d MB", n>>20)
	}
	b.checkMemory(t, 4<<20)
}

func allocated() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.TotalAlloc
}

// The test sends requests on one stream until the server stops reading them.
func TestAMillionRequests(t *testing.T) {
	const million = 1_000_000
	b := besiege(t, quick)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c := newTableClient(t, ctx, "tcp://"+b.address, "node-1")
	c.next()
	var sent atomic.Int64
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		request := protowire.AppendString(protowire.AppendTag(nil, watchReqNodeName, protowire.BytesType), "node-1")
		for sent.Load() < million && c.stream.SendMsg(&request) == nil {
			sent.Add(1)
		}
	}()
	for last, stuck := int64(-1), 0; stuck < 20; {
		b.checkGoodClient(t)
		if now := sent.Load(); now == last && now > 0 {
			stuck++
		} else {
			last, stuck = now, 0
		}
		select {
		case <-ended:
			t.Fatalf("the server read %d requests", sent.Load())
		default:
		}
	}
	b.checkMemory(t, 4<<20)
	cancel()
	<-ended
}

func TestClientThatNeverReads(t *testing.T) {
	opts := quick
	opts.SendTimeout = 50 * time.Millisecond
	b := besiege(t, opts)
	ctx := within(t)
	c := newTableClient(t, ctx, "tcp://"+b.address, "node-1")
	request := protowire.AppendString(protowire.AppendTag(nil, watchReqNodeName, protowire.BytesType), "node-1")
	if err := c.stream.SendMsg(&request); err != nil {
		t.Fatal(err)
	}
	for state := connectivity.Ready; state == connectivity.Ready; state = c.conn.GetState() {
		if !c.conn.WaitForStateChange(ctx, state) {
			t.Fatal("the connection is still open")
		}
	}
	b.checkMemory(t, 4<<20)
	for b.server.Stats().Stalled == 0 {
		if ctx.Err() != nil {
			t.Fatal("no stalled connection was counted")
		}
		runtime.Gosched()
	}
}

func TestFailedHandshakes(t *testing.T) {
	ca, foreign := newAuthority(t), newAuthority(t)
	opts := quick
	opts.TLS = ca.newFiles(t, "server")
	b := besiege(t, opts)
	config := func(files *remote.TLS) *tls.Config {
		c := &tls.Config{RootCAs: ca.pool(), ServerName: "kpng.test", NextProtos: []string{"h2"}}
		if files != nil {
			cert, err := tls.LoadX509KeyPair(files.CertFile, files.KeyFile)
			if err != nil {
				t.Fatal(err)
			}
			// Send the certificate even if the server does not accept the certificate's
			// authority. By default, crypto/tls would send no certificate.
			c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil }
		}
		return c
	}
	old := config(ca.newFiles(t, "n"))
	old.MaxVersion = tls.VersionTLS12
	expired := tlsFiles(t.TempDir())
	ca.issueUntil(t, expired, time.Now().Add(-time.Minute), "n")
	for _, test := range []struct {
		name   string
		config *tls.Config
		want   string
	}{
		{"with a certificate", config(ca.newFiles(t, "n")), ""},
		{"without a certificate", config(nil), "certificate required"},
		{"with a certificate of another authority", config(foreign.newFiles(t, "n")), "unknown certificate authority"},
		{"with an expired certificate", config(expired), "expired certificate"},
		{"with an older TLS version", old, "protocol version"},
	} {
		t.Run(test.name, func(t *testing.T) {
			for range 20 {
				expect(t, handshake(t, b.address, test.config), test.want)
			}
			b.checkMemory(t, 4<<20)
		})
	}
}

// handshake returns nil if the server accepts a connection and begins to send HTTP/2.
// With TLS 1.3, a client must read data to learn whether the server rejected it.
func handshake(t *testing.T, address string, config *tls.Config) error {
	raw, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	raw.SetDeadline(time.Now().Add(time.Minute))
	conn := tls.Client(raw, config)
	if _, err := conn.Write(http2Hello); err != nil {
		return err
	}
	_, err = conn.Read(make([]byte, 1))
	return err
}

func TestStreamsAreLimited(t *testing.T) {
	opts := remote.Batching(-1, remote.ServerOptions{MaxStreamsPerPeer: 3, StreamRate: 1e-9})
	state := cluster.New(cluster.Options{Resumable: true})
	state.SetSynced()
	l := listen(t, "127.0.0.1:0")
	server, _ := serveOn(t, state, l, opts)
	address := "tcp://" + l.Addr().String()
	refused := func() error {
		c := newTableClient(t, t.Context(), address, "n")
		request := []byte{}
		// EOF means that the server has already refused the stream; recv returns the reason.
		if err := c.stream.SendMsg(&request); err != nil && err != io.EOF {
			t.Fatal(err)
		}
		_, err := c.recv()
		return err
	}
	ctx, cancel := context.WithCancel(t.Context())
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
	opts.MaxConnectionsPerPeer = 2
	b := besiege(t, opts)
	for range 2 {
		newTableClient(t, t.Context(), "tcp://"+b.address, "node-1").next()
	}
	c, err := net.Dial("tcp", b.address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if n, err := c.Read(make([]byte, 1)); err == nil {
		t.Errorf("read %d bytes", n)
	}
	b.checkGoodClient(t)
}

func TestStreamIsForOneNode(t *testing.T) {
	w := newWorld(7, 3, 3)
	l := listen(t, "127.0.0.1:0")
	serveOn(t, w.state, l, quick)
	c := newTableClient(t, t.Context(), "tcp://"+l.Addr().String(), apitest.NodeName(1))
	c.next()
	request := protowire.AppendString(protowire.AppendTag(nil, watchReqNodeName, protowire.BytesType), "another")
	if err := c.stream.SendMsg(&request); err != nil {
		t.Fatal(err)
	}
	w.change(5)
	for {
		if _, err := c.recv(); err != nil {
			expect(t, err, "InvalidArgument")
			return
		}
	}
}

// A frame with one byte of data occupies much more memory until the server has read the
// frame. The default limit for a peer's streams must bound this memory.
func TestUnreadDataIsBounded(t *testing.T) {
	const streams, most = 8, 200 << 20
	b := besiege(t, quick)
	conn, err := net.Dial("tcp", b.address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	write := func(frames ...[]byte) {
		if _, err := conn.Write(slices.Concat(frames...)); err != nil {
			t.Fatal(err)
		}
	}
	write(http2Hello, http2Frame(http2Settings, 1, 0, nil)) // the flag 1 acknowledges the server's settings
	pongs := make(chan struct{}, 1)
	go readPongs(conn, pongs)
	// The pong shows that the server has processed everything before the ping. The test may
	// call ping twice; the server does not accept a third ping.
	ping := func() {
		t.Helper()
		write(http2Frame(http2Ping, 0, 0, make([]byte, 8)))
		select {
		case <-pongs:
		case <-time.After(patience):
			t.Fatal("no answer to a ping")
		}
	}
	empty := []byte{0, 0, 0, 0, 0}
	for i := range uint32(streams) {
		write(http2Frame(http2Headers, endHeaders, 2*i+1, watchHeaders), http2Frame(http2Data, 0, 2*i+1, empty), http2Frame(http2Data, 0, 2*i+1, empty))
	}
	ping()
	before := heap()
	for i := range uint32(streams) {
		write(slices.Repeat(http2Frame(http2Data, 0, 2*i+1, []byte{0}), 64_000))
	}
	ping()
	taken := max(heap(), before) - before
	t.Logf("%d KB per stream", taken/streams>>10)
	if taken < streams<<20 {
		t.Errorf("%d KB for %d streams: too little for a valid test", taken>>10, streams)
	}
	if all := taken / streams * uint64(transport.DefaultMaxStreamsPerPeer); all > most {
		t.Errorf("the streams of a peer can use %d MB, want at most %d MB", all>>20, most>>20)
	}
	b.checkGoodClient(t)
}

// readPongs reads frames until the connection ends. For each pong, it sends a value to
// the channel.
func readPongs(conn net.Conn, pongs chan<- struct{}) {
	for {
		var head [9]byte
		if _, err := io.ReadFull(conn, head[:]); err != nil {
			return
		}
		size := int64(head[0])<<16 | int64(head[1])<<8 | int64(head[2])
		if _, err := io.CopyN(io.Discard, conn, size); err != nil {
			return
		}
		if head[3] == http2Ping && head[4] == 1 {
			pongs <- struct{}{}
		}
	}
}
