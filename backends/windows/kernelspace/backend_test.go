// SPDX-License-Identifier: Apache-2.0

package kernelspace_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/windows/kernelspace"
	"github.com/kpng-project/kpng/internal/hns"
	"github.com/kpng-project/kpng/internal/hns/fakehns"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"k8s.io/klog/v2"
)

// withClusterIP sets a service's cluster IP to 10.96.0.n.
func withClusterIP(n int) func(*api.Service) {
	return func(s *api.Service) {
		s.IPs.ClusterIPs = api.NewIPSet(netip.AddrFrom4([4]byte{10, 96, byte(n >> 8), byte(n)}))
	}
}

// balancer returns a load balancer with one endpoint, as another owner would create it.
func balancer(endpoint, vip string, ports ...uint16) hns.LoadBalancer {
	lb := hns.LoadBalancer{Endpoints: []string{endpoint}}
	if vip != "" {
		lb.VIPs = []netip.Addr{addr(vip)}
	}
	for _, p := range ports {
		lb.Ports = append(lb.Ports, hns.PortMapping{Protocol: hns.ProtocolTCP, External: p, Internal: 8080})
	}
	return lb
}

// addBalancer creates a load balancer of another owner.
func (w *world) addBalancer(lb hns.LoadBalancer) string {
	w.Helper()
	made, err := w.hns.CreateLoadBalancer(lb)
	if err != nil {
		w.Fatal(err)
	}
	return made.ID
}

// mustHaveCalled fails the test unless HNS got exactly these calls since the last check.
func (w *world) mustHaveCalled(want map[string]int) {
	w.Helper()
	if diff := cmp.Diff(want, w.hns.Calls()); diff != "" {
		w.Errorf("calls of HNS (-want +got):\n%s", diff)
	}
}

var listing = map[string]int{"Network": 1, "Endpoints": 1, "LoadBalancers": 1}

func and(calls map[string]int, more map[string]int) map[string]int {
	all := maps.Clone(calls)
	maps.Copy(all, more)
	return all
}

func TestHNSIsListedOnceForAnyNumberOfServices(t *testing.T) {
	const services, endpoints = 200, 5
	w := l2bridge(t)
	for i := range services {
		var all []string
		for e := range endpoints {
			all = append(all, fmt.Sprintf("10.1.%d.%d", i, e+1))
		}
		v := view(service(fmt.Sprint("svc-", i), withClusterIP(i)), all...)
		w.views[v.Key()] = v
	}
	w.must(w.syncAll())
	first := and(listing, map[string]int{"Features": 1, "CreateEndpoint": services * endpoints, "CreateLoadBalancer": services})
	w.mustHaveCalled(first)

	w.restart()
	w.must(w.syncAll())
	w.mustHaveCalled(and(listing, map[string]int{"Features": 1}))

	w.must(w.set(view(service("svc-7", withClusterIP(7)), "10.1.7.1", "10.1.7.2", "10.1.7.3", "10.1.7.4", "10.1.7.9")))
	w.mustHaveCalled(map[string]int{"CreateEndpoint": 1, "UpdateLoadBalancer": 1, "DeleteEndpoint": 1})

	w.must(w.backend.Verify(t.Context()))
	w.mustHaveCalled(listing)
}

func TestLoadBalancerIsReplacedIfItCannotBeChanged(t *testing.T) {
	for name, features := range map[string]hns.Features{
		"Windows reports the missing feature": without(func(f *hns.Features) { f.ModifyLoadBalancer = false }),
		"the call is refused":                 fakehns.AllFeatures(),
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, features, hns.Network{}, kernelspace.Options{})
			w.hns.SetHook(failCalls("UpdateLoadBalancer", hns.ErrNotSupported))
			w.must(w.set(view(service("web"), "10.1.2.1")))
			w.must(w.set(view(service("web"), "10.1.2.2")))
			w.mustHave("10.96.0.1 protocol 6 port 80->8080 to 10.1.2.2")
			w.mustHaveRemotes("10.1.2.2")
			w.must(w.remove("web"))
			w.mustHave("")
		})
	}
}

func TestChangedPolicyReplacesLoadBalancer(t *testing.T) {
	w := l2bridge(t, "10.1.1.1")
	endpoints := []string{"10.1.1.1@here", "10.1.2.1"}
	w.must(w.set(view(service("web"), endpoints...)))
	w.must(w.set(view(service("web", affine), endpoints...)))
	w.mustHave("10.96.0.1 protocol 6 port 80->8080 per client to 10.1.1.1 10.1.2.1")
	w.must(w.set(view(service("web", internalLocal), endpoints...)))
	w.mustHave("10.96.0.1 protocol 6 port 80->8080 to 10.1.1.1")
	w.must(w.set(view(service("web", func(s *api.Service) { s.Ports[0].TargetPort = 9090 }), endpoints...)))
	w.mustHave("10.96.0.1 protocol 6 port 80->9090 to 10.1.1.1 10.1.2.1")
}

func TestTwoServicesSwapAddresses(t *testing.T) {
	w := l2bridge(t)
	w.must(w.set(view(service("a", withClusterIP(1)), "10.1.2.1"), view(service("b", withClusterIP(2)), "10.1.2.2")))
	w.must(w.set(view(service("a", withClusterIP(2)), "10.1.2.1"), view(service("b", withClusterIP(1)), "10.1.2.2")))
	w.mustHave(`10.96.0.1 protocol 6 port 80->8080 to 10.1.2.2
		10.96.0.2 protocol 6 port 80->8080 to 10.1.2.1`)
}

