// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"bufio"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"golang.org/x/net/dns/dnsmessage"
)

// dnsServer is a server for names, at an endpoint of a service.
type dnsServer struct {
	addr string
	// gone is true while the server does not answer, as if its pod was deleted.
	gone atomic.Bool
	// answers is the number of answers of all servers.
	answers *atomic.Int64
}

// serve answers questions for addresses with 192.0.2.1.
func (s *dnsServer) serve(c *net.UDPConn) {
	for buffer := make([]byte, 2048); ; {
		length, from, err := c.ReadFromUDPAddrPort(buffer)
		if err != nil {
			return
		}
		time.Sleep(time.Duration(rand.IntN(3)) * time.Millisecond) // so that some questions are pending
		var m dnsmessage.Message
		if s.gone.Load() || m.Unpack(buffer[:length]) != nil || len(m.Questions) != 1 {
			continue
		}
		answer := dnsmessage.Message{Header: dnsmessage.Header{ID: m.ID, Response: true, RecursionAvailable: true}, Questions: m.Questions}
		if q := m.Questions[0]; q.Type == dnsmessage.TypeA {
			answer.Answers = []dnsmessage.Resource{{
				Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class, TTL: 1},
				Body:   &dnsmessage.AResource{A: [4]byte{192, 0, 2, 1}},
			}}
		}
		if packed, err := answer.Pack(); err == nil {
			s.answers.Add(1)
			c.WriteToUDPAddrPort(packed, from)
		}
	}
}

// testResolvers asks for names while endpoints of the name service are added and removed.
// The resolvers are getaddrinfo of the C library and Go's resolver, which both use
// connected UDP sockets. A question that is lost is repeated after five seconds.
func testResolvers(t *testing.T) {
	if !sweepsUDP(t) {
		return
	}
	const retry = 5 * time.Second
	n := newNode(t, Options{})
	n.ns.Add(t, "lo", "127.0.0.1")
	var answers atomic.Int64
	var servers []*dnsServer
	for _, addr := range endpoints[:3] {
		s := &dnsServer{addr: addr, answers: &answers}
		servers = append(servers, s)
		n.ns.Add(t, "lo", s.addr)
		go s.serve(n.bind(s.addr + ":8080"))
	}
	present := func(s ...*dnsServer) *api.View {
		var addrs []string
		for _, s := range s {
			addrs = append(addrs, s.addr)
		}
		return view("dns", []string{"10.96.0.10"}, addrs, func(s *api.Service) { s.Ports[1].Port = 53 })
	}
	n.pass(present(servers...))

	ctx, stop := context.WithCancel(t.Context())
	churned := make(chan int)
	go func() {
		changes := 0
		// A resolver gives up if its question is lost twice. So there is enough time
		// between two changes.
		awaitAnswers := func() {
			for enough := answers.Load() + 10; answers.Load() < enough && ctx.Err() == nil; time.Sleep(time.Millisecond) {
			}
		}
		for i := 0; ctx.Err() == nil; i = (i + 1) % len(servers) {
			lost, stay := servers[i], []*dnsServer{servers[(i+1)%3], servers[(i+2)%3]}
			lost.gone.Store(true)
			n.set(present(stay...))
			changes++
			awaitAnswers()
			lost.gone.Store(false)
			n.set(present(servers...))
			awaitAnswers()
		}
		churned <- changes
	}()
	resolver := net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (c net.Conn, err error) {
		err = n.ns.Do(func() error { c, err = (&net.Dialer{}).DialContext(ctx, network, "10.96.0.10:53"); return err })
		return c, err
	}}
	conf := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(conf, []byte("nameserver 10.96.0.10\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	const names = 300
	getent := `mount --bind "$0" /etc/resolv.conf && exec stdbuf -oL getent ahostsv4 "$@"`
	args := []string{"--mount", "sh", "-c", getent, conf}
	for i := range names {
		args = append(args, fmt.Sprintf("name%d.example.", i))
	}
	for _, resolve := range []struct {
		name string
		ask  func() (longest time.Duration, err error)
	}{
		{"Go", func() (longest time.Duration, err error) {
			for i := range 1000 {
				start := time.Now()
				addrs, err := resolver.LookupNetIP(ctx, "ip4", fmt.Sprintf("name%d.example.", i))
				if err != nil || len(addrs) != 1 || addrs[0] != netip.MustParseAddr("192.0.2.1") {
					return longest, fmt.Errorf("question %d, after %v: %v, %w", i, time.Since(start), addrs, err)
				}
				longest = max(longest, time.Since(start))
			}
			return longest, nil
		}},
		{"getaddrinfo", func() (longest time.Duration, err error) {
			err = n.ns.Do(func() error {
				cmd := exec.CommandContext(ctx, "unshare", args...)
				cmd.Stderr = os.Stderr
				out, err := cmd.StdoutPipe()
				if err == nil {
					err = cmd.Start()
				}
				if err != nil {
					return err
				}
				answers, last := 0, time.Now()
				for lines := bufio.NewScanner(out); lines.Scan(); last = time.Now() {
					if answers > 0 { // the process has started
						longest = max(longest, time.Since(last))
					}
					if strings.HasPrefix(lines.Text(), "192.0.2.1 ") {
						answers++
					}
				}
				if err = cmd.Wait(); err == nil && answers < names {
					err = fmt.Errorf("only %d answers", answers)
				}
				return err
			})
			return longest, err
		}},
	} {
		longest, err := resolve.ask()
		if err != nil || longest >= retry {
			t.Errorf("%s: the longest question took %v, error %v", resolve.name, longest, err)
		}
		t.Logf("%s: the longest question took %v", resolve.name, longest)
	}
	stop()
	t.Logf("%d removals of an endpoint", <-churned)
}
