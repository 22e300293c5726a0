// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/kpng-project/kpng/api"
)

var localhostNeeds = []Feature{NodePorts, LocalhostNodePorts}

var localhostCases = []testCase{
	{name: "a node port on localhost leads to every ready endpoint, on this node and elsewhere", needs: localhostNeeds, run: func(s *scene) {
		s.withLocalhost()
		web := s.addService("web").withNodePort().withEndpoints(asReady(s.a), asReady(s.d), asDraining(s.b))
		s.publish()
		s.mustReach(s.node, web.localhost(), s.a, s.d)
		s.mustReach(s.outside, web.nodePort(0), s.a, s.d)
	}},
	{name: "a node port on localhost may lead to endpoints in the host network", needs: localhostNeeds, run: func(s *scene) {
		s.withLocalhost()
		web := s.addService("web").withNodePort().withEndpoints(asReady(s.node), asReady(s.node2))
		s.publish()
		s.mustReach(s.node, web.localhost(), s.node, s.node2)
	}},
	{name: "on localhost, a new endpoint gets connections, and a removed endpoint gets none", needs: localhostNeeds, run: func(s *scene) {
		s.withLocalhost()
		web := s.addService("web").withNodePort().withEndpoints(asReady(s.a))
		s.publish()
		s.mustReach(s.node, web.localhost(), s.a)
		web.withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		s.mustReach(s.node, web.localhost(), s.a, s.d)
		web.withEndpoints(asReady(s.d))
		s.publish()
		s.mustReach(s.node, web.localhost(), s.d)
	}},
	{name: "on localhost, a UDP flow to a removed endpoint moves to another endpoint", needs: append([]Feature{UDP, FlowCleanup}, localhostNeeds...), run: func(s *scene) {
		s.withLocalhost()
		web := s.addService("web").withNodePort().withEndpoints(asReady(s.a))
		s.publish()
		f := s.openFlow(s.node, api.UDP, web.localhost())
		f.mustReach(s.a)
		web.withEndpoints(asReady(s.d))
		s.publish()
		s.eventually(func() { f.mustReach(s.d) })
	}},
	{name: "a node port on localhost refuses connections while its service has no endpoints", needs: append([]Feature{Reject}, localhostNeeds...), run: func(s *scene) {
		s.withLocalhost()
		web := s.addService("web").withNodePort()
		s.publish()
		s.mustRefuse(s.node, web.localhost())
		web.withEndpoints(asReady(s.d))
		s.publish()
		s.mustReach(s.node, web.localhost(), s.d)
		web.withEndpoints(asUnready(s.d))
		s.publish()
		s.mustRefuse(s.node, web.localhost())
	}},
	{name: "a node port on localhost is closed when its service is deleted or changes to another", needs: localhostNeeds, run: func(s *scene) {
		s.withLocalhost()
		web, dns := s.addService("web").withNodePort().withEndpoints(asReady(s.a)), s.addService("dns").withNodePort().withEndpoints(asReady(s.b))
		s.publish()
		deleted, changed := web.localhost(), dns.localhost()
		s.mustReach(s.node, deleted, s.a)
		s.mustReach(s.node, changed, s.b)
		s.remove(web)
		dns.withNodePort()
		s.publish()
		s.mustRefuse(s.node, deleted)
		s.mustRefuse(s.node, changed)
		s.mustReach(s.node, dns.localhost(), s.b)
	}},
	{name: "connections to localhost ignore external policy Local", needs: localhostNeeds, run: func(s *scene) {
		s.withLocalhost()
		web := s.addService("web").withNodePort().externalLocal().withEndpoints(asReady(s.a), asReady(s.d))
		away := s.addService("away").withNodePort().externalLocal().withEndpoints(asReady(s.d))
		s.publish()
		s.mustReach(s.node, web.localhost(), s.a, s.d)
		s.mustReach(s.node, away.localhost(), s.d)
	}},
	{name: "session affinity applies on localhost", needs: append([]Feature{Affinity}, localhostNeeds...), run: func(s *scene) {
		s.withLocalhost()
		web := s.addService("web").withNodePort().withAffinity(10800).withEndpoints(asReady(s.a), asReady(s.b), asReady(s.d))
		s.publish()
		for _, protocol := range s.protocols {
			first := s.reachedEndpoint(protocol, s.node, web.localhost())
			for range connectionsPerCheck {
				if now := s.reachedEndpoint(protocol, s.node, web.localhost()); now != first {
					s.failf("%s: the node moved from %s to %s", protocol, first, now)
				}
			}
		}
	}},
	{name: "a port on localhost that is in use disturbs no other service and is served when it is free", needs: localhostNeeds, run: func(s *scene) {
		s.withLocalhost()
		web, other := s.addService("web").withNodePort().withEndpoints(asReady(s.a)), s.addService("other").withNodePort().withEndpoints(asReady(s.b))
		var taken net.Listener
		s.must(s.node.Do(func() (err error) { taken, err = net.Listen("tcp", web.localhost().String()); return err }))
		s.addCleanup(func() error {
			if err := taken.Close(); !errors.Is(err, net.ErrClosed) {
				return err
			}
			return nil
		})
		s.publishNow()
		s.eventually(func() {
			s.mustReach(s.node, other.localhost(), s.b)
			s.mustReach(s.outside, web.nodePort(0), s.a)
		})
		s.must(taken.Close())
		s.eventually(func() { s.mustReach(s.node, web.localhost(), s.a) })
	}},
	{name: "node ports on localhost leave the kernel setting route_localnet at 0", needs: localhostNeeds, run: func(s *scene) {
		s.withLocalhost()
		web := s.addService("web").withNodePort().withEndpoints(asReady(s.a))
		s.publish()
		s.mustReach(s.node, web.localhost(), s.a)
		s.must(s.node.Do(func() error {
			settings, err := filepath.Glob("/proc/sys/net/ipv4/conf/*/route_localnet")
			for _, setting := range settings {
				value, readErr := os.ReadFile(setting)
				if readErr != nil {
					return readErr
				}
				if text := strings.TrimSpace(string(value)); text != "0" {
					return fmt.Errorf("%s is %s", setting, text)
				}
			}
			return err
		}))
	}},
}

// withLocalhost restarts the proxy so that node ports are also at loopback addresses.
func (s *scene) withLocalhost() {
	s.restartWith(func(site *Site) {
		site.NodePortCIDRs = append(site.NodePortCIDRs[:len(site.NodePortCIDRs):len(site.NodePortCIDRs)], netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128"))
	})
	s.localhost = true
	s.addCleanup(func() error { s.localhost = false; return nil })
}

// localhost returns the node port at the loopback address.
func (svc *service) localhost() netip.AddrPort {
	return netip.AddrPortFrom(loopback(svc.scene.family), uint16(svc.Spec.Ports[0].NodePort))
}