func TestSharedEndpointIsRemovedWithItsLastUser(t *testing.T) {
	w := l2bridge(t)
	w.must(w.set(view(service("a", withClusterIP(1)), "10.1.2.1"), view(service("b", withClusterIP(2)), "10.1.2.1")))
	w.mustHaveRemotes("10.1.2.1")
	w.must(w.remove("a"))
	w.mustHaveRemotes("10.1.2.1")
	w.must(w.remove("b"))
	w.mustHaveRemotes()
}

func TestNewLocalPodReplacesItsRemoteEndpoint(t *testing.T) {
	w := l2bridge(t)
	w.must(w.set(view(service("web"), "10.1.1.1@")))
	w.mustHaveRemotes("10.1.1.1")
	w.pod("10.1.1.1", "fd00:1::1")
	w.must(w.backend.Verify(t.Context()))
	w.mustHaveRemotes()
	w.mustHave("10.96.0.1 protocol 6 port 80->8080 to 10.1.1.1")
	w.must(w.remove("web"))
	if got, want := w.hns.Dump(), "endpoint [10.1.1.1 fd00:1::1]\n"; got != want {
		t.Errorf("HNS has\n%swant the endpoint of the pod\n%s", got, want)
	}
}

func TestLaterLocalPodIsFoundByOneListing(t *testing.T) {
	w := l2bridge(t)
	w.must(w.set(view(service("web"), "10.1.2.1")))
	w.pod("10.1.1.1")
	w.pod("10.1.1.2")
	w.hns.Calls()
	w.must(w.set(view(service("web"), "10.1.1.1@here", "10.1.1.2@here", "10.1.2.1")))
	w.mustHaveCalled(and(listing, map[string]int{"UpdateLoadBalancer": 1}))
	w.mustHave("10.96.0.1 protocol 6 port 80->8080 to 10.1.1.1 10.1.1.2 10.1.2.1")
}

func TestForeignObjectsAreNotChanged(t *testing.T) {
	w := l2bridge(t, "10.1.1.1")
	pod := w.pod("10.1.1.9")
	remote, err := w.hns.CreateEndpoint(hns.Endpoint{Network: w.network, Addrs: []netip.Addr{addr("10.1.2.1")}, Remote: true})
	if err != nil {
		t.Fatal(err)
	}
	w.addBalancer(balancer(pod, "10.96.9.9", 80))
	w.addBalancer(balancer(pod, "", 31000))
	w.addBalancer(balancer(remote, "10.96.9.8", 80))
	before := w.hns.Dump()

	w.must(w.set(view(service("web"), "10.1.1.1@here", "10.1.2.1"), view(service("dns", withClusterIP(2)), "10.1.2.1")))
	w.must(w.remove("dns"))
	w.restart()
	w.must(w.syncAll())
	w.must(w.remove("web"))
	if diff := cmp.Diff(before, w.hns.Dump()); diff != "" {
		t.Errorf("HNS after services were added and deleted (-before +after):\n%s", diff)
	}

	w.must(w.set(view(service("web"), "10.1.1.1@here", "10.1.2.1")))
	w.must(w.backend.Cleanup(t.Context()))
	if diff := cmp.Diff(before, w.hns.Dump()); diff != "" {
		t.Errorf("HNS after Cleanup (-before +after):\n%s", diff)
	}
	if _, err := os.Stat(w.opts.StateFile); !os.IsNotExist(err) {
		t.Errorf("the state file exists after Cleanup: %v", err)
	}
}

func TestForeignLoadBalancerIsNotTakenForOwn(t *testing.T) {
	const foreign = `10.96.0.1 protocol 6 port 80->8080 protocol 6 port 443->8080 to 10.1.1.1`
	t.Run("created after the last listing", func(t *testing.T) {
		w := l2bridge(t)
		pod := w.pod("10.1.1.1")
		w.must(w.set(view(service("other", withClusterIP(9)), "10.1.1.1@here")))
		w.addBalancer(balancer(pod, "10.96.0.1", 80, 443))
		got := failures(t, w.set(view(service("web"), "10.1.1.1@here")))
		if !strings.Contains(got["web"], "and also 10.96.0.1:443/TCP") {
			t.Errorf("failed: %q, want an error for the frontend of another owner", got)
		}
		w.must(w.remove("other"))
		w.mustHave(foreign)
	})
	for _, answer := range []error{errRefused, hns.ErrNotRunning} {
		t.Run("created after a failed request: "+answer.Error(), func(t *testing.T) {
			w := l2bridge(t)
			pod := w.pod("10.1.1.1")
			w.hns.SetHook(failCalls("CreateLoadBalancer", answer))
			if err := w.set(view(service("web"), "10.1.1.1@here")); err == nil {
				t.Error("the sync succeeds although the creation failed")
			}
			w.hns.SetHook(nil)
			w.addBalancer(balancer(pod, "10.96.0.1", 80, 443))
			w.must(w.remove("web"))
			w.mustHave(foreign)
			w.restart()
			w.must(w.syncAll())
			w.mustHave(foreign)
			w.must(w.backend.Cleanup(t.Context()))
			w.mustHave(foreign)
		})
	}
}

func TestLoadBalancerOfLostResponseIsOwned(t *testing.T) {
	for _, quirk := range []string{"none", "all"} {
		for name, restarts := range map[string]bool{"in the same process": false, "in the next process": true} {
			t.Run(name+"/HNS "+quirk, func(t *testing.T) {
				w := l2bridge(t)
				w.hns.SetQuirks(fakehns.AllQuirks()[quirk])
				w.hns.SetHook(failCalls("CreateLoadBalancer", fakehns.ErrAnswerLost))
				failures(t, w.set(view(service("web"), "10.1.2.1")))
				w.hns.SetHook(nil)
				w.hns.Calls()
				if restarts {
					w.restart()
				}
				w.must(w.syncAll())
				if n := w.hns.Calls()["CreateLoadBalancer"]; n != 0 {
					t.Errorf("the load balancer was created again %d times", n)
				}
				w.must(w.remove("web"))
				w.mustHave("")
			})
		}
	}
}

