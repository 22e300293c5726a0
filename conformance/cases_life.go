// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/watcher"
	corev1 "k8s.io/api/core/v1"
)

const proxyNameLabel = watcher.LabelServiceProxyName

// crowdSize is the number of additional services that a case changes to keep the proxy
// busy.
const crowdSize = 80

var lifeCases = []testCase{
	{name: "while many services are added and deleted, no connection to another service fails", run: func(s *scene) {
		web := s.addService("web").withAllFrontends().withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		others := s.crowd()
		traffic := s.traffic(web, s.a, s.d)
		for range 3 {
			s.services = append(s.services[:1:1], others...)
			s.publish()
			s.services = s.services[:1]
			s.publish()
		}
		traffic.stopAndCheck()
	}},
	{name: "when the proxy is killed while it programs many services and then restarted, no connection fails", needs: []Feature{Restart}, run: func(s *scene) {
		web := s.addService("web").withAllFrontends().withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		others := s.crowd()
		start := time.Now()
		s.services = append(s.services[:1:1], others...)
		s.publish()
		took := time.Since(start)
		traffic := s.traffic(web, s.a, s.d)
		const kills = 4 // an even number, so that the last change adds the additional services
		for i := range kills {
			// Alternately remove and add the additional services.
			s.services = s.services[:1]
			if i%2 == 1 {
				s.services = append(s.services[:1:1], others...)
			}
			s.publishNow()
			s.sleep(took * time.Duration(i+1) / (kills + 1))
			s.must(s.kill())
			traffic.awaitMore(20)
			s.must(s.start(s.ctx, s.site))
		}
		traffic.stopAndCheck()
		s.mustReach(s.c, others[0].clusterIP(), s.b)
		s.mustReach(s.c, others[crowdSize-1].clusterIP(), s.b)
		s.services = s.services[:1]
		s.publish()
		s.mustIgnore(s.c, others[0].clusterIP())
		s.mustIgnore(s.c, others[crowdSize-1].clusterIP())
	}},
	{name: "a restarted proxy applies the changes that it missed", needs: []Feature{Restart}, run: func(s *scene) {
		stays := s.addService("stays").withAllFrontends().withEndpoints(asReady(s.a))
		goes := s.addService("goes").withAllFrontends().withEndpoints(asReady(s.b))
		moves := s.addService("moves").withAllFrontends().withEndpoints(asReady(s.b))
		s.publish()
		s.must(s.kill())
		s.mustReach(s.outside, stays.loadBalancerIP(), s.a)
		s.mustReach(s.outside, goes.loadBalancerIP(), s.b)
		s.remove(goes)
		moves.withEndpoints(asReady(s.d))
		comes := s.addService("comes").withEndpoints(asReady(s.a))
		s.publishNow()
		s.must(s.start(s.ctx, s.site))
		s.mustReach(s.c, stays.clusterIP(), s.a)
		s.mustReach(s.c, moves.clusterIP(), s.d)
		s.mustReach(s.c, comes.clusterIP(), s.a)
		s.mustIgnore(s.c, goes.clusterIP())
		s.mustIgnore(s.outside, goes.externalIP())
	}},
	{name: "two instances and kube-proxy's rules coexist", needs: []Feature{Instances, Cleanup}, run: func(s *scene) {
		s.addKubeProxy()
		rules := s.kubeProxy()
		web := s.addService("web").withAllFrontends().withEndpoints(asReady(s.a), asReady(s.d))
		other := s.addService("other").withAllFrontends().withEndpoints(asReady(s.b), asReady(s.e))
		headless := s.addService("headless").withExternalIP().withEndpoints(asReady(s.c))
		headless.Spec.ClusterIP, headless.Spec.ClusterIPs = corev1.ClusterIPNone, []string{corev1.ClusterIPNone}
		for _, svc := range []*service{other, headless} {
			svc.Labels = map[string]string{proxyNameLabel: "second"}
			svc.slices = nil
		}
		other.withEndpoints(asReady(s.b), asReady(s.e))
		headless.withEndpoints(asReady(s.c))
		s.publish()
		for _, to := range other.allAddresses() {
			if to != other.nodePort(0) {
				s.mustIgnore(s.outside, to)
			}
		}
		site := s.site
		site.Instance, site.ServiceProxyName = "kpng-second", "second"
		second, err := s.subject.Start(s.ctx, site)
		s.must(err)
		s.addCleanup(second.Kill)
		check := func() {
			for _, to := range web.externalAddresses() {
				s.mustMasquerade(s.outside, to, s.a, s.d)
				s.mustReach(s.node, to, s.a, s.d)
				s.mustReach(s.c, to, s.a, s.d)
			}
		}
		s.publish()
		// Publishing waits for the first instance only.
		s.eventually(func() { s.mustReach(s.outside, headless.externalIP(), s.c) })
		for _, to := range other.externalAddresses() {
			s.eventually(func() { s.mustMasquerade(s.outside, to, s.b, s.e) })
		}
		s.eventually(func() { s.mustReach(s.c, other.clusterIP(), s.b, s.e) })
		check()
		s.must(second.Kill())
		s.must(s.subject.Cleanup(s.ctx, site))
		check()
		s.mustIgnore(s.outside, headless.externalIP())
		s.mustIgnore(s.c, other.clusterIP())
		if diff := cmp.Diff(rules, s.kubeProxy()); diff != "" {
			s.failf("kube-proxy's rules changed or matched a packet with kube-proxy's mark (-before +after):\n%s", diff)
		}
	}},
	{name: "clean-up removes everything that the proxy created and nothing else", needs: []Feature{Cleanup}, run: func(s *scene) {
		web := s.addService("web").withAllFrontends().withAffinity(100).withEndpoints(asReady(s.a), asReady(s.d))
		s.addService("none").withAllFrontends()
		s.publish()
		s.reachedEndpoint(api.TCP, s.outside, web.loadBalancerIP())
		s.must(s.kill())
		s.must(s.subject.Cleanup(s.ctx, s.site))
		after, err := s.inventory()
		s.must(err)
		if diff := cmp.Diff(s.initialInventory, after); diff != "" {
			s.failf("the node changed (-before +after):\n%s", diff)
		}
		s.must(s.subject.Cleanup(s.ctx, s.site)) // Cleanup must also succeed if nothing is left to remove
	}},
}

