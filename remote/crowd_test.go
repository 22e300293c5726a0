// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/transport"
	"github.com/kpng-project/kpng/internal/wire/clusterv1"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// A crowd is the set of clients of a benchmark. The clients run in a separate process, so
// that the benchmark measures only the server. They connect like [remote.Client], but
// only count operations.
type crowd struct {
	Addresses []string
	TLS       *transport.TLS
	// The clients' nodes, with resume tokens. Each node has one connection with PerNode
	// streams.
	Nodes   []crowdNode
	PerNode int
	// The clients accept packed operations, and count a whole pack as one operation.
	Packed bool
	// The clients are relays: they request the state of the cluster.
	Relays bool
}

type crowdNode struct {
	Name  string
	Token []byte
	Again *localv1.Digests // the client sends them when it connects again
}

// crowdRound is the report on a round. In a round, each stream receives one answer.
type crowdRound struct {
	Synced            []int64 // times at which streams received their Sync, sorted, in Unix nanoseconds
	Bytes, Operations int
	Resets            int // answers that begin with a Reset
}

// syncTime returns the time when a part of the streams had received the Sync. The
// quantile is the size of this part, from 0 to 1.
func (r *crowdRound) syncTime(quantile float64) time.Time {
	return time.Unix(0, r.Synced[int(quantile*float64(len(r.Synced)-1))])
}

// start starts the crowd. Each call of next waits until each stream has received one more
// answer.
func (c *crowd) start(b *testing.B) (next func() *crowdRound) {
	b.Helper()
	cmd := exec.CommandContext(b.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), crowdEnv+"=1")
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		stdin.Close() // the crowd's process exits when its standard input ends
		cmd.Wait()
	})
	if err := json.NewEncoder(stdin).Encode(c); err != nil {
		b.Fatal(err)
	}
	rounds := json.NewDecoder(bufio.NewReader(stdout))
	return func() *crowdRound {
		b.Helper()
		var r crowdRound
		if err := rounds.Decode(&r); err != nil {
			b.Fatalf("read reports of the clients: %v", err)
		}
		return &r
	}
}

// If this environment variable is set, the test binary runs a crowd instead of the tests.
const crowdEnv = "KPNG_TEST_CROWD"

// runCrowd reads a crowd from standard input and runs it until that input ends.
func runCrowd() {
	var c crowd
	in := json.NewDecoder(os.Stdin)
	if err := in.Decode(&c); err != nil {
		fmt.Fprintln(os.Stderr, "read command:", err)
		os.Exit(1)
	}
	rounds := &crowdRounds{streams: len(c.Nodes) * c.PerNode, out: json.NewEncoder(os.Stdout)}
	for _, n := range c.Nodes {
		go c.runNode(n, rounds)
	}
	io.Copy(io.Discard, in.Buffered())
	io.Copy(io.Discard, os.Stdin)
}

func (c *crowd) runNode(n crowdNode, rounds *crowdRounds) {
	dialer, err := transport.NewDialer(transport.DialOptions{Addresses: c.Addresses, TLS: c.TLS})
	if err == nil {
		var have *localv1.Digests
		err = dialer.Stay(context.Background(), func(ctx context.Context, conn *grpc.ClientConn, heard func(bool, bool) error) error {
			if err := heard(true, false); err != nil { // without this call, Stay would disconnect from a slow server
				return err
			}
			failed := make(chan error)
			for range c.PerNode {
				go func(have *localv1.Digests) { failed <- c.watch(ctx, conn, n, have, rounds) }(have)
			}
			have = n.Again
			return <-failed
		})
	}
	fmt.Fprintf(os.Stderr, "node %s: %v\n", n.Name, err)
}