func TestDuplicateOwnLoadBalancersAreRemoved(t *testing.T) {
	w := newWorld(t, without(func(f *hns.Features) { f.ModifyLoadBalancer = false }), hns.Network{}, kernelspace.Options{})
	w.hns.SetQuirks(fakehns.Quirks{SharesFrontends: true})
	w.must(w.set(view(service("web"), "10.1.2.1")))
	w.hns.SetHook(failCalls("DeleteLoadBalancer", fakehns.ErrIgnored))
	failures(t, w.set(view(service("web"), "10.1.2.2")))
	w.hns.SetHook(nil)
	w.must(w.syncAll())
	w.mustHave("10.96.0.1 protocol 6 port 80->8080 to 10.1.2.2")
	w.mustHaveRemotes("10.1.2.2")
}

func TestDeletionIsRetriedOnce(t *testing.T) {
	w := l2bridge(t)
	w.must(w.set(view(service("web"), "10.1.2.1")))
	refused := false
	w.hns.SetHook(func(call string) error {
		if call == "DeleteLoadBalancer" && !refused {
			refused = true
			return errRefused
		}
		return nil
	})
	w.must(w.remove("web"))
	w.mustHave("")
	w.mustHaveRemotes()
}

func TestPodWithAddressOfRemotePodIsServedImmediately(t *testing.T) {
	w := l2bridge(t)
	w.must(w.set(view(service("web"), "10.1.2.1")))
	pod := w.pod("10.1.2.1")
	w.must(w.set(view(service("web"), "10.1.2.1@here")))
	lbs, _ := w.hns.LoadBalancers()
	if len(lbs) != 1 || lbs[0].Endpoints[0] != pod {
		t.Errorf("load balancers %v, want one to the pod's own endpoint %s", lbs, pod)
	}
	w.mustHaveRemotes()
}

func TestStartFailsWithoutRequiredDSR(t *testing.T) {
	none := without(func(f *hns.Features) { f.DSR = false })
	fake := fakehns.New(none)
	fake.AddNetwork(hns.Network{Name: "pods"})
	fakehns.Use(t, fake)
	b, err := kernelspace.New(kernelspace.Options{Network: "pods", EnableDSR: true})
	if err != nil {
		t.Fatal(err)
	}
	const wanted = "direct server return (Options.EnableDSR): not supported"
	if err := b.Start(t.Context()); err == nil || !strings.Contains(err.Error(), wanted) {
		t.Errorf("Start returned %v, want an error with %q", err, wanted)
	}
	// Start succeeds if HNS does not run yet.
	fake.SetHook(func(string) error { return hns.ErrNotRunning })
	if err := b.Start(t.Context()); err != nil {
		t.Errorf("Start without HNS returned %v", err)
	}
	fake.SetHook(nil)
	if err := b.Sync(t.Context(), &sink.Changes{First: true, Last: true, Services: func(func(sink.Change) bool) {}}); err == nil || !strings.Contains(err.Error(), wanted) {
		t.Errorf("Sync returned %v, want an error with %q", err, wanted)
	}
}

func TestForeignLoadBalancerWithOnlyOurFrontendIsReplaced(t *testing.T) {
	w := l2bridge(t)
	pod := w.pod("10.1.1.9")
	w.addBalancer(balancer(pod, "10.96.0.1", 80))
	w.addBalancer(balancer(pod, "10.96.0.2", 80, 81))
	got := failures(t, w.set(view(service("a", withClusterIP(1)), "10.1.2.1"), view(service("b", withClusterIP(2)), "10.1.2.1")))
	if !strings.Contains(got["b"], "frontend 10.96.0.2:80/TCP: load balancer") || !strings.Contains(got["b"], "and also 10.96.0.2:81/TCP") || len(got) != 1 {
		t.Errorf("failed: %q, want an error for b, whose frontend belongs to another owner", got)
	}
	w.mustHave(`10.96.0.1 protocol 6 port 80->8080 to 10.1.2.1
		10.96.0.2 protocol 6 port 80->8080 protocol 6 port 81->8080 to 10.1.1.9`)
}

func TestLoadBalancerCreatedAfterListingIsReplaced(t *testing.T) {
	w := l2bridge(t)
	w.must(w.set(view(service("other", withClusterIP(2)), "10.1.2.1")))
	w.addBalancer(balancer(w.pod("10.1.1.9"), "10.96.0.1", 80))
	w.hns.Calls()
	w.must(w.set(view(service("web"), "10.1.2.1")))
	w.mustHaveCalled(and(listing, map[string]int{"CreateLoadBalancer": 2, "DeleteLoadBalancer": 1}))
	w.mustHave(`10.96.0.1 protocol 6 port 80->8080 to 10.1.2.1
		10.96.0.2 protocol 6 port 80->8080 to 10.1.2.1`)
}