// crowd creates additional services and returns them. To publish them, the caller adds
// them to the scene's services.
func (s *scene) crowd() []*service {
	on := len(s.services)
	for i := range crowdSize {
		s.addService(fmt.Sprintf("crowd%d", i)).withEndpoints(asReady(s.b))
	}
	others := s.services[on:]
	s.services = s.services[:on:on]
	return others
}

// restart kills the proxy and starts it again.
func (s *scene) restart() {
	s.must(s.kill())
	s.must(s.start(s.ctx, s.site))
}

// restartWith restarts the proxy with a changed configuration. At the end of the case,
// the proxy gets its old configuration again.
func (s *scene) restartWith(change func(*Site)) {
	site := s.site
	change(&site)
	replace := func(old, site Site) error {
		return errors.Join(s.kill(), s.subject.Cleanup(s.ctx, old), s.start(s.ctx, site))
	}
	s.addCleanup(func() error { return replace(site, s.site) })
	s.must(replace(s.site, site))
}

// eventually calls f until f succeeds or opts.Patience has passed.
func (s *scene) eventually(f func()) {
	for deadline := time.Now().Add(s.opts.Patience); ; {
		done := make(chan struct{})
		go func() {
			defer close(done)
			f()
		}()
		<-done
		err := s.err
		s.err = nil
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			s.must(err)
		}
		s.sleep(10 * time.Millisecond)
	}
}

// traffic opens connections to a service from several clients, until stop or stopAndCheck
// is called.
type traffic struct {
	scene *scene
	// persons are the endpoints that the connections may reach.
	persons []person
	cancel  context.CancelFunc
	group   sync.WaitGroup
	count   atomic.Int64
	failed  chan error
}

