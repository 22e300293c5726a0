// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/watcher"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// screen is the state of a tenant's services as the output shows it. The output comes
// from kpng-json, or from a sink that prints like kpng-json.
//
// kpng-json prints the whole state after each change. These prints have no separator. So
// each screen has an additional service, the stamp. Its name sorts last, so the stamp
// ends each print. The stamp's ports contain a number that the test increases. A print
// with the new number includes all earlier API writes.
type screen struct {
	tenant *tenant
	proxy  string
	out    *lines

	stamp      *corev1.Service
	stampSlice *discoveryv1.EndpointSlice

	read  int // number of processed lines of out
	next  []*api.View
	shown []*api.View // without the stamp
	at    int32       // the number in the printed stamp
}

// newScreen returns a screen and creates its stamp. Call newScreen before the process
// that writes to out starts.
func newScreen(n *tenant, proxy string, out *lines) *screen {
	n.t.Helper()
	s := &screen{tenant: n, proxy: proxy, out: out}
	s.stamp = newService(strings.TrimSuffix("zzz-stamp-"+proxy, "-"), proxy, servicePort("", 1, 1))
	s.stampSlice = newSlice(s.stamp.Name, s.stamp, slicePorts("", 1), newEndpoint("192.0.2.1", ""))
	n.put(s.stamp, s.stampSlice)
	return s
}

// startScreen starts kpng-json for a tenant.
func startScreen(n *tenant, kubeconfig, proxy string) *screen {
	n.t.Helper()
	s := newScreen(n, proxy, nil)
	p := start(n.t, "--kubeconfig", kubeconfig, "--node-name", n.name, "--service-proxy-name", proxy,
		"--keep-labels", watcher.LabelServiceProxyName)
	s.out = p.stdout
	n.t.Cleanup(s.checkAll)
	return s
}

// runScreen runs a proxy in this process. The proxy prints like kpng-json.
func runScreen(n *tenant, opts kpng.Options) *screen {
	n.t.Helper()
	s := newScreen(n, opts.Services.ServiceProxyName, newLines())
	opts.NodeName = n.name
	opts.Services.KeepLabels = []string{watcher.LabelServiceProxyName}
	run(n.t, opts, sink.FullState(func(_ context.Context, services []*api.View) error {
		return printTo(s.out, services)
	}))
	n.t.Cleanup(s.checkAll)
	return s
}

func printTo(out *lines, services []*api.View) error {
	encoder := json.NewEncoder(out)
	for _, s := range services {
		if err := encoder.Encode(s); err != nil {
			return err
		}
	}
	return nil
}

// run runs a proxy in this process until the test ends or stop is called.
func run(t testing.TB, opts kpng.Options, sinks ...sink.Sink) (p *kpng.Proxy, stop func()) {
	t.Helper()
	for _, s := range sinks {
		opts.Sinks = append(opts.Sinks, kpng.Sink{Sink: s})
	}
	p, err := kpng.New(opts)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("proxy returned %v", err)
		}
	}
	t.Cleanup(stop)
	return p, stop
}

// expect waits until the output includes all earlier API writes and describe(s.shown)
// returns want.
func (s *screen) expect(want ...string) {
	s.tenant.t.Helper()
	s.await(func() string { return cmp.Diff(want, describe(s.shown)) })
}

// await waits until the output includes all earlier API writes and diff() returns an
// empty text.
func (s *screen) await(diff func() string) {
	t := s.tenant.t
	t.Helper()
	stamp := s.stamp.Spec.Ports[0].Port + 1
	s.stamp.Spec.Ports[0].Port = stamp
	s.stampSlice.Ports[0].Port = &stamp
	s.tenant.put(s.stamp, s.stampSlice)

	ctx := within(t)
	for {
		list, more := s.out.since(s.read)
		for _, line := range list {
			s.take(line)
		}
		if s.at == stamp && diff() == "" {
			return
		}
		select {
		case <-more:
		case <-ctx.Done():
			t.Fatalf("output of proxy %q at stamp %d of %d (%v) (-want +got):\n%s",
				s.proxy, s.at, stamp, context.Cause(ctx), diff())
		}
	}
}

// take processes the next line of the output.
func (s *screen) take(line string) {
	t := s.tenant.t
	t.Helper()
	s.read++
	view := new(api.View)
	decoder := json.NewDecoder(strings.NewReader(line))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(view); err != nil {
		t.Fatalf("proxy %q printed invalid JSON: %v\n%s", s.proxy, err, line)
	}
	if err := s.belongs(view); err != nil {
		t.Errorf("proxy %q printed a service of another proxy: %v\n%s", s.proxy, err, line)
	}
	switch {
	case view.Service.Namespace != s.tenant.name:
	case view.Service.Name != s.stamp.Name:
		s.next = append(s.next, view)
	default:
		s.shown, s.next = s.next, nil
		s.at = 0
		if port := &view.Service.Ports[0]; len(view.Endpoints) == 1 && view.Endpoints[0].TargetPort(port) == port.Port {
			s.at = port.Port
		}
	}
}

// checkAll processes the rest of the output.
func (s *screen) checkAll() {
	list, _ := s.out.since(s.read)
	for _, line := range list {
		s.take(line)
	}
}

// belongs returns an error if view is not for the proxy of the screen.
func (s *screen) belongs(view *api.View) error {
	label, labelled := view.Service.Labels[watcher.LabelServiceProxyName]
	switch {
	case labelled != (s.proxy != "") || label != s.proxy:
		return fmt.Errorf("the label is %q", label)
	case s.proxy == "" && view.Service.IPs.Headless:
		return errors.New("the service is headless")
	default:
		return nil
	}
}

// describe formats views as lines. Below each service are its endpoints, indented.
//
//	web IPv4 http=80
//	  10.1.0.1 http=8080 local
//	  10.1.0.2 http=8081 draining
func describe(views []*api.View) []string {
	var out []string
	for _, v := range views {
		out = append(out, describeService(v))
		for i := range v.Endpoints {
			out = append(out, describeEndpoint(v, &v.Endpoints[i]))
		}
		for i := range v.Draining {
			out = append(out, describeEndpoint(v, &v.Draining[i])+" draining")
		}
	}
	return out
}

func describeService(v *api.View) string {
	words := []string{v.Service.Name}
	if v.Service.IPs.Headless {
		words = append(words, "headless")
	}
	for _, f := range [...]api.Family{api.IPv4, api.IPv6} {
		if len(v.Service.IPs.ClusterIPs.Family(f)) > 0 {
			words = append(words, f.String())
		}
	}
	for ip := range v.Service.IPs.ExternalIPs.All() {
		words = append(words, ip.String())
	}
	for i := range v.Service.Ports {
		p := &v.Service.Ports[i]
		word := fmt.Sprint(p.Port)
		if p.Name != "" {
			word = p.Name + "=" + word
		}
		if slices.ContainsFunc(v.Unusable, func(u api.PortFamily) bool { return u.Port == p.Port && u.Protocol == p.Protocol }) {
			word += "!"
		}
		words = append(words, word)
	}
	return strings.Join(words, " ")
}

func describeEndpoint(v *api.View, e *api.Endpoint) string {
	words := []string{" ", e.Addr.String()}
	for i := range v.Service.Ports {
		p := &v.Service.Ports[i]
		word := fmt.Sprint(e.TargetPort(p))
		if p.Name != "" {
			word = p.Name + "=" + word
		}
		words = append(words, word)
	}
	if e.Local {
		words = append(words, "local")
	}
	if e.Terminating {
		words = append(words, "terminating")
	}
	return strings.Join(words, " ")
}
