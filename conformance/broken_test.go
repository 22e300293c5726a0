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

	"github.com/kpng-project/kpng/conformance/internal/reference"
	"github.com/kpng-project/kpng/internal/parameters"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// fault describes a faulty proxy and the cases that must fail with it.
type fault struct {
	name string
	// Exactly one of the next two fields is set: a fault of the reference proxy, or a
	// function that modifies the objects that the proxy reads.
	sink reference.Fault
	view func(*Objects)
	// failingCases are substrings of the names of the cases that must fail.
	failingCases []string
}

var faults = []fault{
	{name: "all connections go to one endpoint", sink: reference.OneEndpoint, failingCases: []string{
		"a cluster IP leads to every", "clients outside the cluster", "use the host network",
		"each family from its own", "a node port is served at every", "an external IP is served", "a load-balancer IP is served"}},
	{name: "connections are spread unevenly", sink: reference.Uneven, failingCases: []string{"distributed evenly", "an endpoint in two slices", "equal weights", "a wrong algorithm", "a wrong weight"}},
	{name: "draining endpoints get connections", sink: reference.DrainingToo, failingCases: []string{
		"terminating endpoints get no connections while", "policy Local prefers ready"}},
	{name: "IPv6 is forgotten", sink: reference.OneFamily, failingCases: []string{"becomes dual-stack", "a family without endpoints"}},
	{name: "the destination port is not translated", sink: reference.KeepPort, failingCases: []string{"a named target port", "changing only a target port"}},
	{name: "a port's rules match any port", sink: reference.AnyPort, failingCases: []string{
		"each port has its own endpoints", "a port without endpoints", "changing only a port's number", "share an address with different"}},
	{name: "a port's rules match any protocol", sink: reference.AnyProtocol, failingCases: []string{"TCP and UDP ports with the same number"}},
	{name: "a renamed port loses its service", sink: reference.LosesRenamed, failingCases: []string{"changing only a port's name"}},
	{name: "an SCTP port blocks all programming", sink: reference.RefusesSCTP, failingCases: []string{"may not support", "an SCTP port leads"}},
	{name: "all-ports services accept only TCP", sink: reference.NoAllPorts, failingCases: []string{
		"all ports of all addresses", "echo requests", "an endpoint reaches itself through", "to any port are", "ports of the service and of its slices", "a younger service gets no port"}},
	{name: "connections are dropped instead of refused", sink: reference.DropsAll, failingCases: []string{
		"a service without endpoints refuses", "a node port of a service without", "external addresses of a service without",
		"connections are refused if no endpoint", "refuses connections if there are no endpoints"}},
	{name: "connections without endpoints are neither refused nor dropped", sink: reference.NoVerdicts, failingCases: []string{
		"the first endpoint is added", "a family without endpoints refuses", "internal policy Local drops", "drops connections from outside"}},
	{name: "unknown ports are not handled", sink: reference.UnknownPorts, failingCases: []string{"ports that its service does not have"}},
	{name: "node ports are served at all addresses", sink: reference.AnyNodePort, failingCases: []string{"loopback addresses", "only at the configured node addresses"}},
	{name: "node ports are served at one address", sink: reference.FirstNodePort, failingCases: []string{"a node port is served at every"}},
	{name: "UDP node ports are not served on localhost", sink: reference.LocalhostTCP, failingCases: []string{"on localhost leads to every", "on localhost, a UDP flow"}},
	{name: "node ports on localhost keep their first endpoints", sink: reference.LocalhostFrozen, failingCases: []string{"on localhost, a new endpoint", "on localhost, a UDP flow"}},
	{name: "node ports on localhost are not closed", sink: reference.LocalhostStays, failingCases: []string{"on localhost refuses", "on localhost is closed"}},
	{name: "a port on localhost that is in use is not retried", sink: reference.LocalhostOnce, failingCases: []string{"on localhost that is in use"}},
	{name: "the kernel routes packets to loopback addresses", sink: reference.LocalhostRoutes, failingCases: []string{"route_localnet"}},
	{name: "connections to localhost reach no endpoints in the host network", sink: reference.LocalhostPodsOnly, failingCases: []string{"on localhost may lead to endpoints in the host network"}},
	{name: "load-balancer IPs of mode Proxy are served", sink: reference.ServesProxied, failingCases: []string{"of mode Proxy"}},
	{name: "claims are ignored", sink: reference.IgnoresClaims, failingCases: []string{"if two services claim"}},
	{name: "source ranges are ignored", sink: reference.AnySource, failingCases: []string{
		"cannot use the load-balancer IP", "apply to clients on this node", "that is also an external IP", "source ranges of only the other family"}},
	{name: "all source ranges except the first are ignored", failingCases: []string{"cannot use the load-balancer IP", "a range of all addresses"},
		view: eachService(func(s *corev1.Service) {
			if ranges := s.Spec.LoadBalancerSourceRanges; len(ranges) > 1 {
				s.Spec.LoadBalancerSourceRanges = ranges[:1]
			}
		})},
	{name: "source ranges apply to all frontends", sink: reference.GuardsAll, failingCases: []string{"apply only to load-balancer IPs"}},
	{name: "source ranges apply after verdicts", sink: reference.GuardsLate, failingCases: []string{"drops clients outside its source ranges"}},
	{name: "source ranges do not admit the service's own addresses", sink: reference.NoOwnAddress, failingCases: []string{"from the service's own load-balancer IP"}},
	{name: "there is no short circuit", sink: reference.NoShortCircuit, failingCases: []string{"ignore external policy Local", "connections to localhost ignore", "ignore them only at external addresses"}},
	{name: "hairpin is not masqueraded", sink: reference.NoHairpin, failingCases: []string{"an endpoint that connects to itself"}},
	{name: "only hairpin is masqueraded", sink: reference.NoMasquerade, failingCases: []string{
		"with policy Cluster, connections from elsewhere get", "with policy Cluster, connections of the node and its pods get", "source address of the route", "if so configured"}},
	{name: "everything is masqueraded", sink: reference.MasqueradesAll, failingCases: []string{"keep their source address"}},
	{name: "there is no affinity", sink: reference.NoAffinity, failingCases: []string{
		"a client keeps its endpoint, and clients use", "session affinity applies on localhost", "affinity applies to the node", "a client has the same endpoint at all", "ends only when a client", "when an endpoint is removed, only",
		"when an endpoint is no longer ready", "while others are added", "disabling and enabling", "does not end session affinity", "session affinity comes before hashing"}},
	{name: "affinity never ends", sink: reference.EternalAffinity, failingCases: []string{"ends only when a client"}},
	{name: "affinity depends on the position in the list of endpoints", sink: reference.FixedAffinity, failingCases: []string{"while others are added"}},
	{name: "the ports of a service share affinity", sink: reference.SharedAffinity, failingCases: []string{"has its own affinity"}},
	{name: "affinity may select any endpoint", sink: reference.LooseAffinity, failingCases: []string{"never selects"}},
	{name: "connection tracking is not cleaned up", sink: reference.KeepsFlows, failingCases: []string{"a UDP flow", "UDP flows move as without"}},
	{name: "the remainder of a hash chooses the endpoint", sink: reference.HashModulo, failingCases: []string{
		"few other clients", "few clients of a hashed service", "return to an endpoint"}},
	{name: "each process has its own hash", sink: reference.HashSeed, failingCases: []string{"a restarted proxy chooses", "two proxies choose"}},
	{name: "only clients that send data get resets", sink: reference.ResetsActive, failingCases: []string{"an idle client"}},
	{name: "weights are ignored", failingCases: []string{
		"weights set the shares", "a slice without a weight", "weights apply", "hints come before weights", "each service has its own weights", "the largest weight",
		"a change of weights takes effect", "without their weights", "the weights of its own", "when a weight changes"},
		view: eachSlice(func(s *discoveryv1.EndpointSlice) {
			if s.Annotations[parameters.Weight] != "0" {
				delete(s.Annotations, parameters.Weight)
			}
		})},
	{name: "weight zero is ignored", failingCases: []string{"of weight zero gets no", "the weight of their endpoint becomes zero", "its weight is no longer zero", "all endpoints have weight zero"},
		view: eachSlice(func(s *discoveryv1.EndpointSlice) {
			if s.Annotations[parameters.Weight] == "0" {
				delete(s.Annotations, parameters.Weight)
			}
		})},
	{name: "endpoints of weight zero are forgotten", failingCases: []string{"UDP flows continue when the weight", "to an endpoint of weight zero are not reset"},
		view: eachSlice(func(s *discoveryv1.EndpointSlice) {
			if s.Annotations[parameters.Weight] == "0" {
				s.Endpoints = nil
			}
		})},
	{name: "algorithms are ignored", failingCases: []string{
		"with hashing by client", "hashing by client applies", "lead to the same endpoint again", "does not depend on the order", "a change of the algorithm"},
		view: eachService(func(s *corev1.Service) { delete(s.Annotations, parameters.Algorithm) })},
	{name: "hashing never uses the port", failingCases: []string{"the connections of a client share", "weights set the shares of hashed"},
		view: eachService(func(s *corev1.Service) {
			if s.Annotations[parameters.Algorithm] == "hash-connection" {
				s.Annotations[parameters.Algorithm] = "hash-client"
			}
		})},
	{name: "a deleted service stays without endpoints", failingCases: []string{"their service with resets is deleted"}, view: keepDeleted()},
	{name: "requests for resets are ignored", failingCases: []string{
		"connections to a removed endpoint are reset", "all connections to a removed", "the last endpoint is removed", "that is no longer ready are reset", "are reset if another is ready",
		"each family of a dual-stack service resets", "resets leave connections"},
		view: eachService(func(s *corev1.Service) { delete(s.Annotations, parameters.Connections) })},
	{name: "all services get resets", failingCases: []string{"without a request for resets", "with a wrong request for resets"},
		view: eachService(func(s *corev1.Service) { s.Annotations = map[string]string{parameters.Connections: "reset"} })},
	{name: "denied source ranges are admitted", failingCases: []string{
		"denied source ranges", "a denied range of all", "between allowed and denied", "denied ranges refuse"},
		view: eachService(func(s *corev1.Service) { delete(s.Annotations, parameters.SourceRanges) })},
	{name: "the scope of source ranges is ignored", failingCases: []string{
		"with scope all, source ranges apply", "with scope all, denied", "with scope all, ranges", "with scope all, a service without", "a change of the scope", "of all addresses do not apply",
		"the other parameters of a service", "a right value after"},
		view: eachService(func(s *corev1.Service) { delete(s.Annotations, parameters.SourceRangesScope) })},
	{name: "scope all without source ranges admits no client", failingCases: []string{"and no source ranges, all clients"},
		view: eachService(func(s *corev1.Service) {
			if s.Annotations[parameters.SourceRangesScope] == "all" && len(s.Spec.LoadBalancerSourceRanges) == 0 {
				s.Spec.LoadBalancerSourceRanges = []string{"192.0.2.1/32"}
			}
		})},
	{name: "services with a wrong value are not served", failingCases: []string{
		"with a wrong algorithm", "with a wrong value, source", "with a wrong scope", "beside a wrong value", "very long and empty", "a right value after"},
		view: func(objects *Objects) {
			objects.Services = slices.DeleteFunc(objects.Services, func(s *corev1.Service) bool {
				for _, value := range s.Annotations {
					if !slices.Contains([]string{"random", "hash-client", "hash-connection", "keep", "reset", "allow", "deny", "all", "load-balancer"}, value) {
						return true
					}
				}
				return false
			})
		}},
	{name: "each change deletes all flows", sink: reference.ForgetsFlows, failingCases: []string{
		"established TCP connections", "UDP flows keep", "UDP flows continue", "survive a restart", "takes effect and ends no connection", "established connections stay when",
		"untouched", "of clients that stay admitted", "does not end connections to ready"}},
	{name: "connections are not counted", sink: reference.CountsNothing, failingCases: []string{
		"new connections are counted", "the node's own connections are counted", "of a service port are added up", "node ports are counted", "dual-stack service is counted"}},
	{name: "connections of all services are added up", sink: reference.CountsServices, failingCases: []string{"same endpoints are counted separately"}},
	{name: "connections are counted by the position of endpoints", sink: reference.CountsPositions, failingCases: []string{"are not counted for"}},
	{name: "counters begin again at each change", sink: reference.CountsAgain, failingCases: []string{"leaves the counters"}},
	{name: "packets count as connections", sink: reference.CountsPackets, failingCases: []string{"many datagrams of one UDP flow count"}},
	{name: "only the bytes of first packets are counted", sink: reference.CountsFirstPackets, failingCases: []string{"bytes are counted in both"}},
	{name: "ended connections are active", sink: reference.NeverInactive, failingCases: []string{"counted until they end"}},
	{name: "health checks always succeed", sink: reference.HealthLies, failingCases: []string{"reports the number"}},
	{name: "health-check ports are not closed", sink: reference.HealthStays, failingCases: []string{"with its service"}},
	{name: "a health-check port that is in use blocks all programming", sink: reference.HealthFirst, failingCases: []string{"that is in use affects"}},
	{name: "stale rules are not deleted", sink: reference.KeepsRules, failingCases: []string{
		"an added endpoint gets", "traffic to a deleted service", "of another proxy", "take over the cluster IP", "a node port is closed",
		"an external IP that was removed", "swap their external IPs", "changes that it missed"}},
	{name: "each change briefly deletes all rules", sink: reference.Flushes, failingCases: []string{"while many services", "killed while it programs"}},
	{name: "rules of other owners are flushed", sink: reference.FlushesOthers, failingCases: []string{"two instances"}},
	{name: "clean-up does nothing", sink: reference.LeavesTable, failingCases: []string{"clean-up removes"}},
	{name: "all endpoints count as ready", failingCases: []string{"that are not ready get no", "connections are refused if no endpoint is ready"},
		view: filterEndpoints(func(e *discoveryv1.Endpoint) bool { e.Conditions = discoveryv1.EndpointConditions{}; return true })},
	{name: "missing conditions mean not ready", failingCases: []string{"missing conditions"},
		view: filterEndpoints(func(e *discoveryv1.Endpoint) bool { return e.Conditions.Ready != nil })},
	{name: "terminating endpoints are not ready", failingCases: []string{"both ready and terminating"},
		view: filterEndpoints(func(e *discoveryv1.Endpoint) bool {
			ready := *e.Conditions.Ready && !*e.Conditions.Terminating
			e.Conditions.Ready = &ready
			return true
		})},
	{name: "terminating endpoints are ignored", failingCases: []string{"those that are both serving and terminating", "still gets new connections are not reset", "policy Local falls back", "the fallback to terminating"},
		view: filterEndpoints(func(e *discoveryv1.Endpoint) bool { return !*e.Conditions.Terminating })},
	{name: "hints are ignored", failingCases: []string{
		"all endpoints have zone hints", "all endpoints have node hints", "if a ready endpoint has none", "zone hints apply", "hints also apply at external", "loses its zone"},
		view: filterEndpoints(func(e *discoveryv1.Endpoint) bool { e.Hints = nil; return true })},
	{name: "hints apply without exception", failingCases: []string{"if all are for other zones", "the fallback to terminating", "policy Local ignores hints"},
		view: filterEndpoints(func(e *discoveryv1.Endpoint) bool {
			return e.Hints == nil || slices.Contains(e.Hints.ForZones, discoveryv1.ForZone{Name: zone})
		})},
	{name: "traffic policies are ignored", failingCases: []string{
		"internal policy Local uses", "internal policy Local drops", "external policy Local uses", "external policy Local drops", "applies to external IPs",
		"ignore them only at external addresses", "changes of the traffic policies"},
		view: eachService(func(s *corev1.Service) {
			cluster := corev1.ServiceInternalTrafficPolicyCluster
			s.Spec.InternalTrafficPolicy = &cluster
			if s.Spec.ExternalTrafficPolicy != "" {
				s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
			}
		})},
	{name: "each traffic policy applies to all frontends", failingCases: []string{"does not apply at"},
		view: eachService(func(s *corev1.Service) {
			local := corev1.ServiceInternalTrafficPolicyLocal
			if *s.Spec.InternalTrafficPolicy == local || s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
				s.Spec.InternalTrafficPolicy, s.Spec.ExternalTrafficPolicy = &local, corev1.ServiceExternalTrafficPolicyLocal
			}
		})},
}

