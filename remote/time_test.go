// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"github.com/kpng-project/kpng/remote"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"k8s.io/apimachinery/pkg/types"
)

// The tests in this file use package synctest, so that waiting takes no real time. They
// use connections in memory.

type setsStream = grpc.BidiStreamingClient[localv1.WatchReq, localv1.OpItem]

// inMemory runs a server of the given state and returns a connection to the server.
func inMemory(t *testing.T, state *cluster.State, opts remote.ServerOptions, creds credentials.TransportCredentials) (*remote.Server, *grpc.ClientConn) {
	t.Helper()
	l := bufconn.Listen(64 << 10)
	opts.Insecure = true
	server, _ := serveOn(t, state, l, opts)
	conn, err := grpc.NewClient("passthrough:///kpng.test", grpc.WithTransportCredentials(creds),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }),
		grpc.WithStaticStreamWindowSize(64<<10), grpc.WithStaticConnWindowSize(64<<10))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return server, conn
}

func open(t *testing.T, conn *grpc.ClientConn) setsStream {
	t.Helper()
	stream, err := localv1.NewSetsClient(conn).Watch(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return stream
}

// request sends a request with a token. The token may be empty.
func request(t *testing.T, stream setsStream, token []byte) {
	t.Helper()
	if token == nil {
		token = []byte{}
	}
	err := stream.Send(&localv1.WatchReq{NodeName: "n", Resumption: &localv1.WatchReq_Resume{Resume: token}})
	if err != nil && err != io.EOF { // EOF: the server ended the stream, and Recv returns the reason
		t.Fatal(err)
	}
}

// receiveAnswer receives an answer and counts the services in it.
func receiveAnswer(t *testing.T, stream setsStream) (reset bool, services int, token []byte) {
	t.Helper()
	for {
		item, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		reset = reset || item.GetReset_() != nil
		if item.GetReplace() != nil || item.GetSet().GetRef().GetSet() == localv1.Set_ServicesSet {
			services++
		}
		if item.GetSync() != nil {
			return reset, services, item.GetResume()
		}
	}
}

// A client is idle while an EndpointSlice without a service is deleted. The server renews
// the client's token, so that the client can resume even after the store has dropped the
// deletion.
func TestTokenOfIdleClientIsRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		state := cluster.New(cluster.Options{Resumable: true})
		unseen := func(name string) *api.EndpointSlice {
			return &api.EndpointSlice{Namespace: "ns", Name: name, ServiceName: name, Family: api.IPv4}
		}
		state.Update(func(tx *cluster.Tx) {
			tx.SetService(plain("a", 80))
			tx.SetSlice(unseen("e"))
		})
		state.SetSynced()
		_, conn := inMemory(t, state, quick, insecure.NewCredentials())
		stream := open(t, conn)
		request(t, stream, nil)
		_, _, token := receiveAnswer(t, stream)
		request(t, stream, nil)
		synctest.Wait() // returns when the server waits for changes
		state.Update(func(tx *cluster.Tx) { tx.DeleteSlice(types.NamespacedName{Namespace: "ns", Name: "e"}) })
		renewed := make(chan []byte, 1)
		go func() {
			_, services, token := receiveAnswer(t, stream)
			if services > 0 {
				t.Errorf("the client received %d unchanged services", services)
			}
			renewed <- token
		}()
		time.Sleep(9 * time.Minute)
		synctest.Wait()
		select {
		case token = <-renewed:
		default:
			t.Error("no new token within nine minutes")
		}
		stream.CloseSend()

		time.Sleep(2 * time.Minute) // after this time, the next change makes the store drop the deletion
		state.Update(func(tx *cluster.Tx) { tx.SetSlice(unseen("f")) })
		stream = open(t, conn)
		request(t, stream, token)
		if reset, _, _ := receiveAnswer(t, stream); reset {
			t.Error("the client started over")
		}
	})
}

// The test makes many changes that do not concern the client.
func TestManyChangesRenewToken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		state := manyServices(0)
		_, conn := inMemory(t, state, quick, insecure.NewCredentials())
		stream := open(t, conn)
		request(t, stream, nil)
		receiveAnswer(t, stream)
		request(t, stream, nil)
		began := time.Now()
		for i := range 1100 {
			update(state, func(to apitest.Writer) { to.SetNode(&api.Node{Name: fmt.Sprint("another-", i)}) })
		}
		if reset, services, token := receiveAnswer(t, stream); reset || services > 0 || len(token) == 0 || time.Since(began) > 0 {
			t.Errorf("after %v: reset %t, %d services, token %q", time.Since(began), reset, services, token)
		}
	})
}

