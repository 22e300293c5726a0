// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/test/traffic"
	corev1 "k8s.io/api/core/v1"
)

// TestBackendsReplaceEachOther moves a node from one backend to another while clients use
// a service. The test stops and cleans up a backend only after the next backend is ready.
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
	clients := traffic.New(t)
	clusterIP := net.JoinHostPort(web.Spec.ClusterIP, "80")
	nodePort := net.JoinHostPort(nodeIP, fmt.Sprint(web.Spec.Ports[0].NodePort))
	startClients(t, clients, "client to the cluster IP", w.client, clusterIP)
	startClients(t, clients, "client to the node port", w.client, nodePort)
	startClients(t, clients, "node to the cluster IP", w.node, clusterIP)
	for i, backend := range backends[1:] {
		endNext := w.run(backend, address(i+1))
		if err := end(os.Interrupt); err != nil {
			t.Errorf("kpng with %s returned %v", backends[i], err)
		}
		w.cleanUp(backends[i])
		made := clients.Made()
		await(t, "100 more requests", true, func() bool { return clients.Made() >= made+100 })
		if failed, slow := clients.Report(t, backend+" in place of "+backends[i]); failed+slow > 0 {
			t.Errorf("%d requests failed, %d may have lost a packet", failed, slow)
		}
		end = endNext
	}
	clients.End()
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

// configuration returns the parts of the node's network configuration that backends may
// change: rules, IP sets, addresses and routes. It omits IPv6's link-local addresses and
// multicast routes, which the kernel adds after a delay.
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

// startClients starts two clients of an echo server, in the network namespace from. The
// first client sends all requests over one connection, and the second client uses a new
// connection for each request.
func startClients(t *testing.T, tr *traffic.Traffic, name string, from namespace, to string) {
	t.Helper()
	dial := func() (net.Conn, error) { return net.DialTimeout("tcp", to, time.Minute) }
	var established net.Conn
	if err := from.Do(func() (err error) { established, err = dial(); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { established.Close() })
	tr.Start(name+" over one connection", from.Namespace, func() error { return exchange(established) })
	tr.Start(name+" over new connections", from.Namespace, func() error {
		c, err := dial()
		if err != nil {
			return err
		}
		defer c.Close()
		return exchange(c)
	})
}

// exchange sends a line to an echo server and waits until the server has sent it back.
func exchange(c net.Conn) error {
	const line = "hello\n"
	c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := io.WriteString(c, line); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, len(line)))
	return err
}
