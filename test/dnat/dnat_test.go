// SPDX-License-Identifier: Apache-2.0

// Package dnat runs examples/python-dnat against a server of frontends, and sends
// packets through its rules.
package dnat

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/remote"
	"github.com/kpng-project/kpng/test/netns"
)

const (
	debian = "/usr/bin/python3" // has what python3-grpc-tools installs
	script = "../../examples/python-dnat/dnat.py"
)

// TestMessagesCompileWithDebiansCompiler compiles all messages with the oldest
// compiler that clients in Python have.
func TestMessagesCompileWithDebiansCompiler(t *testing.T) {
	for _, file := range []string{"api/localv1/localv1.proto", "api/clusterv1/clusterv1.proto"} {
		cmd := exec.CommandContext(t.Context(), debian, "-m", "grpc_tools.protoc", "-I.", "--python_out="+t.TempDir(), file)
		cmd.Dir = "../.."
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("compile %s (Debian: apt-get install python3-grpc-tools): %v\n%s", file, err, out)
		}
	}
}

// TestScript has a node with two pods and a client beside it.
func TestScript(t *testing.T) {
	node, client := newNamespace(t, "node"), newNamespace(t, "client")
	run(t, "ip", "link", "add", "client", "netns", node, "type", "veth", "peer", "name", "node", "netns", client)
	for _, args := range [][]string{
		{"-n", node, "addr", "add", "192.0.2.1/24", "dev", "client"},
		{"-n", node, "addr", "add", "10.1.0.1/32", "dev", "lo"},
		{"-n", node, "addr", "add", "10.1.0.2/32", "dev", "lo"},
		{"-n", node, "link", "set", "client", "up"},
		{"-n", client, "addr", "add", "192.0.2.2/24", "dev", "node"},
		{"-n", client, "addr", "add", "192.0.2.3/24", "dev", "node"},
		{"-n", client, "link", "set", "node", "up"},
		{"-n", node, "route", "add", "default", "via", "192.0.2.2"}, // somewhere to send what is not translated
		{"-n", client, "route", "add", "default", "via", "192.0.2.1"},
	} {
		run(t, "ip", args...)
	}
	for _, pod := range []string{"10.1.0.1", "10.1.0.2"} {
		netns.Named(node).Listen(t, pod+":8080", func(c net.Conn) { fmt.Fprintln(c, pod) })
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
	// write has the cluster be the service with these pods, by the nodes on which they run.
	write := func(pods map[string]string) {
		slice := &api.EndpointSlice{
			Namespace: "default", Name: "web-1", ServiceName: "web", Family: api.IPv4,
			Ports: []api.EndpointPort{{Name: "http", Protocol: api.TCP, Port: 8080}},
		}
		for pod, on := range pods {
			slice.Endpoints = append(slice.Endpoints, api.SliceEndpoint{
				Addr: netip.MustParseAddr(pod), NodeName: on, Conditions: api.Conditions{Ready: true, Serving: true},
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
	check := func(from, source, to, want string) {
		t.Helper()
		eventually(t, fmt.Sprintf("%s (%s) to %s", from, source, to), want, func() string { return ask(from, source, to) })
	}
	check(node, "", "10.96.0.1:80", both)
	check(client, "", "10.96.0.1:80", both)
	check(client, "", "198.51.100.1:80", both)
	check(client, "", "192.0.2.1:30080", both)
	check(client, "192.0.2.3", "203.0.113.1:80", both)
	check(client, "192.0.2.2", "203.0.113.1:80", "no answer")

	// With policy Local and no pod here, only what starts here gets an answer.
	write(map[string]string{"10.1.0.1": "another"})
	check(client, "", "10.96.0.1:80", "10.1.0.1")
	check(client, "", "198.51.100.1:80", "no answer")
	check(node, "", "198.51.100.1:80", "10.1.0.1")

	write(nil)
	check(client, "", "198.51.100.1:80", "refused")
	check(node, "", "10.96.0.1:80", "refused")
}

func addrs(a string) api.IPSet { return api.NewIPSet(netip.MustParseAddr(a)) }

// newNamespace makes a network namespace that goes with the test.
func newNamespace(t *testing.T, name string) string {
	t.Helper()
	name = fmt.Sprintf("kpng-%d-%s", os.Getpid(), name)
	run(t, "ip", "netns", "add", name)
	t.Cleanup(func() { run(t, "ip", "netns", "del", name) })
	run(t, "ip", "-n", name, "link", "set", "lo", "up")
	return name
}

func run(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(context.WithoutCancel(t.Context()), name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
}

// serve serves the state on a unix socket until the test ends, and returns its address.
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

// start runs the script in a namespace until the test ends.
func start(t *testing.T, namespace, address string) {
	t.Helper()
	cmd := exec.Command("ip", "netns", "exec", namespace, debian, script, address, "node")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
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

// ask returns the pods that answer connections from a source address in a namespace,
// in order, or what happens to all of them instead.
func ask(namespace, source, to string) string {
	var answers []string
	for range 20 {
		answer := askOnce(namespace, source, to)
		if !slices.Contains(answers, answer) {
			answers = append(answers, answer)
		}
		if answer == "no answer" {
			break // each takes a while
		}
	}
	slices.Sort(answers)
	return strings.Join(answers, " ")
}

func askOnce(namespace, source, to string) string {
	dialer := net.Dialer{Timeout: 300 * time.Millisecond}
	if source != "" {
		dialer.LocalAddr = &net.TCPAddr{IP: net.ParseIP(source)}
	}
	var c net.Conn
	err := netns.Named(namespace)(func() (err error) { c, err = dialer.Dial("tcp", to); return err })
	switch {
	case err != nil && strings.Contains(err.Error(), "refused"):
		return "refused"
	case err != nil:
		return "no answer"
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(5 * time.Second))
	buffer := make([]byte, 100)
	n, err := c.Read(buffer)
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(buffer[:n]))
}

// eventually waits until get returns what is wanted.
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
