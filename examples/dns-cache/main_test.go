// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
)

// kubeProxy has the rules that kube-proxy would write for the service.
const kubeProxy = `
table inet kube-proxy {
	chain services {
		ip daddr 10.96.0.10 th dport 53 dnat ip to 10.1.0.2
		ip6 daddr fd00:96::a th dport 53 dnat ip6 to fd01::2
	}
	chain prerouting { type nat hook prerouting priority -100; jump services; }
	chain output { type nat hook output priority -100; jump services; }
}`

const services = `
apiVersion: v1
kind: Service
metadata: {namespace: kube-system, name: kube-dns}
spec:
  clusterIP: 10.96.0.10
  clusterIPs: [10.96.0.10, "fd00:96::a"]
  ipFamilies: [IPv4, IPv6]
  ports: [{name: dns, protocol: UDP, port: 53}, {name: dns-tcp, port: 53}, {name: metrics, port: 9153}]
`

// server is a DNS server whose answers end with its name.
type server struct {
	node *netnstest.Namespace
	name string
	ips  []string

	mu   sync.Mutex
	open map[io.Closer]bool // nil while the server is down
}

func (s *server) start(t *testing.T) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open = map[io.Closer]bool{}
	for _, ip := range s.ips {
		var udp net.PacketConn
		var tcp net.Listener
		if err := s.node.Do(func() (err error) {
			if udp, err = net.ListenPacket("udp", net.JoinHostPort(ip, "53")); err == nil {
				tcp, err = net.Listen("tcp", net.JoinHostPort(ip, "53"))
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		s.open[udp], s.open[tcp] = true, true
		go func() {
			for b := make([]byte, 512); ; {
				n, from, err := udp.ReadFrom(b)
				if err != nil {
					return
				}
				udp.WriteTo(s.answer(b[:n:n]), from)
			}
		}()
		go func() {
			for {
				c, err := tcp.Accept()
				if err != nil {
					return
				}
				go s.serve(c)
			}
		}()
	}
}

// serve answers the questions of a TCP connection.
func (s *server) serve(c net.Conn) {
	defer c.Close()
	s.mu.Lock()
	down := s.open == nil
	if !down {
		s.open[c] = true
	}
	s.mu.Unlock()
	for !down {
		question, err := readMessage(c)
		if err != nil {
			break
		}
		writeMessage(c, s.answer(question))
	}
	s.mu.Lock()
	delete(s.open, c)
	s.mu.Unlock()
}

func (s *server) answer(question []byte) []byte {
	question[2] |= 0x80 // an answer
	return append(question, s.name...)
}

func (s *server) kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.open {
		c.Close()
	}
	s.open = nil
}

// readMessage reads a message of DNS over TCP, which has its length before it.
func readMessage(r io.Reader) ([]byte, error) {
	var length [2]byte
	if _, err := io.ReadFull(r, length[:]); err != nil {
		return nil, err
	}
	b := make([]byte, binary.BigEndian.Uint16(length[:]))
	_, err := io.ReadFull(r, b)
	return b, err
}

func writeMessage(w io.Writer, b []byte) error {
	_, err := w.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...))
	return err
}

// exchange sends a question over UDP or TCP. It returns the name of the server that answers.
func exchange(c net.Conn, id uint16, timeout time.Duration) (string, error) {
	question := []byte{byte(id >> 8), byte(id), 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1}
	c.SetDeadline(time.Now().Add(timeout))
	if _, stream := c.(*net.TCPConn); stream {
		if err := writeMessage(c, question); err != nil {
			return "", err
		}
		b, err := readMessage(c)
		return string(b[min(len(b), len(question)):]), err
	}
	if _, err := c.Write(question); err != nil {
		return "", err
	}
	for b := make([]byte, 512); ; {
		n, err := c.Read(b)
		if err != nil {
			return "", err
		}
		if n > len(question) && string(b[:2]) == string(question[:2]) {
			return string(b[len(question):n]), nil
		}
	}
}

