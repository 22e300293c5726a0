// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/sink/sinktest"
	"github.com/kpng-project/kpng/test/internal/apiserver"
	"github.com/kpng-project/kpng/watcher"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// lossy is a tenant whose services change while its proxy is disconnected. The name of
// each service and EndpointSlice says how the object changes.
type lossy struct {
	*tenant
	services map[string]*corev1.Service
	slices   map[string]*discoveryv1.EndpointSlice

	wire *wire
	rec  *sinktest.Recorder
	stop func()
}

// newLossy creates a tenant, starts its proxy and waits until the proxy is in sync.
func newLossy(t *testing.T, server *apiserver.Server) *lossy {
	t.Helper()
	l := &lossy{
		tenant:   newTenant(t, server),
		services: map[string]*corev1.Service{},
		slices:   map[string]*discoveryv1.EndpointSlice{},
		wire:     newWire(),
		rec:      sinktest.NewRecorder(t, nil),
	}
	names := []string{"again", "by-hand", "changes", "flips", "goes", "leaves", "moved-from", "moved-to", "sliced", "stays", "stamp", "unsliced", "zoned"}
	for i, name := range names {
		l.add(name, fmt.Sprintf("10.1.0.%d", i))
	}
	l.services["by-hand"].Spec.Selector = nil
	delete(l.slices["by-hand"].Labels, watcher.LabelServiceProxyName)
	zoned := l.slices["zoned"]
	zoned.Endpoints = append(zoned.Endpoints, newEndpoint("10.1.1.1", ""), newEndpoint("10.1.1.2", ""))
	for i, zone := range []string{"a", "b", "c"} {
		zoned.Endpoints[i].Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: zone}}}
	}
	l.put(l.node("a"))
	for _, name := range names {
		l.put(l.services[name], l.slices[name])
	}

	p, stop := run(t, kpng.Options{
		Config:   l.wire.tap(server.Config()),
		NodeName: l.name,
		Services: watcher.Options{ServiceProxyName: l.name},
	}, l.rec)
	l.stop = stop
	if err := p.WaitApplied(within(t)); err != nil {
		t.Fatal(err)
	}
	l.expect(1, l.stateBefore())
	return l
}

func (l *lossy) add(name, addr string) {
	l.services[name] = newService(name, l.name, servicePort("", 80, 80))
	l.slices[name] = newSlice(name, l.services[name], slicePorts("", 80), newEndpoint(addr, ""))
}

// stateBefore returns the proxy's expected state before the changes.
func (l *lossy) stateBefore() []string {
	return []string{
		"again IPv4 80", "  10.1.0.0 80",
		"by-hand IPv4 80", "  10.1.0.1 80",
		"changes IPv4 80", "  10.1.0.2 80",
		"flips IPv4 80", "  10.1.0.3 80",
		"goes IPv4 80", "  10.1.0.4 80",
		"leaves IPv4 80", "  10.1.0.5 80",
		"moved-from IPv4 80", "  10.1.0.6 80",
		"moved-to IPv4 80", "  10.1.0.7 80",
		"sliced IPv4 80", "  10.1.0.8 80",
		"stamp IPv4 80", "  10.1.0.10 80",
		"stays IPv4 80", "  10.1.0.9 80",
		"unsliced IPv4 80", "  10.1.0.11 80",
		"zoned IPv4 80", "  10.1.0.12 80", "  10.1.1.1 80 draining", "  10.1.1.2 80 draining",
	}
}

// expect waits until the sink has received at least the given number of syncs, and the
// sink's state equals want.
func (l *lossy) expect(syncs int, want []string) {
	l.t.Helper()
	err := l.rec.Wait(within(l.t), func(all []sinktest.Sync) bool {
		return len(all) >= syncs && cmp.Diff(want, describe(l.rec.Views())) == ""
	})
	if err != nil {
		l.t.Fatalf("state of the sink after %d syncs (%v) (-want +got):\n%s",
			len(l.rec.Syncs()), err, cmp.Diff(want, describe(l.rec.Views())))
	}
}

