// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
	corev1 "k8s.io/api/core/v1"
)

// TestBackendsReplaceEachOther moves a node from one backend to another while clients use
// a service. Each backend is ready before the one before it is stopped and cleaned up.
func TestBackendsReplaceEachOther(t *testing.T) {
	w := newWorld(t)
	netnstest.Listen(t, w.pods.Do, net.JoinHostPort(pod1, fmt.Sprint(udpPort)), func(c net.Conn) { io.Copy(c, c) })
	web := w.service("web", corev1.ServiceSpec{
		Type: corev1.ServiceTypeNodePort, Ports: []corev1.ServicePort{{Name: "web", Protocol: corev1.ProtocolTCP, Port: 80}},
	})
	w.lead(web, pod1, nodeName)
	w.node.Route(t, "default", "10.2.0.2", "client") // without a route, the node cannot send to cluster IPs
	before := w.configuration()

	backends := []string{"nftables", "iptables", "nftables"}
	address := func(i int) string { return fmt.Sprintf("127.0.0.1:%d", 10256+i) }
	end := w.run(backends[0], address(0))
	var clients traffic
	clusterIP := net.JoinHostPort(web.Spec.ClusterIP, "80")
	nodePort := net.JoinHostPort(nodeIP, fmt.Sprint(web.Spec.Ports[0].NodePort))
	clients.start(t, "client to the cluster IP", w.client, clusterIP)
	clients.start(t, "client to the node port", w.client, nodePort)
	clients.start(t, "node to the cluster IP", w.node, clusterIP)
	for i, backend := range backends[1:] {
		endNext := w.run(backend, address(i+1))
		if err := end(os.Interrupt); err != nil {
			t.Errorf("kpng with %s returned %v", backends[i], err)
		}
		w.cleanUp(backends[i])
		clients.mustContinue(t)
		end = endNext
	}
	clients.end()
	if err := end(os.Interrupt); err != nil {
		t.Error(err)
	}
	w.cleanUp(backends[len(backends)-1])
	if after := w.configuration(); after != before {
		t.Errorf("configuration of the node before:\n%s\nand after cleanup:\n%s", before, after)
	}
}

func (w *world) cleanUp(backend string) {
	w.t.Helper()
	sh(w.t, w.node.Command(append(least, w.kpng, "cleanup", backend)...)...)
}

// configuration returns what backends may change on the node. It omits IPv6's link-local
// addresses and multicast routes, which the kernel adds after a delay.
func (w *world) configuration() string {
	var all strings.Builder
	for _, command := range []string{"nft list ruleset", "ipset list", "ip -oneline address", "ip route show table all", "ip rule"} {
		fmt.Fprintf(&all, "$ %s\n", command)
		for line := range strings.Lines(sh(w.t, w.node.Command(strings.Fields(command)...)...)) {
			if !strings.Contains(line, "fe80:") && !strings.Contains(line, "ff00::/8") {
				all.WriteString(line)
			}
		}
	}
	return all.String()
}

// traffic counts the requests of clients. Each client sends a request every 20 ms over an
// established connection, and another one over a new connection.
type traffic struct {
	clients sync.WaitGroup
	ended   chan struct{}

	mu       sync.Mutex
	requests int
	failures []string
}

func (tr *traffic) start(t *testing.T, name string, from namespace, to string) {
	t.Helper()
	if tr.ended == nil {
		tr.ended = make(chan struct{})
		t.Cleanup(tr.end)
	}
	dial := func() (c net.Conn, err error) {
		err = from.Do(func() error { c, err = net.DialTimeout("tcp", to, time.Minute); return err })
		return c, err
	}
	established, err := dial()
	if err != nil {
		t.Fatal(err)
	}
	tr.clients.Go(func() {
		defer established.Close()
		for {
			select {
			case <-tr.ended:
				return
			case <-time.After(20 * time.Millisecond):
			}
			began := time.Now()
			err := exchange(established)
			tr.add(name+" over one connection", began, err)
			if err != nil {
				return
			}
			began = time.Now()
			c, err := dial()
			if err == nil {
				err = exchange(c)
				c.Close()
			}
			tr.add(name+" over a new connection", began, err)
		}
	})
}

// exchange sends a line to an echo server and waits until it comes back.
func exchange(c net.Conn) error {
	const line = "hello\n"
	c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := io.WriteString(c, line); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, len(line)))
	return err
}

func (tr *traffic) add(what string, began time.Time, err error) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	tr.requests++
	if took := time.Since(began); err != nil || took > time.Second {
		tr.failures = append(tr.failures, fmt.Sprintf("%s at %s took %v: %v", what, began.Format("15:04:05.000"), took.Round(time.Millisecond), err))
	}
}

// mustContinue waits for 100 more requests, and checks that no request has failed or took
// longer than a second, in which TCP would repeat a lost packet.
func (tr *traffic) mustContinue(t *testing.T) {
	t.Helper()
	count := func() int { tr.mu.Lock(); defer tr.mu.Unlock(); return tr.requests }
	first := count()
	await(t, "100 more requests", true, func() bool { return count() >= first+100 })
	tr.mu.Lock()
	defer tr.mu.Unlock()
	for _, f := range tr.failures {
		t.Error(f)
	}
	t.Logf("%d requests", tr.requests)
}

func (tr *traffic) end() {
	select {
	case <-tr.ended:
	default:
		close(tr.ended)
	}
	tr.clients.Wait()
}