func TestStreamsReportRevisionsOfClients(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		state := manyServices(1)
		server, conn := inMemory(t, state, quick, insecure.NewCredentials())
		check := func(when string, want uint64) {
			t.Helper()
			synctest.Wait()
			if got, want := streamsOf(server), []string{fmt.Sprintf("n bufconn %d", want)}; !slices.Equal(got, want) {
				t.Errorf("%s: streams %q, want %q", when, got, want)
			}
		}
		stream := open(t, conn)
		request(t, stream, nil)
		check("before the client has confirmed an answer", 0)
		receiveAnswer(t, stream)
		request(t, stream, nil)
		check("after the client has confirmed it", state.Snapshot().Revision)

		update(state, func(to apitest.Writer) { to.SetNode(&api.Node{Name: "another"}) })
		time.Sleep(time.Second)
		check("after a change that the client does not receive", state.Snapshot().Revision)

		had := state.Snapshot().Revision
		rewrite(state, 1, 1)
		time.Sleep(time.Second)
		check("before the client has confirmed a change", had)
		receiveAnswer(t, stream)
		request(t, stream, nil)
		check("after the client has confirmed it", state.Snapshot().Revision)

		stream.CloseSend()
		rewrite(state, 1, 2) // wakes the stream, which then finds its end
		receiveAnswer(t, stream)
		synctest.Wait()
		if streams := streamsOf(server); len(streams) > 0 {
			t.Errorf("after the end of the stream: %q", streams)
		}
	})
}

// streamsOf returns the node, the peer and the revision of each open stream.
func streamsOf(server *remote.Server) (all []string) {
	server.Streams(func(node, peer string, _ time.Time, revision uint64) {
		all = append(all, fmt.Sprint(node, " ", peer, " ", revision))
	})
	return all
}

// manyServices returns a state with the given number of services.
func manyServices(services int) *cluster.State {
	state := cluster.New(cluster.Options{Resumable: true})
	rewrite(state, services, 0)
	state.SetSynced()
	return state
}

// rewrite writes all services to the state. An annotation of each service contains the
// given generation.
func rewrite(state *cluster.State, services, generation int) {
	state.Update(func(tx *cluster.Tx) {
		for i := range services {
			s := plain(fmt.Sprintf("s-%05d", i), 80)
			s.Annotations = map[string]string{"generation": fmt.Sprint(generation)}
			tx.SetService(s)
		}
	})
}

// The client pauses after each message of an answer. The server allows 30 s for each 64
// KB. If the cluster changes too much during the answer, the server allows 30 s for the
// whole answer.
func TestSlowClientIsDisconnected(t *testing.T) {
	const services = 6_000
	for _, test := range []struct {
		name    string
		pause   time.Duration
		changes int // number of changes of all services after the first message
		cutOff  bool
	}{
		{"slow enough", 20 * time.Millisecond, 1, false},
		{"too slow, although each message is read in time", 90 * time.Millisecond, 0, true},
		{"slow while the cluster changes", 20 * time.Millisecond, 4, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				state := manyServices(services)
				opts := quick
				opts.CacheBytes = 1 << 16
				server, conn := inMemory(t, state, opts, insecure.NewCredentials())
				stream := open(t, conn)
				request(t, stream, nil)
				var err error
				var item *localv1.OpItem
				for n := 0; err == nil && item.GetSync() == nil; n++ {
					if item, err = stream.Recv(); err != nil {
						break
					}
					if n == 0 {
						for g := range test.changes {
							rewrite(state, services, g+1)
						}
					}
					time.Sleep(test.pause)
				}
				if (err != nil) != test.cutOff || server.Stats().Stalled > 0 != test.cutOff {
					t.Errorf("error %v, statistics %+v; want the client disconnected: %t", err, server.Stats(), test.cutOff)
				}
			})
		})
	}
}

// When a slow client is disconnected, the memory of its snapshot must be freed.
func TestEndedAnswerReleasesItsSnapshot(t *testing.T) {
	const services = 6_000
	var freed atomic.Int64
	synctest.Test(t, func(t *testing.T) {
		state := cluster.New(cluster.Options{Resumable: true})
		state.Update(func(tx *cluster.Tx) {
			for i := range services {
				s := plain(fmt.Sprintf("s-%05d", i), 80)
				runtime.SetFinalizer(s, func(*api.Service) { freed.Add(1) })
				tx.SetService(s)
			}
		})
		state.SetSynced()
		opts := quick
		opts.CacheBytes = 1 << 16
		_, conn := inMemory(t, state, opts, insecure.NewCredentials())
		stream := open(t, conn)
		request(t, stream, nil)
		if _, err := stream.Recv(); err != nil {
			t.Fatal(err)
		}
		for g := range 4 {
			rewrite(state, services, g+1)
		}
		for _, err := stream.Recv(); err == nil; _, err = stream.Recv() {
			time.Sleep(20 * time.Millisecond)
		}
		for i := 0; i < 20 && freed.Load() < services*9/10; i++ {
			runtime.GC()
		}
		runtime.KeepAlive(state)
	})
	if n := freed.Load(); n < services*9/10 {
		t.Errorf("%d of %d services are freed", n, services)
	}
}