func TestFailureNamesServiceFrontendAndError(t *testing.T) {
	w := l2bridge(t)
	w.must(w.set(view(service("a", withClusterIP(1)), "10.1.2.1"), view(service("b", withClusterIP(2)), "10.1.2.2")))

	refused := 0
	w.hns.SetHook(func(call string) error {
		if call == "UpdateLoadBalancer" {
			refused++
			if refused == 1 {
				return errRefused
			}
		}
		return nil
	})
	got := failures(t, w.set(view(service("a", withClusterIP(1)), "10.1.2.3"), view(service("b", withClusterIP(2)), "10.1.2.4")))
	if len(got) != 1 || !strings.HasPrefix(got["a"], "frontend 10.96.0.1:80/TCP: update load balancer ") || !strings.HasSuffix(got["a"], ": HNS says no") {
		t.Errorf("failed: %q", got)
	}
	w.mustHave(`10.96.0.1 protocol 6 port 80->8080 to 10.1.2.1
		10.96.0.2 protocol 6 port 80->8080 to 10.1.2.4`)

	// A change of another service causes no retry for service a, no listing and no deletion of
	// endpoints. The driver decides when to retry.
	w.hns.Calls()
	w.must(w.set(view(service("b", withClusterIP(2)), "10.1.2.5")))
	w.mustHaveCalled(map[string]int{"CreateEndpoint": 1, "UpdateLoadBalancer": 1})
	w.must(w.set(w.views[view(service("a")).Key()]))
	w.mustHaveCalled(and(listing, map[string]int{"UpdateLoadBalancer": 1, "DeleteEndpoint": 3}))
	w.mustHave(`10.96.0.1 protocol 6 port 80->8080 to 10.1.2.3
		10.96.0.2 protocol 6 port 80->8080 to 10.1.2.5`)
	w.mustHaveRemotes("10.1.2.3", "10.1.2.5")
}

func TestFailedDeletionIsRetried(t *testing.T) {
	w := l2bridge(t)
	w.must(w.set(view(service("web"), "10.1.2.1")))
	w.hns.SetHook(failCalls("DeleteLoadBalancer", errRefused))
	if got := failures(t, w.remove("web")); !strings.Contains(got["web"], "frontend 10.96.0.1:80/TCP: delete load balancer") {
		t.Errorf("failed: %q", got)
	}

	// The restarted backend knows only from the record that it owns the load balancer. The
	// deletion fails again, and Verify repeats it.
	w.restart()
	w.must(w.syncAll())
	w.mustHave("10.96.0.1 protocol 6 port 80->8080 to 10.1.2.1")
	w.hns.SetHook(nil)
	w.must(w.backend.Verify(t.Context()))
	w.mustHave("")
	w.mustHaveRemotes()
}

func TestStaleLoadBalancersWaitForFailingServices(t *testing.T) {
	w := l2bridge(t)
	w.must(w.set(view(service("gone", withClusterIP(3)), "10.1.2.3")))
	w.must(w.syncAll())
	w.restart()
	clear(w.views)
	web := view(service("web"), "10.1.2.1")
	w.views[web.Key()] = web
	w.hns.SetHook(failCalls("CreateLoadBalancer", errRefused))
	if got := failures(t, w.syncAll()); got["web"] == "" || len(got) != 1 {
		t.Errorf("failed: %q, want web", got)
	}
	w.mustHave("10.96.0.3 protocol 6 port 80->8080 to 10.1.2.3")
	w.hns.SetHook(nil)
	w.must(w.set(web))
	w.mustHave("10.96.0.1 protocol 6 port 80->8080 to 10.1.2.1")
	w.mustHaveRemotes("10.1.2.1")
}

func TestMissingLoadBalancerIsNotAnError(t *testing.T) {
	w := l2bridge(t)
	w.must(w.set(view(service("web"), "10.1.2.1")))
	lbs, _ := w.hns.LoadBalancers()
	if err := w.hns.DeleteLoadBalancer(lbs[0].ID); err != nil {
		t.Fatal(err)
	}
	w.must(w.remove("web"))
	w.mustHaveRemotes()
}

func TestVerifyRepairsForeignChanges(t *testing.T) {
	w := l2bridge(t)
	w.must(w.set(view(service("a", withClusterIP(1)), "10.1.2.1"), view(service("b", withClusterIP(2)), "10.1.2.2")))
	want := w.hns.Dump()
	lbs, _ := w.hns.LoadBalancers()
	if err := w.hns.DeleteLoadBalancer(lbs[0].ID); err != nil {
		t.Fatal(err)
	}
	lbs[1].Endpoints = lbs[0].Endpoints
	if err := w.hns.UpdateLoadBalancer(lbs[1]); err != nil {
		t.Fatal(err)
	}
	w.must(w.backend.Verify(t.Context()))
	if diff := cmp.Diff(want, w.hns.Dump()); diff != "" {
		t.Errorf("HNS after Verify (-want +got):\n%s", diff)
	}
}

// HNS deletes nearly all load balancers without a request (kubernetes/kubernetes#110849).
func TestVanishedLoadBalancersAreRestored(t *testing.T) {
	const services = 577
	w := l2bridge(t)
	for i := range services {
		v := view(service(fmt.Sprint("svc-", i), withClusterIP(i)), fmt.Sprintf("10.1.%d.%d", i>>8, i&255))
		w.views[v.Key()] = v
	}
	w.must(w.syncAll())
	want := w.hns.Dump()
	vanish := func() {
		lbs, _ := w.hns.LoadBalancers()
		for _, lb := range lbs[1:] {
			if err := w.hns.DeleteLoadBalancer(lb.ID); err != nil {
				t.Fatal(err)
			}
		}
		w.hns.Calls()
	}
	mustBeRestored := func() {
		t.Helper()
		if diff := cmp.Diff(want, w.hns.Dump()); diff != "" {
			t.Errorf("HNS (-want +got):\n%s", diff)
		}
	}
	vanish()
	w.must(w.backend.Verify(t.Context()))
	w.mustHaveCalled(and(listing, map[string]int{"CreateLoadBalancer": services - 1}))
	mustBeRestored()

	// A Sync that changes one of the services finds the loss before the next Verify.
	vanish()
	changed := view(service("svc-9", withClusterIP(9)), "10.1.0.9", "10.1.9.9")
	if message := failures(t, w.set(changed))["svc-9"]; !strings.Contains(message, "update load balancer") {
		t.Errorf("svc-9 failed with %q", message)
	}
	w.must(w.set(view(service("svc-9", withClusterIP(9)), "10.1.0.9")))
	mustBeRestored()
}

