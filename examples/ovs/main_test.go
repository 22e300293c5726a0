// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/ovstest"
)

// TestPodsReachServices connects two pods to the bridge of a switch and runs the agent. The
// pods are also the endpoints of a service. Both pods must reach both endpoints, also after
// a restart of the switch and after the agent was killed.
func TestPodsReachServices(t *testing.T) {
	netnstest.NeedRoot(t)
	program := filepath.Join(t.TempDir(), "ovs-agent")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("build the agent: %v\n%s", err, out)
	}
	node := netnstest.New(t)
	s := ovstest.New(t, node.Start)
	pods := []*netnstest.Namespace{addPod(t, node, s, "10.244.1.10"), addPod(t, node, s, "10.244.1.11")}

	agent := exec.Command(program, "--manifests=demo.yaml", "--node-name=here", "--bridge="+ovstest.Bridge, "--ovs-rundir="+s.Dir)
	agent.Stderr = os.Stderr
	ended, err := node.Start(agent)
	if err != nil {
		t.Fatal(err)
	}
	kill := sync.OnceFunc(func() { agent.Process.Kill(); <-ended })
	defer kill()
	reached := func() bool { return both(pods[0]) && both(pods[1]) }
	ovstest.Await(t, "pods reach the service", reached)

	s.Kill()
	s.StartDaemon(t)
	ovstest.Await(t, "pods reach the service after a restart of the switch", reached)

	kill()
	ovstest.Await(t, "pods reach the service without the agent", reached)
	s.Ofctl(t, "del-flows", "cookie=0x6167656e74/-1")
	// Otherwise this test could not fail. The datapath may follow the flows a little longer.
	ovstest.Await(t, "pods do not reach the service without the agent's flows", func() bool { return answer(pods[0]) == "" })
}

// addPod connects a pod to the bridge, as the CNI plugin of a real agent does. The pod
// answers connections to port 8080 with its address.
func addPod(t *testing.T, node *netnstest.Namespace, s *ovstest.Switch, addr string) *netnstest.Namespace {
	t.Helper()
	pod := netnstest.New(t)
	port := "pod" + addr[len(addr)-2:]
	node.Join(t, port, pod, "eth0")
	link, err := pod.Links.LinkByName("eth0")
	if err == nil {
		hardware, _ := net.ParseMAC(mac(netip.MustParseAddr(addr)))
		err = pod.Links.LinkSetHardwareAddr(link, hardware)
	}
	if err == nil {
		err = pod.Do(func() error { return netnstest.DisableChecksumOffload("eth0") })
	}
	if err != nil {
		t.Fatal(err)
	}
	pod.Add(t, "eth0", addr+"/24")
	pod.Route(t, "default", "10.244.1.1", "eth0")
	s.Vsctl(t, "add-port", ovstest.Bridge, port)
	netnstest.Listen(t, pod.Do, addr+":8080", func(c net.Conn) { fmt.Fprint(c, addr) })
	return pod
}

// answer returns the address of the endpoint that a pod reaches, or "" after a second.
func answer(from *netnstest.Namespace) (endpoint string) {
	from.Do(func() error {
		c, err := net.DialTimeout("tcp", "10.96.0.80:80", time.Second)
		if err != nil {
			return err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(time.Second))
		b, err := io.ReadAll(c)
		endpoint = string(b)
		return err
	})
	return endpoint
}

// both reports whether 40 connections from a pod reach two endpoints.
func both(from *netnstest.Namespace) bool {
	var endpoints []string
	for range 40 {
		e := answer(from)
		if e == "" {
			return false
		}
		if !slices.Contains(endpoints, e) {
			endpoints = append(endpoints, e)
		}
	}
	return len(endpoints) == 2
}