// watch sends a request with the token and the digests. After each answer, it sends a
// request without a token.
func (c *crowd) watch(ctx context.Context, conn *grpc.ClientConn, n crowdNode, have *localv1.Digests, rounds *crowdRounds) error {
	method, count := localv1.Sets_Watch_FullMethodName, countOperations
	var request, next proto.Message = &localv1.WatchReq{NodeName: n.Name, AllEndpoints: true, OwnNode: true, Batches: true, Packed: c.Packed, Have: have, Resumption: &localv1.WatchReq_Resume{Resume: n.Token}},
		&localv1.WatchReq{Resumption: &localv1.WatchReq_Resume{}}
	if c.Relays {
		method, count = clusterv1.Cluster_Watch_FullMethodName, countObjects
		request, next = &clusterv1.WatchRequest{Resume: n.Token}, &clusterv1.WatchRequest{}
	}
	desc := &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}
	stream, err := conn.NewStream(ctx, desc, method, grpc.ForceCodecV2(bytesCodec{}))
	if err != nil {
		return err
	}
	for {
		message, err := proto.Marshal(request)
		if err != nil {
			return err
		}
		if err := stream.SendMsg(&message); err != nil {
			return err
		}
		size, operations, resets, synced := 0, 0, 0, false
		for !synced {
			var answer []byte
			if err := stream.RecvMsg(&answer); err != nil {
				return err
			}
			var n int
			n, synced = count(answer)
			size, operations = size+len(answer), operations+n
			if beginsWithReset(answer) {
				resets++
			}
		}
		rounds.synced(size, operations, resets)
		request = next
	}
}

// countObjects returns the number of objects in a part of an answer to a relay, and
// reports whether it is the last part.
func countObjects(message []byte) (n int, synced bool) {
	for f := range fieldsOf(message) {
		if f.number == relayToken {
			synced = true
		} else {
			n++
		}
	}
	return n, synced
}

// countOperations returns the number of operations in a batch and reports whether it has
// a Sync. A Replace of a service with n endpoints counts as n+1 operations.
func countOperations(message []byte) (n int, synced bool) {
	for op := range fieldsOf(message) {
		switch op.number {
		case opItemBatch:
			in, sync := countOperations(op.bytes)
			n, synced = n+in, synced || sync
		case opItemReplace:
			for range fieldsOf(op.bytes) {
				n++
			}
		case opSync:
			synced = true
		case opItemResume:
		default:
			n++
		}
	}
	return n, synced
}

// beginsWithReset reports whether a batch begins with a Reset.
func beginsWithReset(message []byte) bool {
	for first := range fieldsOf(message) {
		for op := range fieldsOf(first.bytes) {
			return first.number == opItemBatch && op.number == opReset
		}
	}
	return false
}

const opItemReplace, opItemBatch, opItemResume, relayToken = 100, 101, 102, 8

// fieldsOf yields the fields of type bytes in a message.
func fieldsOf(message []byte) func(yield func(field) bool) {
	return func(yield func(field) bool) {
		for len(message) > 0 {
			number, kind, tag := protowire.ConsumeTag(message)
			if tag < 0 {
				return
			}
			n := protowire.ConsumeFieldValue(number, kind, message[tag:])
			if n < 0 {
				return
			}
			if kind == protowire.BytesType {
				value, _ := protowire.ConsumeBytes(message[tag:])
				if !yield(field{number: number, bytes: value}) {
					return
				}
			}
			message = message[tag+n:]
		}
	}
}

// crowdRounds counts the answers to a crowd's streams and writes a report for each round.
type crowdRounds struct {
	streams int
	out     *json.Encoder

	mu  sync.Mutex
	now crowdRound
}

// synced records that one stream has received an answer with the given counts.
func (r *crowdRounds) synced(bytes, operations, resets int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now.Synced = append(r.now.Synced, time.Now().UnixNano())
	r.now.Bytes += bytes
	r.now.Operations += operations
	r.now.Resets += resets
	if len(r.now.Synced) < r.streams {
		return
	}
	slices.SortFunc(r.now.Synced, cmp.Compare[int64])
	if err := r.out.Encode(r.now); err != nil {
		fmt.Fprintln(os.Stderr, "write report:", err)
		os.Exit(1)
	}
	r.now = crowdRound{}
}