func (s *scene) traffic(svc *service, persons ...person) *traffic {
	ctx, cancel := context.WithCancel(s.ctx)
	t := &traffic{scene: s, persons: persons, cancel: cancel, failed: make(chan error, 1)}
	s.addCleanup(func() error { t.stop(); return nil })
	for _, way := range []struct {
		from person
		to   netip.AddrPort
	}{{s.c, svc.clusterIP()}, {s.node, svc.clusterIP()}, {s.outside, svc.loadBalancerIP()}} {
		for _, protocol := range s.protocols {
			t.group.Go(func() { t.run(ctx, protocol, way.from, way.to) })
		}
	}
	return t
}

func (t *traffic) run(ctx context.Context, protocol api.Protocol, from person, to netip.AddrPort) {
	// Open at most a few hundred connections per second, to leave CPU time for the proxy.
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for ctx.Err() == nil {
		answer, err := t.scene.ask(from, protocol, to, t.scene.opts.Patience)
		if err == nil && !slices.ContainsFunc(t.persons, func(p person) bool { return p.Name == answer.Name }) {
			err = fmt.Errorf("answer from %s", answer.Name)
		}
		if err != nil && ctx.Err() == nil {
			select {
			case t.failed <- fmt.Errorf("connection %d, %s, want %s: %w", t.count.Load(), describe(from, protocol, to), names(t.persons), err):
			default:
			}
			return
		}
		t.count.Add(1)
		<-tick.C
	}
}

// awaitMore waits for n more connections.
func (t *traffic) awaitMore(n int64) {
	deadline := time.Now().Add(t.scene.opts.Patience)
	for until := t.count.Load() + n; t.count.Load() < until && len(t.failed) == 0 && time.Now().Before(deadline); {
		t.scene.sleep(time.Millisecond)
	}
}

func (t *traffic) stop() {
	t.cancel()
	t.group.Wait()
}

// stopAndCheck stops the traffic. It checks that there were connections and that none
// failed.
func (t *traffic) stopAndCheck() {
	t.stop()
	select {
	case err := <-t.failed:
		t.scene.must(err)
	default:
	}
	if t.count.Load() < 20 {
		t.scene.failf("made only %d connections", t.count.Load())
	}
}

// kubeProxyRules imitate rules of kube-proxy. They count and drop packets with
// kube-proxy's mark.
const kubeProxyRules = `
table ip kube-proxy {
	comment "rules for kube-proxy"
	map service-ips {
		type ipv4_addr . inet_proto . inet_service : verdict
		elements = { 192.0.2.1 . tcp . 443 : goto service-foreign }
	}
	chain service-foreign {
		meta l4proto tcp dnat to 192.0.2.2:6443
	}
	chain nat-prerouting {
		type nat hook prerouting priority dstnat; policy accept;
		ip daddr . meta l4proto . th dport vmap @service-ips
	}
	chain nat-output {
		type nat hook output priority -100; policy accept;
		ip daddr . meta l4proto . th dport vmap @service-ips
	}
	chain postrouting {
		type filter hook postrouting priority 50; policy accept;
		meta mark and 0x00004000 != 0 counter drop
	}
}
table ip6 kube-proxy {
	chain postrouting {
		type filter hook postrouting priority 50; policy accept;
		meta mark and 0x00004000 != 0 counter drop
	}
}
`

func (s *scene) addKubeProxy() {
	_, err := s.nft(kubeProxyRules, "-f", "-")
	s.must(err)
	s.addCleanup(func() error {
		_, err := s.nft("delete table ip kube-proxy; delete table ip6 kube-proxy", "-f", "-")
		return err
	})
}

func (s *scene) kubeProxy() string {
	var all string
	for _, table := range [][]string{{"ip", "kube-proxy"}, {"ip6", "kube-proxy"}, {"inet", "somebody"}} {
		rules, err := s.nft("", "-a", "list", "table", table[0], table[1])
		s.must(err)
		all += rules
	}
	return all
}
