// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
)

// kubeProxy has the rules of the service that kube-proxy would write.
const kubeProxy = `
table inet kube-proxy {
	chain services {
		ip daddr 10.96.0.10 udp dport 53 dnat ip to 10.1.0.2
		ip6 daddr fd00:96::a udp dport 53 dnat ip6 to fd01::2
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
	node  *netnstest.Namespace
	name  string
	ips   []string
	conns []net.PacketConn
}

func (s *server) start(t *testing.T) {
	t.Helper()
	for _, ip := range s.ips {
		var c net.PacketConn
		if err := s.node.Do(func() (err error) { c, err = net.ListenPacket("udp", net.JoinHostPort(ip, "53")); return err }); err != nil {
			t.Fatal(err)
		}
		s.conns = append(s.conns, c)
		go func() {
			for b := make([]byte, 512); ; {
				n, from, err := c.ReadFrom(b)
				if err != nil {
					return
				}
				b[2] |= 0x80 // an answer
				c.WriteTo(append(b[:n:n], s.name...), from)
			}
		}()
	}
}

func (s *server) kill() {
	for _, c := range s.conns {
		c.Close()
	}
	s.conns = nil
}

// timeout is the time after which a client repeats its question. Resolvers wait for 5 s.
const timeout = 1500 * time.Millisecond

// ask sends a question, up to twice. It returns the name of the server that answers.
func ask(c net.Conn, id uint16) (name string, attempts int, err error) {
	question := []byte{byte(id >> 8), byte(id), 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1}
	for attempts = 1; attempts <= 2; attempts++ {
		c.SetDeadline(time.Now().Add(timeout))
		if _, err = c.Write(question); err != nil {
			continue
		}
		b := make([]byte, 512)
		for n := 0; err == nil; {
			if n, err = c.Read(b); err == nil && n > len(question) && string(b[:2]) == string(question[:2]) {
				return string(b[len(question):n]), attempts, nil
			}
		}
	}
	return "", 2, err
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
	t.Cleanup(func() { cache.kill() })

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
	dial := func(i int) net.Conn {
		from := []*netnstest.Namespace{pod, pod, pod, node}[i%4]
		var c net.Conn
		if err := from.Do(func() (err error) {
			c, err = net.Dial("udp", net.JoinHostPort(servers[i%2], "53"))
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return c
	}
	answeredBy := func(want string) {
		t.Helper()
		for i := range 8 {
			for begin := time.Now(); ; {
				c := dial(i)
				got, _, err := ask(c, uint16(i))
				c.Close()
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

	const questions, clients, kills = 10_000, 50, 10
	var asked, retried, unanswered, fromCache atomic.Int64
	var all sync.WaitGroup
	for client := range clients {
		all.Go(func() {
			var c net.Conn
			for i := range questions / clients {
				if i%5 == 0 { // some clients use a socket for several questions
					if c != nil {
						c.Close()
					}
					c = dial(client + i/5)
				}
				name, attempts, err := ask(c, uint16(i))
				asked.Add(1)
				switch {
				case err != nil:
					unanswered.Add(1)
				case attempts > 1:
					retried.Add(1)
				}
				if name == "cache" {
					fromCache.Add(1)
				}
				time.Sleep(250 * time.Millisecond)
			}
			c.Close()
		})
	}
	for range kills {
		// A question that is lost at the beginning of a failure is repeated while it lasts.
		time.Sleep(timeout + 500*time.Millisecond)
		cache.kill()
		time.Sleep(2 * timeout)
		cache.start(t)
	}
	all.Wait()
	t.Logf("%d questions: %d answered by the cache, %d after a retry, %d not", asked.Load(), fromCache.Load(), retried.Load(), unanswered.Load())
	if unanswered.Load() > 0 || asked.Load() != questions || fromCache.Load() == 0 || fromCache.Load() == questions {
		t.Error("want all questions answered after at most one retry, some by the cache, and some by the service")
	}

	cache.kill()
	answeredBy("service")
	cache.start(t)
	answeredBy("cache")
	program.Process.Kill() // the redirection expires
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
