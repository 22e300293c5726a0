// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
)

// nodePortAt returns a service with a cluster IP that this host does not have, and a node
// port.
func nodePortAt(name string, nodePort int32, protocol api.Protocol) *testService {
	return serviceAt(name, "192.0.2.10", 80, protocol).modify(func(s *api.Service) {
		s.Type = api.NodePort
		s.Ports[0].NodePort = nodePort
		s.IPs.ExternalIPs = api.NewIPSet(netip.MustParseAddr("127.0.0.9"))
	})
}

// localhostWorld starts a backend that serves only node ports, at 127.0.0.1 and ::1.
func localhostWorld(t *testing.T) *world {
	return newWorld(t, settings{Options: Options{OnlyNodePorts: true}})
}

func TestOnlyNodePortsAreServed(t *testing.T) {
	w := localhostWorld(t)
	port := freePort(t, "127.0.0.1")
	w.set(
		nodePortAt("web", port, api.TCP).addEndpoints(namedServer(t, "a")).view(),
		nodePortAt("dns", port, api.UDP).addEndpoints(udpServer(t, "b")).view(),
	)
	if got := askOnce(t, "127.0.0.1", port); got != "a" {
		t.Errorf("a TCP connection reached %s", got)
	}
	if got := udpAsk(t, udpDial(t, "127.0.0.1", port)); got != "b" {
		t.Errorf("a UDP datagram reached %s", got)
	}
	if !refused(t, "127.0.0.9", 80) {
		t.Error("an external IP is served, too")
	}
	totals := func() string {
		var text string
		accepted := w.Totals(func(family api.Family, listeners, failures int64) {
			text += fmt.Sprintf("%s: %d listeners, %d failures; ", family, listeners, failures)
		})
		return fmt.Sprintf("%s%d accepted", text, accepted)
	}
	if got, want := totals(), "IPv4: 2 listeners, 0 failures; IPv6: 0 listeners, 0 failures; 2 accepted"; got != want {
		t.Errorf("totals %q, want %q", got, want)
	}
	w.source.Delete(key("web"))
	w.source.Delete(key("dns"))
	w.applied()
	if !refused(t, "127.0.0.1", port) {
		t.Error("the node port of a deleted service is served")
	}
	if got, want := totals(), "IPv4: 0 listeners, 0 failures; IPv6: 0 listeners, 0 failures; 2 accepted"; got != want {
		t.Errorf("totals %q, want %q", got, want)
	}
}

func TestNodePortsOnLocalhostHaveBothFamilies(t *testing.T) {
	w := localhostWorld(t)
	port := freePort(t, "::1")
	w.set(serviceAt("web", "2001:db8::10", 80, api.TCP).modify(func(s *api.Service) {
		s.Type = api.NodePort
		s.Ports[0].NodePort = port
	}).addEndpoints(namedServerAt(t, "six", "[::1]:0")).view())
	if got := askOnce(t, "::1", port); got != "six" {
		t.Errorf("connected to %s", got)
	}
}

// TestLocalhostIgnoresExternalPolicyLocal checks that connections from localhost reach
// endpoints on other nodes, like all traffic that starts on this node.
func TestLocalhostIgnoresExternalPolicyLocal(t *testing.T) {
	netnstest.NeedRoot(t)
	w := localhostWorld(t)
	port := freePort(t, "127.0.0.1")
	w.set(nodePortAt("web", port, api.TCP).modify(func(s *api.Service) { s.ExternalTrafficToLocal = true }).
		addScoped(api.Scopes{Internal: true, Cluster: true}, namedServer(t, "remote")).view())
	if got := askOnce(t, "127.0.0.1", port); got != "remote" {
		t.Errorf("connected to %s", got)
	}
}

// TestBusyPortOnLocalhost uses a port that another program has. Only the service of this
// port fails, and the service gets the port later.
func TestBusyPortOnLocalhost(t *testing.T) {
	w := localhostWorld(t)
	other, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	busy, free := int32(other.Addr().(*net.TCPAddr).Port), freePort(t, "127.0.0.1")
	server := namedServer(t, "a")
	err = w.setFailing(nodePortAt("busy", busy, api.TCP).addEndpoints(server).view(), nodePortAt("free", free, api.TCP).addEndpoints(server).view())
	if !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), fmt.Sprintf("127.0.0.1:%d/TCP", busy)) {
		t.Errorf("error %v, want one that names the address and says that it is in use", err)
	}
	if failing := w.driver.Status().Failing; len(failing) != 1 || failing[0].Key != key("busy") {
		t.Errorf("failing services %v", failing)
	}
	if got := askOnce(t, "127.0.0.1", free); got != "a" {
		t.Errorf("the other service reached %s", got)
	}
	other.Close()
	eventually(t, "the service gets its port", func() bool { return len(w.driver.Status().Failing) == 0 })
	if got := askOnce(t, "127.0.0.1", busy); got != "a" {
		t.Errorf("connected to %s", got)
	}
}
