// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/sockdiag"
	"golang.org/x/sys/unix"
)

// resetWorld has two pods that serve TCP ports, and clients of a service: one in another
// namespace and one on the node.
type resetWorld struct {
	node, client, pods *netnstest.Namespace
	accepted           chan net.Conn // of the pods
}

// newResetWorld sets net.netfilter.nf_conntrack_tcp_loose of the node to the given value.
func newResetWorld(t *testing.T, n *netnstest.Namespace, loose string) *resetWorld {
	t.Helper()
	w := &resetWorld{node: n, accepted: make(chan net.Conn, 10_000)}
	w.client, w.pods = addRoutedNamespaces(t, n, pod1, pod2)
	n.Set(t, "ipv6/conf/all/forwarding=1", "netfilter/nf_conntrack_tcp_loose="+loose)
	for ns, addresses := range map[*netnstest.Namespace][]string{n: {"client fd02::1/64", "pods fd01::ffff/64"},
		w.client: {"eth0 fd02::2/64"}, w.pods: {"eth0 fd01::1/64", "eth0 fd01::2/64"}} {
		for _, a := range addresses {
			name, address, _ := strings.Cut(a, " ")
			ns.Add(t, name, address)
		}
	}
	w.client.Route(t, "default", "fd02::1", "eth0")
	w.pods.Route(t, "default", "fd01::ffff", "eth0")
	n.Route(t, "fd96::/112", "fd01::1", "pods")
	for _, address := range []string{"10.1.0.1:5080", "10.1.0.2:5080", "[fd01::1]:5080", "[fd01::2]:5080"} {
		var server net.Listener
		if err := w.pods.Do(func() (err error) { server, err = net.Listen("tcp", address); return err }); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { server.Close() })
		go func() {
			for {
				c, err := server.Accept()
				if err != nil {
					return
				}
				w.accepted <- c
			}
		}()
	}
	return w
}

// program makes the node forward connections of the service to the pods with this number.
func (w *resetWorld) program(t *testing.T, pod int, masquerade bool) {
	rules := fmt.Sprintf(`
		ip daddr . tcp dport { 10.96.0.10 . 80, 10.2.0.1 . 30080 } dnat ip to 10.1.0.%d:5080
		ip6 daddr fd96::10 tcp dport 80 dnat ip6 to [fd01::%d]:5080`, pod, pod)
	post := ""
	if masquerade {
		post = "oifname pods masquerade"
	}
	w.node.RunWith(t, fmt.Sprintf(`
		table inet test
		delete table inet test
		table inet test {
			chain prerouting { type nat hook prerouting priority dstnat; %[1]s
			}
			chain output { type nat hook output priority -100; %[1]s
			}
			chain postrouting { type nat hook postrouting priority srcnat; %[2]s
			}
			chain forward { type filter hook forward priority filter; ct state invalid drop
			}
		}`, rules, post), "nft", "-f", "-")
}

// connect returns both ends of a new connection.
func (w *resetWorld) connect(t *testing.T, from *netnstest.Namespace, to string) (client, server net.Conn) {
	t.Helper()
	if err := from.Do(func() (err error) { client, err = net.DialTimeout("tcp", to, time.Minute); return err }); err != nil {
		t.Fatalf("connect to %s: %v", to, err)
	}
	server = <-w.accepted
	t.Cleanup(func() { client.Close(); server.Close() })
	return client, server
}

// endsSoon returns nil if a reset ends the connection within the given time. It sends
// nothing, and only waits for data.
func endsSoon(c net.Conn, within time.Duration) error {
	c.SetReadDeadline(time.Now().Add(within))
	_, err := c.Read(make([]byte, 1))
	if errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.ECONNABORTED) {
		return nil
	}
	return fmt.Errorf("%v, want a reset", err)
}

// exchanges reports whether both ends can exchange data.
func exchanges(client, server net.Conn) error {
	for _, c := range [][2]net.Conn{{client, server}, {server, client}} {
		c[1].SetReadDeadline(time.Now().Add(time.Minute))
		if _, err := c[0].Write([]byte("!")); err != nil {
			return err
		}
		if _, err := c[1].Read(make([]byte, 1)); err != nil {
			return err
		}
	}
	return nil
}

