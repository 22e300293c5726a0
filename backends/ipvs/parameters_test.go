// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"golang.org/x/sys/unix"
)

// connect returns a connection to the virtual server and the endpoint's side of it.
func (n *node) connect(l net.Listener) (client, served net.Conn) {
	n.t.Helper()
	if err := n.ns.Do(func() (err error) {
		if client, err = net.DialTimeout("tcp", "10.96.0.1:80", 30*time.Second); err == nil {
			served, err = l.Accept()
		}
		return err
	}); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { client.Close(); served.Close() })
	return client, served
}

// pipe checks that data reaches the other side of a connection.
func pipe(from, to net.Conn) error {
	from.SetDeadline(time.Now().Add(30 * time.Second))
	to.SetDeadline(time.Now().Add(30 * time.Second))
	if _, err := io.WriteString(from, "x"); err != nil {
		return err
	}
	_, err := io.ReadFull(to, make([]byte, 1))
	return err
}

func testWeights(t *testing.T) {
	n := newNode(t)
	n.restart(func(o *options) { o.Stats = true })
	endpoints := []string{"10.1.0.1", "10.1.0.2", "10.1.0.3"}
	served := map[string]chan net.Conn{}
	for _, e := range endpoints {
		n.ns.Add(t, "lo", e+"/32")
		l := n.listen(e + ":8080")
		defer l.Close()
		all := make(chan net.Conn, 1000)
		served[e] = all
		go func() {
			for c, err := l.Accept(); err == nil; c, err = l.Accept() {
				all <- c
			}
		}()
	}
	v := view(endpoints, nil)
	for i, w := range []int32{1, 2, 7} {
		v.Endpoints[i].Weight = w
	}
	n.mustPass(view(endpoints, nil))
	n.mustHave("10.96.0.1:80/TCP rr 10.1.0.1:8080=1 10.1.0.2:8080=1 10.1.0.3:8080=1")
	n.mustPass(v)
	n.mustHave("10.96.0.1:80/TCP wrr 10.1.0.1:8080=1 10.1.0.2:8080=2 10.1.0.3:8080=7")
	const rounds = 100
	for range 10 * rounds {
		if err := n.dial("10.96.0.1:80"); err != nil {
			t.Fatal(err)
		}
	}
	got := map[netip.AddrPort]backends.Stats{}
	// The kernel adds up its counters every two seconds.
	for total, deadline := int64(0), time.Now().Add(time.Minute); total < 10*rounds && time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		total = 0
		if err := n.Stats(t.Context(), func(s backends.Stats) bool {
			got[s.Endpoint] = s
			total += s.Connections
			return true
		}); err != nil {
			t.Fatal(err)
		}
	}
	for i, w := range []int64{1, 2, 7} {
		s := got[netip.MustParseAddrPort(endpoints[i]+":8080")]
		t.Logf("%s: %d connections, want %d; %d bytes from clients, %d to clients", endpoints[i], s.Connections, rounds*w, s.FromClients, s.ToClients)
		if diff := s.Connections - rounds*w; 100*max(diff, -diff) > 3*rounds*w {
			t.Errorf("%s got %d connections, want %d", endpoints[i], s.Connections, rounds*w)
		}
		if s.Service != v.Key() || s.Protocol != api.TCP || s.FromClients < 100*s.Connections || s.ToClients < 50*s.Connections {
			t.Errorf("counters %+v", s)
		}
	}

	// A weight that becomes zero ends no connection.
	var client net.Conn
	for _, all := range served {
		for len(all) > 0 {
			(<-all).Close()
		}
	}
	heavy := served["10.1.0.3"]
	for len(heavy) == 0 {
		if err := n.ns.Do(func() (err error) { client, err = net.Dial("tcp", "10.96.0.1:80"); return err }); err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		time.Sleep(10 * time.Millisecond)
	}
	server := <-heavy
	defer server.Close()
	zero := view([]string{"10.1.0.1", "10.1.0.2", "~10.1.0.3"}, nil)
	for i := range zero.Draining {
		zero.Draining[i].Ready, zero.Draining[i].Weight = true, 0
	}
	n.mustPass(zero)
	n.mustHave("10.96.0.1:80/TCP rr 10.1.0.1:8080=1 10.1.0.2:8080=1 10.1.0.3:8080=0")
	if err := errors.Join(pipe(client, server), pipe(server, client)); err != nil {
		t.Errorf("the connection has ended: %v", err)
	}
}

func testResets(t *testing.T) {
	for _, reset := range []bool{false, true} {
		t.Run(fmt.Sprint("reset=", reset), func(t *testing.T) {
			n := newNode(t)
			n.ns.Add(t, "lo", "10.1.0.1/32")
			n.ns.Add(t, "lo", "10.1.0.2/32")
			l := n.listen("10.1.0.1:8080")
			defer l.Close()
			edit := func(s *api.Service) { s.ResetConnections = reset }
			n.mustPass(view([]string{"10.1.0.1", "10.1.0.2"}, edit))
			n.mustPass(view([]string{"10.1.0.1"}, edit))
			client, served := n.connect(l)
			if err := errors.Join(pipe(client, served), pipe(served, client)); err != nil {
				t.Fatal(err)
			}
			n.mustPass(view([]string{"10.1.0.1", "10.1.0.2"}, edit))
			if err := errors.Join(pipe(client, served), pipe(served, client)); err != nil {
				t.Fatalf("an added endpoint ended a connection: %v", err)
			}
			n.mustPass(view([]string{"10.1.0.2"}, edit))
			begin := time.Now()
			if !reset {
				time.Sleep(2 * time.Second)
				if err := errors.Join(pipe(client, served), pipe(served, client)); err != nil {
					t.Errorf("the connection has ended: %v", err)
				}
				return
			}
			if got := n.servers(); len(got) != 1 || strings.Contains(got[0], "10.1.0.1:8080") {
				t.Errorf("virtual servers %q", got)
			}
			client.SetDeadline(time.Now().Add(30 * time.Second))
			io.WriteString(client, "x")
			_, err := client.Read(make([]byte, 1))
			if took := time.Since(begin); !errors.Is(err, unix.ECONNRESET) || took > time.Second {
				t.Errorf("after %v: %v, want a reset within a second", took, err)
			} else {
				t.Logf("reset after %v", took)
			}
		})
	}
}

func testManyStats(t *testing.T) {
	n := newNode(t)
	n.restart(func(o *options) { o.Stats = true })
	const services = 1_000
	views := make([]*api.View, services)
	for i := range views {
		views[i] = numbered(i, 1)
	}
	n.mustPass(views...)
	read := func() (took time.Duration, all map[string]bool) {
		all = map[string]bool{}
		begin := time.Now()
		if err := n.Stats(t.Context(), func(s backends.Stats) bool { all[s.Service.Name] = true; return true }); err != nil {
			t.Fatal(err)
		}
		return time.Since(begin), all
	}
	times := []time.Duration{}
	for range 5 {
		took, all := read()
		if times = append(times, took); len(all) != services {
			t.Fatalf("counters of %d services, want %d", len(all), services)
		}
	}
	t.Logf("read the counters of %d services in %v", services, slices.Min(times))
}
