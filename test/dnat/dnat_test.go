// SPDX-License-Identifier: Apache-2.0

// Package dnat runs examples/python-dnat with a kpng server, and sends packets through
// the rules of the example.
package dnat

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/remote"
)

const (
	debian = "/usr/bin/python3" // Debian's Python, which can import Debian packages such as python3-grpc-tools
	script = "../../examples/python-dnat/dnat.py"
)

// TestMessagesCompileWithDebiansCompiler compiles the .proto files with Debian's protoc,
// which is the oldest protoc that Python clients use.
func TestMessagesCompileWithDebiansCompiler(t *testing.T) {
	for _, file := range []string{"api/localv1/localv1.proto", "api/clusterv1/clusterv1.proto"} {
		cmd := exec.CommandContext(t.Context(), debian, "-m", "grpc_tools.protoc", "-I.", "--python_out="+t.TempDir(), file)
		cmd.Dir = "../.."
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("compile %s (Debian: apt-get install python3-grpc-tools): %v\n%s", file, err, out)
		}
	}
}

// TestScript checks connections to two pods. The connections come from a client and from
// the node on which dnat.py runs.
func TestScript(t *testing.T) {
	node, client := netnstest.New(t), netnstest.New(t)
	node.Join(t, "client", client, "node")
	node.Add(t, "client", "192.0.2.1/24")
	node.Add(t, "lo", "10.1.0.1/32")
	node.Add(t, "lo", "10.1.0.2/32")
	client.Add(t, "node", "192.0.2.2/24")
	client.Add(t, "node", "192.0.2.3/24")
	node.Route(t, "default", "192.0.2.2", "client") // the route of packets that no rule translates
	client.Route(t, "default", "192.0.2.1", "node")
	for _, pod := range []string{"10.1.0.1", "10.1.0.2"} {
		netnstest.Listen(t, node.Do, pod+":8080", func(c net.Conn) { fmt.Fprintln(c, pod) })
	}

	state := cluster.New(cluster.Options{Resumable: true})
	service := &api.Service{
		Namespace: "default", Name: "web", Type: api.LoadBalancer,
		IPs: api.ServiceIPs{
			ClusterIPs: addrs("10.96.0.1"), ExternalIPs: addrs("198.51.100.1"), LoadBalancerIPs: addrs("203.0.113.1"),
		},
		Ports: []api.PortMapping{{Name: "http", Protocol: api.TCP, Port: 80, NodePort: 30080, TargetPort: 8080}},
		SourceRanges: []api.SourceRanges{{
			TargetIPs: addrs("203.0.113.1"), Prefixes: []netip.Prefix{netip.MustParsePrefix("192.0.2.3/32")},
		}},
		ExternalTrafficToLocal: true,
	}
	// write replaces the service's pods. nodeByPod maps each pod's address to its node.
	write := func(nodeByPod map[string]string) {
		slice := &api.EndpointSlice{
			Namespace: "default", Name: "web-1", ServiceName: "web", Family: api.IPv4,
			Ports: []api.EndpointPort{{Name: "http", Protocol: api.TCP, Port: 8080}},
		}
		for pod, on := range nodeByPod {
			slice.Endpoints = append(slice.Endpoints, api.SliceEndpoint{
				Addr: netip.MustParseAddr(pod), Details: &api.EndpointDetails{NodeName: on}, Conditions: api.Conditions{Ready: true, Serving: true},
			})
		}
		state.Update(func(tx *cluster.Tx) {
			tx.SetNode(&api.Node{Name: "node"})
			tx.SetService(service)
			tx.SetSlice(slice)
		})
	}
	write(map[string]string{"10.1.0.1": "node", "10.1.0.2": "node"})
	state.SetSynced()
	start(t, node, serve(t, state))

	both := "10.1.0.1 10.1.0.2"
	check := func(from *netnstest.Namespace, source, to, want string) {
		t.Helper()
		place := "the client"
		if from == node {
			place = "the node"
		}
		eventually(t, fmt.Sprintf("%s (%s) to %s", place, source, to), want, func() string { return ask(from, source, to) })
	}
	check(node, "", "10.96.0.1:80", both)
	check(client, "", "10.96.0.1:80", both)
	check(client, "", "198.51.100.1:80", both)
	check(client, "", "192.0.2.1:30080", both)
	check(client, "192.0.2.3", "203.0.113.1:80", both)
	check(client, "192.0.2.2", "203.0.113.1:80", "no answer")

	// With policy Local and no pod on this node, the external IP answers only connections
	// from this node.
	write(map[string]string{"10.1.0.1": "another"})
	check(client, "", "10.96.0.1:80", "10.1.0.1")
	check(client, "", "198.51.100.1:80", "no answer")
	check(node, "", "198.51.100.1:80", "10.1.0.1")

	write(nil)
	check(client, "", "198.51.100.1:80", "refused")
	check(node, "", "10.96.0.1:80", "refused")
}

func addrs(a string) api.IPSet { return api.NewIPSet(netip.MustParseAddr(a)) }

// serve runs a kpng server with the given state until the test ends. The server listens
// on a unix socket. The result is the address of this socket.
func serve(t *testing.T, state *cluster.State) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kpng.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server, err := remote.NewServer(state, remote.ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- server.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	return "unix://" + path
}

func start(t *testing.T, n *netnstest.Namespace, address string) {
	t.Helper()
	cmd := exec.Command(debian, script, address, "node")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := n.Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if t.Failed() {
			t.Logf("the script printed:\n%s", &out)
		}
	})
}

// ask makes 20 connections from a namespace to an address. If source is not empty, it is
// the source address of the connections. ask returns the different results, sorted: the
// addresses of the pods that answered, "no answer" or "refused".
func ask(n *netnstest.Namespace, source, to string) string {
	var answers []string
	for range 20 {
		answer := askOnce(n, source, to)
		if !slices.Contains(answers, answer) {
			answers = append(answers, answer)
		}
		if answer == "no answer" {
			break // more attempts would take long
		}
	}
	slices.Sort(answers)
	return strings.Join(answers, " ")
}

func askOnce(n *netnstest.Namespace, source, to string) string {
	dialer := net.Dialer{Timeout: 300 * time.Millisecond}
	if source != "" {
		dialer.LocalAddr = &net.TCPAddr{IP: net.ParseIP(source)}
	}
	var c net.Conn
	err := n.Do(func() (err error) { c, err = dialer.Dial("tcp", to); return err })
	switch {
	case err != nil && strings.Contains(err.Error(), "refused"):
		return "refused"
	case err != nil:
		return "no answer"
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(5 * time.Second))
	buffer := make([]byte, 100)
	read, err := c.Read(buffer)
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(buffer[:read]))
}

func eventually(t *testing.T, what, want string, get func() string) {
	t.Helper()
	var got string
	for end := time.Now().Add(time.Minute); time.Now().Before(end); {
		if got = get(); got == want {
			return
		}
	}
	t.Fatalf("%s:\n%s", what, cmp.Diff(want, got))
}