func TestQuestionsAreAnsweredWhileTheCacheRestarts(t *testing.T) {
	node, pod, distant := netnstest.New(t), netnstest.New(t), netnstest.New(t)
	node.Set(t, "ipv4/ip_forward=1", "ipv6/conf/all/forwarding=1")
	node.Stub(t, "cache")
	node.Add(t, "cache", "169.254.20.10/32")
	node.Add(t, "cache", "fd00:cafe::10/128")
	for i, other := range []*netnstest.Namespace{pod, distant} {
		name := fmt.Sprintf("side%d", i)
		node.Join(t, name, other, "eth0")
		for _, addr := range []string{fmt.Sprintf("10.%d.0.%%d/24", i), fmt.Sprintf("fd0%d::%%d/64", i)} {
			node.Add(t, name, fmt.Sprintf(addr, 1))
			other.Add(t, "eth0", fmt.Sprintf(addr, 2))
			gateway, _, _ := strings.Cut(fmt.Sprintf(addr, 1), "/")
			other.Route(t, "default", gateway, "eth0")
		}
	}
	node.RunWith(t, kubeProxy, "nft", "-f", "-")
	// The node needs a route for its own questions, as in a cluster.
	node.Route(t, "default", "10.1.0.2", "side1")
	node.Route(t, "default", "fd01::2", "side1")

	service := &server{node: distant, name: "service", ips: []string{"10.1.0.2", "fd01::2"}}
	cache := &server{node: node, name: "cache", ips: []string{"169.254.20.10", "fd00:cafe::10"}}
	service.start(t)
	cache.start(t)
	t.Cleanup(service.kill)
	t.Cleanup(cache.kill)

	manifest := filepath.Join(t.TempDir(), "service.yaml")
	if err := os.WriteFile(manifest, []byte(services), 0o600); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	program := exec.Command(os.Args[0], "-i", manifest, "--node-name", "node", "--cache", "169.254.20.10,fd00:cafe::10")
	program.Env, program.Stdout, program.Stderr = append(os.Environ(), "RUN_PROGRAM=1"), &log, &log
	ended, err := node.Start(program)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		program.Process.Kill()
		if t.Failed() {
			t.Logf("the program logged:\n%s", &log)
		}
	})

	servers := []string{"10.96.0.10", "fd00:96::a"}
	dial := func(network string, i int, timeout time.Duration) (c net.Conn, err error) {
		from := []*netnstest.Namespace{pod, pod, pod, node}[i%4]
		err = from.Do(func() (err error) {
			c, err = net.DialTimeout(network, net.JoinHostPort(servers[i%2], "53"), timeout)
			return err
		})
		return c, err
	}
	// answeredBy waits until a server answers over both protocols and families, from the pod and
	// from the node.
	answeredBy := func(want string) {
		t.Helper()
		for i := range 16 {
			for begin := time.Now(); ; {
				const timeout = 100 * time.Millisecond
				var got string
				c, err := dial([]string{"udp", "tcp"}[i/8], i, timeout)
				if err == nil {
					got, err = exchange(c, uint16(i), timeout)
					c.Close()
				}
				if got == want {
					break
				}
				if time.Since(begin) > time.Minute {
					t.Fatalf("%q answers, error %v, want %q", got, err, want)
				}
			}
		}
	}
	answeredBy("cache")

	// A client repeats its question after the timeout. Resolvers wait for 5 s.
	const questions, clients, kills, timeout = 10_000, 50, 10, 2 * time.Second
	const share = questions / clients / kills // questions of a client between two kills of the cache
	var retried, rejected, unanswered, fromCache atomic.Int64
	var asked [clients]atomic.Int64
	var allowed atomic.Int64 // the number of questions that each client may ask
	// On a slow machine, the program may need longer than the timeout to notice that the cache is
	// down. So the goroutine that kills the cache holds this lock until the service answers.
	// Clients wait for the lock before they repeat a question.
	var switching sync.RWMutex
	var all sync.WaitGroup
	for client := range clients {
		network, perSocket := "udp", 5 // questions per socket
		switch client % 10 {
		case 0:
			network = "tcp"
		case 5:
			network, perSocket = "tcp", 1
		}
		all.Go(func() {
			var c net.Conn
			for i := range questions / clients {
				for ; int64(i) >= allowed.Load(); time.Sleep(time.Millisecond) {
				}
				if c != nil && i%perSocket == 0 {
					c.Close()
					c = nil
				}
				var name string
				var err error
				for attempt := range 2 {
					if attempt == 1 {
						switching.RLock()
						retried.Add(1)
						switching.RUnlock()
					}
					if c == nil {
						if c, err = dial(network, client/5+i/perSocket, timeout); err != nil {
							c = nil
						}
					}
					if c != nil {
						if name, err = exchange(c, uint16(i), timeout); err == nil {
							break
						}
						if network == "tcp" {
							c.Close()
							c = nil
						}
					}
					if errors.Is(err, syscall.ECONNREFUSED) {
						rejected.Add(1)
					}
				}
				if err != nil {
					unanswered.Add(1)
				}
				if name == "cache" {
					fromCache.Add(1)
				}
				asked[client].Add(1)
				time.Sleep(20 * time.Millisecond)
			}
			if c != nil {
				c.Close()
			}
		})
	}
	// progress waits until all clients have asked n questions. So no question is lost twice because
	// the cache is killed twice.
	progress := func(n int64) {
		for client := range clients {
			for ; asked[client].Load() < n; time.Sleep(time.Millisecond) {
			}
		}
	}
	fastest := time.Hour
	for i := range int64(kills) {
		allowed.Store((i + 1) * share)
		progress(i*share + share/3)
		begin := time.Now()
		switching.Lock()
		cache.kill()
		answeredBy("service")
		switching.Unlock()
		fastest = min(fastest, time.Since(begin))
		progress(i*share + 2*share/3)
		cache.start(t)
		answeredBy("cache")
		progress((i + 1) * share)
	}
	all.Wait()
	t.Logf("%d questions: %d answered by the cache, %d after a retry, %d not, %d rejected; the fastest change took %s",
		questions, fromCache.Load(), retried.Load(), unanswered.Load(), rejected.Load(), fastest.Round(time.Millisecond))
	if unanswered.Load() > 0 || rejected.Load() > 0 || fromCache.Load() == 0 || fromCache.Load() == questions {
		t.Error("want all questions answered after at most one retry, some by the cache, and some by the service")
	}
	if fastest > timeout {
		t.Errorf("each change to the service took longer than %s", timeout)
	}

	cache.kill()
	answeredBy("service")
	cache.start(t)
	answeredBy("cache")
	program.Process.Kill() // then the redirection expires
	<-ended
	cache.kill()
	answeredBy("service")
}

func TestMain(m *testing.M) {
	if os.Getenv("RUN_PROGRAM") != "" {
		main()
		return
	}
	os.Exit(m.Run())
}