// A load balancer without endpoints makes all later calls fail
// (kubernetes/kubernetes#137530).
func TestLoadBalancerWithoutEndpointsIsDeletedFirst(t *testing.T) {
	for name, lose := range map[string]func(w *world, pod string){
		"own": func(w *world, pod string) {
			w.must(w.set(view(service("z", withClusterIP(9)), "10.1.1.1@here")))
			w.hns.LoseEndpoint(pod)
		},
		"of another proxy": func(w *world, pod string) {
			w.addBalancer(balancer(pod, "10.96.0.9", 80))
			w.hns.LoseEndpoint(pod)
			if message := failures(w.T, w.set(view(service("z", withClusterIP(9)), "10.1.1.1@here")))["z"]; message == "" {
				w.Error("the service without an HNS endpoint does not fail")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := l2bridge(t)
			w.must(w.set(view(service("a", withClusterIP(1)), "10.1.2.1")))
			w.hns.SetQuirks(fakehns.Quirks{EmptyBalancersBlock: true})
			lose(w, w.pod("10.1.1.1"))

			b := view(service("b", withClusterIP(2)), "10.1.2.2")
			failures(t, w.set(b)) // may fail, because the backend does not know of the loss yet
			if failed := failures(t, w.set(b)); failed["b"] != "" {
				t.Errorf("b failed: %s", failed["b"])
			}
			w.mustHave(`10.96.0.1 protocol 6 port 80->8080 to 10.1.2.1
				10.96.0.2 protocol 6 port 80->8080 to 10.1.2.2`)
			w.pod("10.1.1.1")
			w.must(w.syncAll())
			w.mustHave(`10.96.0.1 protocol 6 port 80->8080 to 10.1.2.1
				10.96.0.2 protocol 6 port 80->8080 to 10.1.2.2
				10.96.0.9 protocol 6 port 80->8080 to 10.1.1.1`)
		})
	}
}

// withForeignBalancer is an HNS with a load balancer of another owner. The load balancer
// has neither endpoints nor ports.
type withForeignBalancer struct {
	hns.HNS
	t *testing.T
}

const foreignBalancer = "foreign"

func (h withForeignBalancer) LoadBalancers() ([]hns.LoadBalancer, error) {
	all, err := h.HNS.LoadBalancers()
	return append(all, hns.LoadBalancer{ID: foreignBalancer}), err
}

func (h withForeignBalancer) DeleteLoadBalancer(id string) error {
	if id == foreignBalancer {
		h.t.Error("the load balancer of another owner is deleted")
		return nil
	}
	return h.HNS.DeleteLoadBalancer(id)
}

// A load balancer without ports has no frontend that this backend serves.
func TestLoadBalancerOfAnotherOwnerWithoutPortsStays(t *testing.T) {
	w := l2bridge(t)
	fakehns.Use(t, withForeignBalancer{w.hns, t})
	w.restart()
	w.must(w.set(view(service("a", withClusterIP(1)), "10.1.2.1")))
	w.must(w.syncAll())
}

// HNS keeps endpoints although it reports their deletion as successful
// (microsoft/Windows-Containers#631). Their addresses are used again, on this or on
// another node.
func TestStaleEndpointIsNotUsed(t *testing.T) {
	w := l2bridge(t)
	w.must(w.set(view(service("web"), "10.1.1.1")))
	w.hns.SetHook(failCalls("DeleteEndpoint", fakehns.ErrIgnored))
	w.must(w.set(view(service("web"), "10.1.2.1")))
	w.mustHaveRemotes("10.1.1.1", "10.1.2.1")
	pod := w.pod("10.1.1.1")
	w.must(w.set(view(service("web"), "10.1.1.1@here")))
	if lbs, _ := w.hns.LoadBalancers(); len(lbs) != 1 || !slices.Equal(lbs[0].Endpoints, []string{pod}) {
		t.Errorf("the load balancers are %+v, want one with the endpoint %s of the pod", lbs, pod)
	}
	w.hns.SetHook(nil)
	w.must(w.backend.Verify(t.Context()))
	w.mustHaveRemotes()

	// The pod ends, its endpoint stays, and a pod of another node gets its address.
	w.must(w.set(view(service("web"), "10.1.1.1")))
	w.mustHaveRemotes("10.1.1.1")
	if lbs, _ := w.hns.LoadBalancers(); len(lbs) != 1 || slices.Contains(lbs[0].Endpoints, pod) {
		t.Errorf("the load balancers are %+v, want one without the stale endpoint %s", lbs, pod)
	}

	// If HNS refuses a second endpoint with the address, the service fails with the reason.
	w.must(w.remove("web"))
	w.hns.SetHook(failCalls("CreateEndpoint", hns.ErrExists))
	message := failures(t, w.set(view(service("web"), "10.1.1.1")))["web"]
	if want := "HNS still has endpoint " + pod + " of a deleted pod of this node; delete it"; !strings.Contains(message, want) {
		t.Errorf("the service failed with %q, want %q", message, want)
	}
	w.mustHave("")
}

func TestLossDuringFailedVerifyIsRepaired(t *testing.T) {
	for _, call := range []string{"Network", "Endpoints", "LoadBalancers", "CreateLoadBalancer"} {
		t.Run(call, func(t *testing.T) {
			w := l2bridge(t)
			w.must(w.set(view(service("web"), "10.1.2.1")))
			want := w.hns.Dump()
			lbs, _ := w.hns.LoadBalancers()
			if err := w.hns.DeleteLoadBalancer(lbs[0].ID); err != nil {
				t.Fatal(err)
			}
			w.hns.SetHook(failCalls(call, hns.ErrNotRunning))
			if err := w.backend.Verify(t.Context()); !errors.Is(err, sink.ErrStartOver) {
				t.Errorf("Verify without HNS returned %v, which requests no retry", err)
			}
			w.hns.SetHook(nil)
			w.must(w.syncAll())
			if diff := cmp.Diff(want, w.hns.Dump()); diff != "" {
				t.Errorf("HNS after recovery (-want +got):\n%s", diff)
			}
		})
	}
}