// happen makes the changes that the services' names describe, and changes the
// node's zone. It writes to the given API server, which the proxy need not use.
func (l *lossy) happen(by *apiserver.Server) {
	l.t.Helper()
	n := l.through(by)
	n.remove(l.services["again"])
	n.put(l.services["again"])
	l.slices["by-hand"].Endpoints[0].Addresses[0] = "10.2.0.1"
	n.put(l.slices["by-hand"])
	l.services["changes"].Spec.Ports[0].Port = 81
	n.put(l.services["changes"])
	l.services["flips"].Spec.Ports[0].Port = 81
	n.put(l.services["flips"])
	l.services["flips"].Spec.Ports[0].Port = 80
	n.put(l.services["flips"])
	n.remove(l.services["goes"])
	l.services["leaves"].Labels[watcher.LabelServiceProxyName] = "somebody-else"
	n.put(l.services["leaves"])
	l.slices["moved-from"].Labels[discoveryv1.LabelServiceName] = "moved-to"
	n.put(l.slices["moved-from"])
	l.slices["sliced"].Endpoints[0].Addresses[0] = "10.2.0.8"
	n.put(l.slices["sliced"])
	n.remove(l.slices["unsliced"])
	l.add("brief", "10.2.0.1")
	n.put(l.services["brief"], l.slices["brief"])
	n.remove(l.services["brief"], l.slices["brief"])
	l.add("new", "10.2.0.2")
	n.put(l.services["new"], l.slices["new"])
	n.remove(l.node("a"))
	n.put(l.node("b"))
}

// stateAfter returns the proxy's expected state after the changes.
func (l *lossy) stateAfter() []string {
	return []string{
		"again IPv4 80", "  10.1.0.0 80",
		"by-hand IPv4 80", "  10.2.0.1 80",
		"changes IPv4 81", "  10.1.0.2 80",
		"flips IPv4 80", "  10.1.0.3 80",
		"moved-from IPv4 80!",
		"moved-to IPv4 80", "  10.1.0.6 80", "  10.1.0.7 80",
		"new IPv4 80", "  10.2.0.2 80",
		"sliced IPv4 80", "  10.2.0.8 80",
		"stamp IPv4 80", "  10.1.0.10 80",
		"stays IPv4 80", "  10.1.0.9 80",
		"unsliced IPv4 80!",
		"zoned IPv4 80", "  10.1.1.1 80", "  10.1.0.12 80 draining", "  10.1.1.2 80 draining",
	}
}

// flush makes one change for each watch of the proxy: to the service "stamp", to the
// EndpointSlice "by-hand", and to the node. It waits until the sink has these changes.
// All earlier changes have then arrived.
func (l *lossy) flush(want []string) {
	l.t.Helper()
	l.services["stamp"].Spec.Ports[0].Port = 82
	l.slices["by-hand"].Endpoints[0].Addresses[0] = "10.3.0.1"
	l.put(l.services["stamp"], l.slices["by-hand"], l.node("c"))
	syncs := len(l.rec.Syncs())
	want = replaced(want, "stamp IPv4 80", "stamp IPv4 82")
	want = replaced(want, "  10.2.0.1 80", "  10.3.0.1 80")
	i := slices.Index(want, "zoned IPv4 80")
	want = append(want[:i:i], "zoned IPv4 80", "  10.1.1.2 80", "  10.1.0.12 80 draining", "  10.1.1.1 80 draining")
	l.expect(syncs, want)
	l.slices["stamp"].Endpoints[0].Addresses[0] = "10.3.0.2"
	l.put(l.slices["stamp"])
	l.expect(syncs, replaced(want, "  10.1.0.10 80", "  10.3.0.2 80"))
}

func replaced(list []string, old, new string) []string {
	list = slices.Clone(list)
	list[slices.Index(list, old)] = new
	return list
}

// deliveries returns, for each service, the number of syncs that contain the service. The
// entry "" is the number of syncs with a change of the node.
func deliveries(t *testing.T, syncs []sinktest.Sync) map[string]int {
	t.Helper()
	count := map[string]int{}
	for _, s := range syncs {
		if s.First {
			t.Errorf("a pass began at revision %d", s.Revision)
		}
		for c := range s.Services {
			count[c.Key.Name]++
		}
		if s.NodeChanged {
			count[""]++
		}
	}
	return count
}