// The client is idle until the server ends its connection.
func TestConnectionsAreRenewed(t *testing.T) {
	for _, age := range []time.Duration{0, 5 * time.Minute} {
		t.Run(age.String(), func(t *testing.T) { testRenewal(t, age) })
	}
}

func testRenewal(t *testing.T, age time.Duration) {
	synctest.Test(t, func(t *testing.T) {
		opts := quick
		opts.ConnectionAge = age
		state := manyServices(1)
		_, conn := inMemory(t, state, opts, insecure.NewCredentials())
		began := time.Now()
		stream := open(t, conn)
		request(t, stream, nil)
		_, _, token := receiveAnswer(t, stream)
		request(t, stream, nil)
		if _, err := stream.Recv(); err == nil {
			t.Error("the client received an answer")
		}
		// gRPC varies the age by a tenth. Then the client has a minute. This minute begins
		// when the server has sent its message.
		want := cmp.Or(age, 30*time.Minute)
		if got := time.Since(began); got < want*9/10 || got > want*11/10+time.Minute+10*time.Second {
			t.Errorf("the stream ended after %v", got)
		}
		stream = open(t, conn)
		request(t, stream, token)
		if reset, services, _ := receiveAnswer(t, stream); reset || services > 0 {
			t.Errorf("reset %t, %d services", reset, services)
		}
	})
}

// The test changes a service while the client's certificate is valid, and again after the
// certificate has expired.
func TestStreamEndsWithItsCertificate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := newAuthority(t)
		opts := quick
		opts.TLS, opts.NodeCertificates = ca.newFiles(t, "kpng.test"), true
		files := tlsFiles(t.TempDir())
		ca.issueUntil(t, files, time.Now().Add(2*time.Minute), "system:node:n")
		state := manyServices(1)
		_, conn := inMemory(t, state, opts, clientCredentials(t, ca, files.CertFile, files.KeyFile))
		stream := open(t, conn)
		request(t, stream, nil)
		receiveAnswer(t, stream)
		request(t, stream, nil)
		time.Sleep(time.Minute)
		rewrite(state, 1, 1)
		if _, services, _ := receiveAnswer(t, stream); services != 1 {
			t.Errorf("%d services", services)
		}
		request(t, stream, nil)
		time.Sleep(61 * time.Second)
		rewrite(state, 1, 2)
		_, err := stream.Recv()
		expect(t, err, "certificate has expired")
	})
}

// clientCredentials returns the credentials of a client with a certificate of ca.
func clientCredentials(t *testing.T, ca *authority, certFile, keyFile string) credentials.TransportCredentials {
	t.Helper()
	cert, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	return credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{cert}, RootCAs: ca.pool(), ServerName: "kpng.test"})
}

// The server sends a single change immediately. Then it waits for further changes, and
// therefore sends a hundred changes together.
func TestChangesAreBatched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		state := manyServices(0)
		const interval = 10 * time.Millisecond
		opts := remote.Batching(interval, quick)
		_, conn := inMemory(t, state, opts, insecure.NewCredentials())
		stream := open(t, conn)
		request(t, stream, nil)
		receiveAnswer(t, stream)
		time.Sleep(interval)
		for _, tc := range []struct {
			last int32
			wait time.Duration
		}{{1, 0}, {100, interval}, {101, interval}} {
			request(t, stream, nil)
			synctest.Wait()
			began := time.Now()
			for port := range tc.last {
				update(state, func(to apitest.Writer) { to.SetService(plain("s", port+1)) })
			}
			item, err := stream.Recv()
			if err != nil {
				t.Fatal(status.Convert(err))
			}
			var service localv1.Service
			unmarshal(t, item.GetSet().GetBytes(), &service)
			if waited := time.Since(began); waited != tc.wait || service.Ports[0].Port != tc.last {
				t.Errorf("received port %d after %v, want %d after %v", service.Ports[0].Port, waited, tc.last, tc.wait)
			}
			if _, err := stream.Recv(); err != nil { // the Sync
				t.Fatal(status.Convert(err))
			}
		}
	})
}
