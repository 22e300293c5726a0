// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"context"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kpng-project/kpng/backends/conformance/internal/reference"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// fault is a fault of a proxy with the cases that must fail for it.
type fault struct {
	name string
	// The fault is in the proxy's sink, or view changes the objects that it reads.
	sink reference.Fault
	view func(*Objects)
	// cases are parts of the names of cases.
	cases []string
}

var faults = []fault{
	{name: "all connections go to one endpoint", sink: reference.OneEndpoint, cases: []string{
		"a cluster IP leads to every", "a cluster IP is served for clients outside", "in the network of a host",
		"each family from its own", "a node port is served at every", "an external IP is served", "a load-balancer IP is served"}},
	{name: "connections are spread unevenly", sink: reference.Uneven, cases: []string{"spread evenly", "two slices that name"}},
	{name: "draining endpoints get connections", sink: reference.DrainingToo, cases: []string{
		"terminating endpoints get no connections while", "policy Local prefers ready"}},
	{name: "IPv6 is forgotten", sink: reference.OneFamily, cases: []string{"becomes dual-stack", "a family without endpoints"}},
	{name: "ports are kept", sink: reference.KeepPort, cases: []string{"a named target port", "a change of a target port alone"}},
	{name: "a port's rules match any port", sink: reference.AnyPort, cases: []string{
		"each port has its own endpoints", "one port without endpoints", "a change of a port's number", "share an address on different"}},
	{name: "a port's rules match any protocol", sink: reference.AnyProtocol, cases: []string{"TCP and UDP of one number"}},
	{name: "a port's name is its identity", sink: reference.LosesRenamed, cases: []string{"a change of a port's name alone"}},
	{name: "SCTP is refused as a whole", sink: reference.RefusesSCTP, cases: []string{"may not know", "an SCTP port leads"}},
	{name: "all-ports services take TCP only", sink: reference.NoAllPorts, cases: []string{
		"all ports of all addresses", "echo requests", "an endpoint reaches itself", "to any port are", "ports of the service and of its slices", "a younger service gets no port"}},
	{name: "nothing is refused, only dropped", sink: reference.DropsAll, cases: []string{
		"a service without endpoints refuses", "a node port of a service without", "external addresses of a service without",
		"connections are refused if no endpoint", "refuses connections if there are no endpoints"}},
	{name: "there are no verdicts", sink: reference.NoVerdicts, cases: []string{
		"the first endpoint takes", "a family without endpoints refuses", "drops connections if", "drops connections from outside"}},
	{name: "unknown ports are left alone", sink: reference.UnknownPorts, cases: []string{"none of the service's refuses"}},
	{name: "node ports are on all addresses", sink: reference.AnyNodePort, cases: []string{"loopback addresses", "other than those chosen"}},
	{name: "node ports are on one address", sink: reference.FirstNodePort, cases: []string{"a node port is served at every"}},
	{name: "load-balancer IPs of mode Proxy are served", sink: reference.ServesProxied, cases: []string{"of mode Proxy"}},
	{name: "claims are ignored", sink: reference.IgnoresClaims, cases: []string{"of two services that claim"}},
	{name: "source ranges are ignored", sink: reference.AnySource, cases: []string{
		"let nobody else in", "hold for sources on this node", "that is an external IP too", "ranges of the other family only"}},
	{name: "all source ranges but the first are ignored", cases: []string{"let nobody else in", "a range of all addresses"},
		view: services(func(s *corev1.Service) {
			if ranges := s.Spec.LoadBalancerSourceRanges; len(ranges) > 1 {
				s.Spec.LoadBalancerSourceRanges = ranges[:1]
			}
		})},
	{name: "source ranges hold everywhere", sink: reference.GuardsAll, cases: []string{"hold for load-balancer IPs only"}},
	{name: "source ranges come after verdicts", sink: reference.GuardsLate, cases: []string{"come before the verdict"}},
	{name: "a service's own address is a source like any other", sink: reference.NoOwnAddress, cases: []string{"from the service's own load-balancer IP"}},
	{name: "there is no short circuit", sink: reference.NoShortCircuit, cases: []string{"ignore external policy Local", "only connections to external addresses"}},
	{name: "hairpin is not masqueraded", sink: reference.NoHairpin, cases: []string{"an endpoint that reaches itself through"}},
	{name: "nothing but hairpin is masqueraded", sink: reference.NoMasquerade, cases: []string{
		"with policy Cluster, all connections get", "get the address towards", "if that is asked for"}},
	{name: "everything is masqueraded", sink: reference.MasqueradesAll, cases: []string{"keep their source address"}},
	{name: "there is no affinity", sink: reference.NoAffinity, cases: []string{
		"a client address keeps", "the node and its pods", "whatever address of the service", "ends when a client", "when an endpoint goes",
		"is no longer ready its", "when endpoints come", "taken away, or given"}},
	{name: "affinity is for ever", sink: reference.EternalAffinity, cases: []string{"ends when a client"}},
	{name: "affinity is to a place in a list", sink: reference.FixedAffinity, cases: []string{"when endpoints come"}},
	{name: "affinity is the same for all ports", sink: reference.SharedAffinity, cases: []string{"has its own affinity"}},
	{name: "affinity leads to any endpoint", sink: reference.LooseAffinity, cases: []string{"never leads outside"}},
	{name: "flows are left alone", sink: reference.KeepsFlows, cases: []string{"a UDP flow"}},
	{name: "flows are forgotten", sink: reference.ForgetsFlows, cases: []string{"established TCP connections", "UDP flows stay", "a restart leaves"}},
	{name: "health checks are always good", sink: reference.HealthLies, cases: []string{"tells how many"}},
	{name: "health-check ports stay open", sink: reference.HealthStays, cases: []string{"follows its service"}},
	{name: "a health-check port that is in use stops everything", sink: reference.HealthFirst, cases: []string{"that is in use disturbs"}},
	{name: "rules stay", sink: reference.KeepsRules, cases: []string{
		"an endpoint that comes takes", "that is deleted is left", "of another proxy", "takes the place of", "a node port that a service gives up",
		"an external IP that a service gives up", "swap their external IPs", "what changes while no process"}},
	{name: "a change takes everything down for a moment", sink: reference.Flushes, cases: []string{"while many services", "killed while it programs"}},
	{name: "others' rules are flushed", sink: reference.FlushesOthers, cases: []string{"two instances"}},
	{name: "clean-up does nothing", sink: reference.LeavesTable, cases: []string{"clean-up removes"}},
	{name: "all endpoints are ready", cases: []string{"that are not ready get no", "connections are refused if no endpoint is ready"},
		view: endpoints(func(e *discoveryv1.Endpoint) bool { e.Conditions = discoveryv1.EndpointConditions{}; return true })},
	{name: "missing conditions mean not ready", cases: []string{"missing conditions"},
		view: endpoints(func(e *discoveryv1.Endpoint) bool { return e.Conditions.Ready != nil })},
	{name: "terminating endpoints are not ready", cases: []string{"ready and terminating counts"},
		view: endpoints(func(e *discoveryv1.Endpoint) bool {
			ready := *e.Conditions.Ready && !*e.Conditions.Terminating
			e.Conditions.Ready = &ready
			return true
		})},
	{name: "terminating endpoints are gone", cases: []string{"those that serve and terminate get", "policy Local falls back", "the fallback to terminating"},
		view: endpoints(func(e *discoveryv1.Endpoint) bool { return !*e.Conditions.Terminating })},
	{name: "there are no hints", cases: []string{
		"zone hints on all", "node hints on all", "that a ready endpoint lacks", "zone hints choose", "followed at external", "loses its zone"},
		view: endpoints(func(e *discoveryv1.Endpoint) bool { e.Hints = nil; return true })},
	{name: "hints are orders", cases: []string{"for other zones only", "the fallback to terminating", "policy Local ignores hints"},
		view: endpoints(func(e *discoveryv1.Endpoint) bool {
			return e.Hints == nil || slices.Contains(e.Hints.ForZones, discoveryv1.ForZone{Name: zone})
		})},
	{name: "policies are ignored", cases: []string{
		"internal policy Local leads", "internal policy Local drops", "external policy Local leads", "external policy Local drops", "counts for external IPs",
		"only connections to external addresses", "a change of the policies"},
		view: services(func(s *corev1.Service) {
			cluster := corev1.ServiceInternalTrafficPolicyCluster
			s.Spec.InternalTrafficPolicy = &cluster
			if s.Spec.ExternalTrafficPolicy != "" {
				s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
			}
		})},
	{name: "a policy holds everywhere", cases: []string{"does not count at"},
		view: services(func(s *corev1.Service) {
			local := corev1.ServiceInternalTrafficPolicyLocal
			if *s.Spec.InternalTrafficPolicy == local || s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
				s.Spec.InternalTrafficPolicy, s.Spec.ExternalTrafficPolicy = &local, corev1.ServiceExternalTrafficPolicyLocal
			}
		})},
}