func TestServerOutageChangesNothing(t *testing.T) {
	t.Parallel()
	server := apiserver.Start(t, apiserver.Options{})
	replica := server.Replica(t)

	for _, test := range []struct {
		name    string
		compact bool
	}{
		{"the API server is killed and restarted", false},
		{"the API server is killed and restarted, with etcd compacted", true},
	} {
		t.Run(test.name, func(t *testing.T) {
			l := newLossy(t, server)
			before, requests := len(l.rec.Syncs()), l.wire.count()
			uid := l.service("again").UID
			server.APIServer.Kill(t)
			l.wire.wait(t, requests, "a request that fails", func(r request) bool { return r.err != nil })
			requests = l.wire.count()
			l.happen(replica)
			if test.compact {
				server.Compact(t)
			}
			if n := len(l.rec.Syncs()); n != before {
				t.Errorf("%d syncs while the server is down", n-before)
			}
			server.APIServer.Start(t)
			for _, resource := range []string{"services", "endpointslices", "nodes"} {
				l.wire.wait(t, requests, "a new list of "+resource, func(r request) bool {
					return r.err == nil && r.list && r.resource == resource
				})
			}
			l.expect(before+1, l.stateAfter())
			l.flush(l.stateAfter())

			missed := l.rec.Syncs()[before:]
			got := deliveries(t, missed)
			// The service "new" and its EndpointSlice may arrive in one sync or in two, so count
			// at most one sync.
			got["new"] = min(got["new"], 1)
			got["stamp"] = min(got["stamp"], 1)
			want := map[string]int{
				"again": 1, "by-hand": 2, "changes": 1, "goes": 1, "leaves": 1, "moved-from": 1, "moved-to": 1,
				"new": 1, "sliced": 1, "stamp": 1, "unsliced": 1, "zoned": 2, "": 2,
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("deliveries after the server restarted (-want +got):\n%s", diff)
			}
			for _, s := range missed {
				for c := range s.Services {
					if c.Key.Name == "again" && (c.Old.Service.UID != uid || c.New.Service.UID != l.service("again").UID) {
						t.Errorf("service again was delivered with UIDs %s and %s", c.Old.Service.UID, c.New.Service.UID)
					}
				}
			}
			l.stop()
		})
	}

	t.Run("etcd is killed and restarted", func(t *testing.T) {
		l := newLossy(t, server)
		before := len(l.rec.Syncs())
		server.Etcd.Kill(t)
		server.Etcd.Start(t)
		server.WaitReady(t)
		replica.WaitReady(t)
		if n := len(l.rec.Syncs()); n != before {
			t.Errorf("%d syncs while etcd is down", n-before)
		}
		l.slices["by-hand"].Endpoints[0].Addresses[0] = "10.2.0.1"
		l.put(l.slices["by-hand"])
		want := replaced(l.stateBefore(), "  10.1.0.1 80", "  10.2.0.1 80")
		l.expect(before+1, want)
		l.flush(want)
		got := deliveries(t, l.rec.Syncs()[before:])
		if diff := cmp.Diff([]string{"", "by-hand", "stamp", "zoned"}, slices.Sorted(maps.Keys(got))); diff != "" {
			t.Errorf("deliveries after etcd restarted (-want +got):\n%s", diff)
		}
		l.stop()
	})

	t.Run("kpng-json is started without a server", func(t *testing.T) {
		n := newTenant(t, server)
		web := newService("web", n.name, servicePort("", 80, 80))
		n.put(web, newSlice("web", web, slicePorts("", 80), newEndpoint("10.1.0.1", "")))
		s := newScreen(n, n.name, nil)
		server.APIServer.Kill(t)

		args := []string{"--kubeconfig", apiserver.Kubeconfig(t, server.Config()), "--service-proxy-name", n.name, "--node-name", n.name,
			"--keep-labels", watcher.LabelServiceProxyName}
		address := strings.TrimPrefix(server.Config().Host, "https://")
		once := start(t, append(args, "--once")...)
		if code := once.exit(t); code != 1 {
			t.Errorf("exit status with --once is %d, want 1", code)
		}
		once.stderr.wait(t, "kpng-json: ", address, "connection refused")
		p := start(t, args...)
		s.out = p.stdout
		p.stderr.wait(t, address, "connection refused")
		server.APIServer.Start(t)
		s.expect("web IPv4 80", "  10.1.0.1 80")
		s.checkAll()
		p.stop(t)
	})
}