func TestIgnoredCallsAreRepaired(t *testing.T) {
	for _, call := range []string{"CreateLoadBalancer", "UpdateLoadBalancer", "DeleteLoadBalancer", "CreateEndpoint", "DeleteEndpoint"} {
		t.Run(call, func(t *testing.T) {
			w := l2bridge(t)
			steps := func() {
				failures(t, w.set(view(service("web"), "10.1.2.1")))
				failures(t, w.set(view(service("web"), "10.1.2.2")))
				failures(t, w.set(view(service("web", affine), "10.1.2.2")))
			}
			steps()
			want := w.hns.Dump()
			w.must(w.remove("web"))

			w.hns.SetHook(failCalls(call, fakehns.ErrIgnored))
			steps()
			w.hns.SetHook(nil)
			w.must(w.syncAll())
			if diff := cmp.Diff(want, w.hns.Dump()); diff != "" {
				t.Errorf("HNS (-want +got):\n%s", diff)
			}
		})
	}
}

func TestStoppedHNSFailsAllServicesAndIsRetried(t *testing.T) {
	w := l2bridge(t)
	w.hns.SetHook(func(string) error { return hns.ErrNotRunning })
	if err := w.set(view(service("web"), "10.1.2.1")); err == nil || !strings.Contains(err.Error(), "HNS does not run") {
		t.Errorf("Sync without HNS returned %v", err)
	}
	w.mustHaveCalled(map[string]int{"Features": 1})
	w.hns.SetHook(nil)
	w.must(w.syncAll())

	w.hns.SetHook(failCalls("CreateEndpoint", hns.ErrNotRunning))
	changed := view(service("web"), "10.1.2.2")
	if err := w.set(changed); err == nil || !strings.Contains(err.Error(), "service default/web: frontend 10.96.0.1:80/TCP: ") {
		t.Errorf("Sync returned %v while HNS stopped", err)
	}
	w.hns.SetHook(nil)
	w.must(w.set(changed))
	w.mustHave("10.96.0.1 protocol 6 port 80->8080 to 10.1.2.2")
	w.mustHaveRemotes("10.1.2.2")
}

func TestBackendWaitsForNetwork(t *testing.T) {
	w := l2bridge(t)
	network, _ := w.hns.NetworkByID(w.network)
	w.hns.RemoveNetwork(w.network)
	if err := w.set(view(service("web"), "10.1.2.1")); err == nil || !strings.Contains(err.Error(), `HNS network "pods": `) {
		t.Errorf("Sync without the network returned %v", err)
	}
	w.hns.AddNetwork(network)
	w.must(w.syncAll())
	w.mustHave("10.96.0.1 protocol 6 port 80->8080 to 10.1.2.1")
}

func TestRecreatedNetworkGetsEverythingAgain(t *testing.T) {
	w := l2bridge(t, "10.1.1.1")
	w.must(w.set(view(service("web"), "10.1.1.1@here", "10.1.2.1")))
	want := w.hns.Dump()
	w.hns.RemoveNetwork(w.network)
	w.network = w.hns.AddNetwork(hns.Network{Name: "pods"})
	w.pod("10.1.1.1")
	if err := w.set(view(service("other", withClusterIP(2)), "10.1.2.2")); err == nil {
		t.Error("an endpoint was created on a deleted network")
	}
	if err := w.remove("other"); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("the retry returned %v, want an error that requests a pass", err)
	}
	w.must(w.syncAll())
	if diff := cmp.Diff(want, w.hns.Dump()); diff != "" {
		t.Errorf("HNS after the network was created again (-want +got):\n%s", diff)
	}
}

func TestOverlayNetworkNeedsSourceVIPAndRemoteSubnets(t *testing.T) {
	overlay := hns.Network{Overlay: true}
	w := newWorld(t, fakehns.AllFeatures(), overlay, kernelspace.Options{})
	if err := w.syncAll(); err == nil || !strings.Contains(err.Error(), "needs a source VIP") {
		t.Errorf("Sync without a source VIP returned %v", err)
	}
	w = newWorld(t, without(func(f *hns.Features) { f.RemoteSubnet = false }), overlay, kernelspace.Options{})
	if err := w.syncAll(); err == nil || !strings.Contains(err.Error(), "remote subnets are not supported") {
		t.Errorf("Sync without support for remote subnets returned %v", err)
	}
}