// endpoints returns a view that hides endpoints for which f is false.
func endpoints(f func(*discoveryv1.Endpoint) bool) func(*Objects) {
	return func(objects *Objects) {
		for _, slice := range objects.Slices {
			var kept []discoveryv1.Endpoint
			for _, e := range slice.Endpoints {
				if f(&e) {
					kept = append(kept, e)
				}
			}
			slice.Endpoints = kept
		}
	}
}

// services returns a view that modifies services.
func services(f func(*corev1.Service)) func(*Objects) {
	return func(objects *Objects) {
		for _, service := range objects.Services {
			f(service)
		}
	}
}

// misreading is a subject that reads modified objects.
type misreading struct {
	*sinkSubject
	view func(*Objects)
}

func (m *misreading) Publish(ctx context.Context, objects *Objects) error {
	m.view(objects) // the kit made the objects for this call only
	return m.sinkSubject.Publish(ctx, objects)
}

// TestEveryCaseCanFail breaks the reference proxy in different ways. It checks that the
// named cases fail, and that each case fails for some fault.
func TestEveryCaseCanFail(t *testing.T) {
	var mu sync.Mutex
	failed := map[string]bool{}
	t.Run("faults", func(t *testing.T) {
		for _, f := range faults {
			t.Run(f.name, func(t *testing.T) {
				t.Parallel()
				subject := newSinkSubject(t, broken(f.sink), Options{})
				for _, part := range f.cases {
					if !slices.ContainsFunc(sections, func(s section) bool {
						return slices.ContainsFunc(s.cases, func(c testCase) bool { return strings.Contains(c.name, part) })
					}) {
						t.Errorf("there is no case %q", part)
					}
				}
				for _, r := range failures(t, subject, f) {
					mu.Lock()
					failed[r.Case] = failed[r.Case] || r.Outcome == Failed
					mu.Unlock()
					if r.Outcome != Failed {
						t.Errorf("%s%s: %s", r.where(), r.Case, r.Outcome)
					}
				}
			})
		}
	})
	for _, section := range sections {
		for _, c := range section.cases {
			if !failed[c.name] {
				t.Errorf("nothing makes this case fail: %s", c.name)
			}
		}
	}
}

// failures runs the cases of a fault.
func failures(t *testing.T, subject *sinkSubject, f fault) Matrix {
	t.Helper()
	pattern := make([]string, len(f.cases))
	for i, part := range f.cases {
		pattern[i] = regexp.QuoteMeta(part)
	}
	opts := Options{Cases: regexp.MustCompile(strings.Join(pattern, "|"))}
	var s Subject = subject
	if f.view != nil {
		s = &misreading{subject, f.view}
	}
	k := newKit(t, s, opts)
	defer k.kill()                //nolint:errcheck // it may have ended
	k.opts.Patience = time.Second // the expected event may never happen
	var matrix Matrix
	for _, section := range sections {
		for _, c := range section.cases {
			if opts.Cases.MatchString(c.name) {
				matrix = append(matrix, k.try(t.Context(), section.name, c)...)
			}
		}
	}
	return matrix
}