// filterEndpoints returns a function for fault.view. It hides an endpoint if f returns
// false.
func filterEndpoints(f func(*discoveryv1.Endpoint) bool) func(*Objects) {
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

// eachService returns a function for fault.view that calls f for each service.
func eachService(f func(*corev1.Service)) func(*Objects) {
	return func(objects *Objects) {
		for _, service := range objects.Services {
			f(service)
		}
	}
}

// keepDeleted returns a function for fault.view that adds deleted services.
func keepDeleted() func(*Objects) {
	last := map[string]*corev1.Service{}
	return func(objects *Objects) {
		for _, service := range objects.Services {
			last[service.Name] = service.DeepCopy()
		}
		for name, service := range last {
			if !slices.ContainsFunc(objects.Services, func(s *corev1.Service) bool { return s.Name == name }) {
				objects.Services = append(objects.Services, service.DeepCopy())
			}
		}
	}
}

// eachSlice returns a function for fault.view that calls f for each EndpointSlice.
func eachSlice(f func(*discoveryv1.EndpointSlice)) func(*Objects) {
	return func(objects *Objects) {
		for _, slice := range objects.Slices {
			f(slice)
		}
	}
}

// misreadingSubject is a Subject that modifies objects with the function view before the
// proxy reads them.
type misreadingSubject struct {
	*sinkSubject
	view func(*Objects)
}

func (m *misreadingSubject) Publish(ctx context.Context, objects *Objects) error {
	m.view(objects) // may modify the objects: the kit created them for this call only
	return m.sinkSubject.Publish(ctx, objects)
}

// TestEveryCaseCanFail tests the reference proxy with one fault after the other. Each
// fault must make its listed cases fail, and each case must fail because of at least one
// fault.
func TestEveryCaseCanFail(t *testing.T) {
	t.Parallel() // the proxies mostly wait, so "go test -parallel 6" is faster
	var mu sync.Mutex
	failed := map[string]bool{}
	t.Run("faults", func(t *testing.T) {
		for _, f := range faults {
			t.Run(f.name, func(t *testing.T) {
				t.Parallel()
				subject := newSinkSubject(t, withFault(f.sink), Options{})
				for _, part := range f.failingCases {
					if !slices.ContainsFunc(sections, func(s section) bool {
						return slices.ContainsFunc(s.cases, func(c testCase) bool { return strings.Contains(c.name, part) })
					}) {
						t.Errorf("no case has %q in its name", part)
					}
				}
				for _, r := range runFailingCases(t, subject, f) {
					mu.Lock()
					failed[r.Case] = failed[r.Case] || r.Outcome == Failed
					mu.Unlock()
					if r.Outcome != Failed {
						t.Errorf("%s%s: %s, want %s", r.familyPrefix(), r.Case, r.Outcome, Failed)
					}
				}
			})
		}
	})
	for _, section := range sections {
		for _, c := range section.cases {
			if !failed[c.name] {
				t.Errorf("case %q fails for no fault", c.name)
			}
		}
	}
}

// runFailingCases runs the cases that must fail because of f.
func runFailingCases(t *testing.T, subject *sinkSubject, f fault) Matrix {
	t.Helper()
	pattern := make([]string, len(f.failingCases))
	for i, part := range f.failingCases {
		pattern[i] = regexp.QuoteMeta(part)
	}
	opts := Options{Cases: regexp.MustCompile(strings.Join(pattern, "|"))}
	var s Subject = subject
	if f.view != nil {
		s = &misreadingSubject{subject, f.view}
	}
	k := newKit(t, s, opts)
	defer k.kill()                //nolint:errcheck // ignore the error: the proxy may have ended already
	k.opts.Patience = time.Second // a case may wait for something that a faulty proxy never does
	var matrix Matrix
	for _, section := range sections {
		for _, c := range section.cases {
			if opts.Cases.MatchString(c.name) {
				matrix = append(matrix, k.runFamilies(t, section.name, c)...)
			}
		}
	}
	return matrix
}