func TestDamagedStateFileDoesNotStopBackend(t *testing.T) {
	w := l2bridge(t)
	w.must(w.set(view(service("web"), "10.1.2.1")))
	data, err := os.ReadFile(w.opts.StateFile)
	if err != nil {
		t.Fatal(err)
	}
	header, rest, _ := strings.Cut(string(data), "\n")
	if err := os.WriteFile(w.opts.StateFile, []byte(header+"\n0badc0de\n"+rest), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := w.backend.Cleanup(t.Context()); err == nil {
		t.Error("Cleanup returned no error for a damaged state file")
	}
	w.restart()
	w.must(w.syncAll())
	w.mustHaveCalled(and(listing, map[string]int{"Features": 1}))
	w.must(w.remove("web"))
	w.mustHave("")
}

func TestForeignStateFileIsNotOverwritten(t *testing.T) {
	w := l2bridge(t)
	const something = "[mysqld]\n"
	w.opts.StateFile = filepath.Join(t.TempDir(), "my.ini")
	if err := os.WriteFile(w.opts.StateFile, []byte(something), 0o644); err != nil {
		t.Fatal(err)
	}
	b, err := kernelspace.New(w.opts)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Start(t.Context()); err == nil || !strings.Contains(err.Error(), "my.ini") || !strings.Contains(err.Error(), "[mysqld]") {
		t.Errorf("Start returned %v, want an error with the file's name and content", err)
	}
	if data, _ := os.ReadFile(w.opts.StateFile); string(data) != something {
		t.Errorf("the file was overwritten with %q", data)
	}
}

func TestFrontendIsTakenOverFromChangingService(t *testing.T) {
	w := l2bridge(t)
	w.must(w.set(view(service("a"), "10.1.2.1")))
	w.must(w.set(view(service("b"), "10.1.2.2")))
	w.must(w.remove("a"))
	w.mustHave("10.96.0.1 protocol 6 port 80->8080 to 10.1.2.2")
}

// syncBatch delivers one batch.
func (w *world) syncBatch(first, last bool, views ...*api.View) error {
	var changes []sink.Change
	for _, v := range views {
		changes = append(changes, sink.Change{Key: v.Key(), New: v, Unsure: true})
	}
	return w.sync(&sink.Changes{First: first, Last: last, Services: slices.Values(changes), NodeChanged: first})
}

func TestPassInSeveralBatches(t *testing.T) {
	a, b := view(service("a", withClusterIP(1)), "10.1.2.1"), view(service("b", withClusterIP(2)), "10.1.2.2")
	for _, restart := range []bool{false, true} {
		t.Run(fmt.Sprintf("restart %t", restart), func(t *testing.T) {
			w := l2bridge(t)
			w.must(w.set(a, b, view(service("gone", withClusterIP(3)), "10.1.2.3")))
			if restart {
				w.restart()
			}
			w.hns.Calls()

			// Services a and b have swapped their addresses. Only a new process keeps the old
			// address of a, because it might belong to a service that follows.
			w.must(w.syncBatch(true, false, view(service("a", withClusterIP(2)), "10.1.2.1")))
			former, calls := "", map[string]int{"CreateLoadBalancer": 1, "UpdateLoadBalancer": 1, "DeleteLoadBalancer": 1}
			if restart {
				former, calls = "10.96.0.1 protocol 6 port 80->8080 to 10.1.2.1\n", map[string]int{"Features": 1, "UpdateLoadBalancer": 2}
			}
			w.mustHave(former + `10.96.0.2 protocol 6 port 80->8080 to 10.1.2.1
				10.96.0.3 protocol 6 port 80->8080 to 10.1.2.3`)
			w.must(w.syncBatch(false, false, view(service("b", withClusterIP(1)), "10.1.2.2")))
			w.mustHave(`10.96.0.1 protocol 6 port 80->8080 to 10.1.2.2
				10.96.0.2 protocol 6 port 80->8080 to 10.1.2.1
				10.96.0.3 protocol 6 port 80->8080 to 10.1.2.3`)
			w.mustHaveCalled(and(listing, calls))

			// A new pass begins and does not deliver the service "gone".
			w.must(w.syncBatch(true, false, a))
			w.mustHave(`10.96.0.1 protocol 6 port 80->8080 to 10.1.2.1
				10.96.0.3 protocol 6 port 80->8080 to 10.1.2.3`)
			w.hns.SetHook(failCalls("CreateLoadBalancer", errRefused))
			if got := failures(t, w.syncBatch(false, false, b)); len(got) != 1 || got["b"] == "" {
				t.Errorf("failed: %q, want b", got)
			}
			w.hns.SetHook(nil)
			w.must(w.syncBatch(false, true))
			w.mustHave("10.96.0.1 protocol 6 port 80->8080 to 10.1.2.1")
			w.must(w.set(b))
			w.mustHave(`10.96.0.1 protocol 6 port 80->8080 to 10.1.2.1
				10.96.0.2 protocol 6 port 80->8080 to 10.1.2.2`)
		})
	}
}

func TestOtherSystemsHaveNoHNS(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("this system has HNS")
	}
	if _, err := kernelspace.New(kernelspace.Options{Network: "pods"}); err == nil || !strings.Contains(err.Error(), "exists only on Windows") {
		t.Errorf("New returned %v, want an error that names Windows", err)
	}
}

func TestInvalidOptionsAreErrors(t *testing.T) {
	for name, opts := range map[string]kernelspace.Options{
		"Network is required":                       {},
		"does not support the option MasqueradeAll": {Network: "pods", Options: backends.Options{MasqueradeAll: true}},
		"more than one address of a fam":            {Network: "pods", SourceVIPs: []netip.Addr{addr("10.0.0.1"), addr("10.0.0.2")}},
	} {
		if _, err := kernelspace.New(opts); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("New(%+v) returned %v, want an error with %q", opts, err, name)
		}
	}
}

func TestHNSIsDownForHalfAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := l2bridge(t)
		src := sinktest.NewSource()
		src.SetNode(node())
		src.Set(view(service("a", withClusterIP(1)), "10.1.2.1"), view(service("b", withClusterIP(2)), "10.1.2.2"))
		src.MarkSynced()
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logr.Discard()))
		w.must(w.backend.Stop(ctx)) // the driver starts it again
		d := sink.NewDriver(src, w.backend, sink.Options{})
		ended := make(chan error, 1)
		go func() { ended <- d.Run(ctx) }()
		synctest.Wait()

		w.hns.Calls()
		w.hns.SetHook(func(string) error { return hns.ErrNotRunning })
		src.Set(view(service("a", withClusterIP(1)), "10.1.2.3"), view(service("c", withClusterIP(3)), "10.1.2.4"))
		src.Delete(view(service("b")).Key())
		time.Sleep(30 * time.Second)
		asked := 0
		for _, n := range w.hns.Calls() {
			asked += n
		}
		if asked < 2 || asked > 20 {
			t.Errorf("%d calls of HNS in half a minute, want a few with growing intervals", asked)
		}
		w.hns.SetHook(nil)
		time.Sleep(time.Minute)
		w.mustHave(`10.96.0.1 protocol 6 port 80->8080 to 10.1.2.3
			10.96.0.3 protocol 6 port 80->8080 to 10.1.2.4`)
		w.mustHaveRemotes("10.1.2.3", "10.1.2.4")
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("the driver returned %v", err)
		}
	})
}