// TestConnectionsToLostEndpointsAreReset uses idle connections. Pod 1 lives, but is no longer
// ready.
func TestConnectionsToLostEndpointsAreReset(t *testing.T) {
	const web = "ip 10.96.0.10 fd96::10\nport 80:30080/TCP\n"
	for _, loose := range []string{"0", "1"} {
		for _, masquerade := range []bool{false, true} {
			t.Run(fmt.Sprintf("loose=%s masquerade=%t", loose, masquerade), func(t *testing.T) {
				n, opts := newNamespace(t)
				w := newResetWorld(t, n, loose)
				r, _ := startReconciler(t, opts)
				before := services(t, map[string]string{"web": web + "reset\nready 10.1.0.1 10.1.0.2 fd01::1 fd01::2"})
				syncAndFlush(t, r, wholePass(before))

				type pair struct{ client, server net.Conn }
				lost, kept := map[string]pair{}, map[string]pair{}
				for pod, pairs := range map[int]map[string]pair{1: lost, 2: kept} {
					w.program(t, pod, masquerade)
					for name, from := range map[string]*netnstest.Namespace{"pod": w.client, "node": n} {
						for _, to := range []string{"10.96.0.10:80", "[fd96::10]:80", "10.2.0.1:30080"} {
							client, server := w.connect(t, from, to)
							pairs[name+" "+to] = pair{client, server}
						}
					}
				}
				now := services(t, map[string]string{"web": web + "reset\nready 10.1.0.2 fd01::2\ndying 10.1.0.1 fd01::1"})
				began := time.Now()
				if err := r.Sync(t.Context(), changesBetween(before, now)); err != nil {
					t.Fatal(err)
				}
				for name, p := range lost {
					if err := endsSoon(p.client, 10*time.Second); err != nil {
						t.Errorf("client %s: %v", name, err)
					}
				}
				clients := time.Since(began)
				for name, p := range lost {
					if err := endsSoon(p.server, 10*time.Second); err != nil {
						t.Errorf("server of %s: %v", name, err)
					}
				}
				t.Logf("clients ended after %s, servers after %s", clients, time.Since(began))
				syncAndFlush(t, r, changesBetween(now, now))
				for name, p := range kept {
					if err := exchanges(p.client, p.server); err != nil {
						t.Errorf("kept connection of %s: %v", name, err)
					}
				}
				// The segments of the resetter, and the answers to them, leave no
				// entries.
				for _, entry := range tableEntries(t, n.FD) {
					if !strings.Contains(entry, "by 10.1.0.2") && !strings.Contains(entry, "by [fd01::2") {
						t.Errorf("there is an entry %s", entry)
					}
				}
			})
		}
	}
}

// TestOnlyServicesWithResetsLoseConnections removes an endpoint of a service without resets.
func TestOnlyServicesWithResetsLoseConnections(t *testing.T) {
	n, opts := newNamespace(t)
	w := newResetWorld(t, n, "1")
	r, _ := startReconciler(t, opts)
	before := services(t, map[string]string{"web": "ip 10.96.0.10\nport 80/TCP\nready 10.1.0.1 10.1.0.2"})
	syncAndFlush(t, r, wholePass(before))
	w.program(t, 1, false)
	client, server := w.connect(t, w.client, "10.96.0.10:80")
	syncAndFlush(t, r, changesBetween(before, services(t, map[string]string{"web": "ip 10.96.0.10\nport 80/TCP\nready 10.1.0.2"})))
	if err := exchanges(client, server); err != nil {
		t.Error(err)
	}
}

// TestListenersAreNotDestroyed uses a client with the same source port as a listener of the
// node. The search of sock_diag finds this listener.
func TestListenersAreNotDestroyed(t *testing.T) {
	n, opts := newNamespace(t)
	w := newResetWorld(t, n, "1")
	var listener net.Listener
	if err := n.Do(func() (err error) { listener, err = net.Listen("tcp", ":44444"); return err }); err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	s, err := sockdiag.Open(opts.NetNS)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	c := udp(44444, "10.96.0.10:80", "10.1.0.1:5080")
	if destroyed, err := s.DestroyTCP(c.from, c.to); destroyed || err != nil {
		t.Errorf("destroyed: %t, error %v", destroyed, err)
	}
	if err := w.client.Do(func() error {
		c, err := net.DialTimeout("tcp", "10.2.0.1:44444", time.Minute)
		if err == nil {
			c.Close()
		}
		return err
	}); err != nil {
		t.Error(err)
	}
}

// TestManyConnectionsAreReset resets all connections of a service. Clients of another
// service do not answer.
func TestManyConnectionsAreReset(t *testing.T) {
	const count, silent = 3000, 500
	n, opts := newNamespace(t)
	w := newResetWorld(t, n, "1")
	r, _ := startReconciler(t, opts)
	texts := map[string]string{"web": "ip 10.96.0.10\nport 80/TCP\nreset\n", "other": "ip 10.96.0.11\nport 80/TCP\nreset\n"}
	state := func(end string) map[string]string {
		return map[string]string{"web": texts["web"] + end, "other": texts["other"] + end}
	}
	before := services(t, state("ready 10.1.0.1 10.1.0.2"))
	syncAndFlush(t, r, wholePass(before))
	w.program(t, 1, false)
	var clients []net.Conn
	for range count {
		client, _ := w.connect(t, w.client, "10.96.0.10:80")
		clients = append(clients, client)
	}
	var entries []connection
	for i := range silent {
		c := tcp(udp(uint16(20_000+i), "10.96.0.11:80", "10.1.0.1:5080"))
		entries = append(entries, c)
	}
	createEntries(t, n.FD, entries...)
	began := time.Now()
	if err := r.Sync(t.Context(), changesBetween(before, services(t, state("ready 10.1.0.2")))); err != nil {
		t.Fatal(err)
	}
	for _, c := range clients {
		if err := endsSoon(c, time.Minute); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d connections ended after %s", count, time.Since(began))
	syncAndFlush(t, r, wholePass(services(t, state("ready 10.1.0.2"))))
	t.Logf("%d clients that do not answer were given up after %s", silent, time.Since(began))
	if left := tableEntries(t, n.FD); len(left) > 0 {
		t.Errorf("%d entries are left: %s", len(left), left[0])
	}
}