func TestChangedNodeAddressCausesOnePass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := l2bridge(t)
		src := sinktest.NewSource()
		src.SetNode(node())
		src.Set(view(service("web"), "10.1.2.1"))
		src.MarkSynced()
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logr.Discard()))
		w.must(w.backend.Stop(ctx)) // the driver starts it again
		ended := make(chan error, 1)
		go func() { ended <- sink.Run(ctx, src, w.backend, sink.Options{}) }()
		synctest.Wait()
		w.hns.Calls()
		src.SetNode(sinktest.Node("here", "192.168.0.7"))
		time.Sleep(20 * time.Second) // less than the interval of Verify
		w.mustHaveCalled(and(listing, map[string]int{"CreateLoadBalancer": 1, "DeleteLoadBalancer": 1}))
		w.mustHave("10.96.0.1 source 192.168.0.7 protocol 6 port 80->8080 to 10.1.2.1")
		cancel()
		<-ended
	})
}

// TestServiceWithTooManyLoadBalancersIsRefused delivers a service that grows above the
// limit. It keeps its last load balancers, also in a pass and after a restart. Other
// services can still change.
func TestServiceWithTooManyLoadBalancersIsRefused(t *testing.T) {
	w := newWorld(t, fakehns.AllFeatures(), hns.Network{}, kernelspace.Options{MaxLoadBalancers: 3})
	wide := func(ips int) *api.View {
		return view(service("wide", func(s *api.Service) {
			for i := range ips {
				s.IPs.ExternalIPs.Add(netip.AddrFrom4([4]byte{198, 51, 100, byte(i + 1)}))
			}
		}), "10.1.2.1")
	}
	w.must(w.set(wide(2)))
	before := w.hns.Dump()
	w.hns.Calls()
	refuse := func(err error) {
		t.Helper()
		failed, ok := sink.Acknowledged(err)
		if !ok || len(failed) != 1 || failed[wide(0).Key()] == nil {
			t.Errorf("the error is %v, want one of the large service", err)
		}
		if after := w.hns.Dump(); after != before {
			t.Errorf("load balancers of a refused service changed (-before +after):\n%s", cmp.Diff(before, after))
		}
	}
	refuse(w.set(wide(5)))
	refuse(w.syncAll())
	w.restart()
	refuse(w.syncAll())
	w.must(w.backend.Verify(t.Context()))
	w.must(w.set(wide(1)))
	w.must(w.set(view(service("web", withClusterIP(9)), "10.1.2.9")))
}

// TestRefusedServiceServesNoFrontendWithSourceRanges delivers a service that gets source
// ranges and grows above the limit in one change. Its load balancers at addresses without
// source ranges stay.
func TestRefusedServiceServesNoFrontendWithSourceRanges(t *testing.T) {
	w := newWorld(t, fakehns.AllFeatures(), hns.Network{}, kernelspace.Options{MaxLoadBalancers: 3})
	with := func(prefixes []netip.Prefix, ips ...string) *api.View {
		return view(service("web", withClusterIP(9), func(s *api.Service) {
			s.IPs.LoadBalancerIPs = addrs(ips...)
			if prefixes != nil {
				s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.LoadBalancerIPs, Prefixes: prefixes}}
			}
		}), "10.1.2.1")
	}
	w.must(w.set(with(nil, "203.0.113.1")))
	const internal, external = "10.96.0.9", "203.0.113.1"
	if d := w.hns.Dump(); !strings.Contains(d, internal) || !strings.Contains(d, external) {
		t.Fatalf("the service is not served:\n%s", d)
	}
	ranges := []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
	wide := with(ranges, "203.0.113.1", "203.0.113.2", "203.0.113.3")
	for _, err := range []error{w.set(wide), w.syncAll()} {
		failed, ok := sink.Acknowledged(err)
		if !ok || failed[wide.Key()] == nil {
			t.Errorf("the error is %v, want one of the service", err)
		}
	}
	if d := w.hns.Dump(); !strings.Contains(d, internal) || strings.Contains(d, external) {
		t.Errorf("want only the load balancer of %s:\n%s", internal, d)
	}
}

// TestOnlyRetriesOfAFailedServiceListHNS changes a service while HNS refuses a load
// balancer of another one. Only retries of the refused service list the objects of HNS.
func TestOnlyRetriesOfAFailedServiceListHNS(t *testing.T) {
	w := l2bridge(t)
	w.must(w.syncAll())
	w.hns.Calls()
	w.hns.SetHook(failCalls("CreateLoadBalancer", errors.New("refused")))
	bad := view(service("bad", withClusterIP(8)), "10.1.2.8")
	if err := w.set(bad); err == nil {
		t.Fatal("HNS created the load balancer")
	}
	w.hns.SetHook(nil)
	w.hns.Calls()
	w.must(w.set(view(service("web", withClusterIP(9)), "10.1.2.9")))
	w.mustHaveCalled(map[string]int{"CreateEndpoint": 1, "CreateLoadBalancer": 1})
	w.must(w.set(bad))
	w.mustHaveCalled(and(listing, map[string]int{"CreateLoadBalancer": 1}))
}
