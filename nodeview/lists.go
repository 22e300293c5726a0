// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"slices"

	"github.com/kpng-project/kpng/api"
)

type location struct{ node, zone string }

func locationOf(n *api.Node) location {
	if n == nil {
		return location{}
	}
	return location{node: n.Name, zone: n.Zone()}
}

// The method runs reports whether ep runs on this node. Without a node name, it always
// returns false.
func (h location) runs(ep *api.SliceEndpoint) bool {
	return h.node != "" && ep.Details.Value().NodeName == h.node
}

func (h location) hintedNode(ep *api.SliceEndpoint) bool {
	return h.node != "" && slices.Contains(hints(ep).ForNodes, h.node)
}

// hintedZone reports whether ep has a hint for this node's zone. It is always false for a
// node without a zone.
func (h location) hintedZone(ep *api.SliceEndpoint) bool {
	return h.zone != "" && slices.Contains(hints(ep).ForZones, h.zone)
}

func hints(ep *api.SliceEndpoint) api.Hints {
	if h := ep.Details.Value().Hints; h != nil {
		return *h
	}
	return api.Hints{}
}

// listReasons has the reasons why an endpoint is or is not on the Cluster list and the
// Local list of a port and family. The zero value means that no list is decided yet.
type listReasons struct{ cluster, local reason }

// eligible reports whether the endpoint serves the port and is not a duplicate.
func (m listReasons) eligible() bool { return m.cluster != outNoPort && m.cluster != outDuplicate }

// endpointCounts summarizes the endpoints of one port and family, to decide the lists.
type endpointCounts struct {
	ready     int
	readyHere int
	usable    bool // at least one endpoint is usable
	nodeHints hintCounts
	zoneHints hintCounts
	topology  topologyResult
}

// hintCounts counts the ready endpoints that have hints of one kind, and the ready
// endpoints whose hints match this node.
type hintCounts struct{ hinted, matching int }

func (t *endpointCounts) count(ep *api.SliceEndpoint, here location) {
	t.usable = t.usable || usable(ep.Conditions)
	if !ready(ep.Conditions) {
		return
	}
	t.ready++
	if here.runs(ep) {
		t.readyHere++
	}
	if h := ep.Details.Value().Hints; h != nil {
		t.nodeHints.count(h.ForNodes, here.hintedNode(ep))
		t.zoneHints.count(h.ForZones, here.hintedZone(ep))
	}
}

func (t *hintCounts) count(hints []string, matches bool) {
	if len(hints) > 0 {
		t.hinted++
	}
	if matches {
		t.matching++
	}
}

// decide determines which candidates are on the Cluster list and on the Local list of one
// port and family. It sets the reasons of all eligible candidates.
func decide(reasons []listReasons, candidates []candidate, here location) endpointCounts {
	var t endpointCounts
	for i := range candidates {
		if reasons[i].eligible() {
			t.count(candidates[i].ep, here)
		}
	}
	t.topology = topology(&t)
	for i := range candidates {
		if ep := candidates[i].ep; reasons[i].eligible() {
			reasons[i] = listReasons{
				cluster: clusterList(ep, &t, here),
				local:   localList(ep, &t, here),
			}
		}
	}
	return t
}

// usable reports whether an endpoint may receive connections at all.
func usable(c api.Conditions) bool { return !c.Drain && (c.Ready || c.Serving && c.Terminating) }

// ready reports whether an endpoint is ready for new connections.
func ready(c api.Conditions) bool { return c.Ready && !c.Drain }

// clusterList decides whether ep is on the Cluster list. This list contains the ready
// endpoints that the topology rule admits. If no endpoint is ready, the list contains the
// endpoints that are both serving and terminating, and their hints do not matter (KEP
// 1669).
func clusterList(ep *api.SliceEndpoint, t *endpointCounts, here location) reason {
	if !ready(ep.Conditions) {
		return terminatingFallback(ep.Conditions, t.ready)
	}
	switch t.topology {
	case forNode:
		if here.hintedNode(ep) {
			return inForNode
		}
		return outOtherNodes
	case forZone:
		if here.hintedZone(ep) {
			return inForZone
		}
		return outOtherZones
	default:
		return inReady
	}
}

// localList decides whether ep is on the Local list. This list contains the ready
// endpoints on this node. If no endpoint there is ready, the list contains the endpoints
// on this node that are both serving and terminating. Hints do not affect the Local list.
func localList(ep *api.SliceEndpoint, t *endpointCounts, here location) reason {
	switch {
	case !here.runs(ep):
		return outNotHere
	case ready(ep.Conditions):
		return inHere
	default:
		return terminatingFallback(ep.Conditions, t.readyHere)
	}
}

// terminatingFallback decides whether an endpoint that is not ready is on a list. The
// endpoint is on the list if it is serving and terminating, and if no endpoint is ready.
func terminatingFallback(c api.Conditions, ready int) reason {
	switch {
	case c.Drain:
		return outNoWeight
	case !usable(c):
		return outNotReady
	case ready > 0:
		return outOthersReady
	default:
		return inTerminating
	}
}

// topology decides which hints apply to the Cluster list. This depends on the hints of
// all ready endpoints of the port and family (KEP 2433, KEP 3015).
func topology(t *endpointCounts) topologyResult {
	switch {
	case t.ready == 0:
		return noneReady
	case t.nodeHints.hinted == t.ready && t.nodeHints.matching > 0:
		return forNode
	case t.zoneHints.hinted == t.ready && t.zoneHints.matching > 0:
		return forZone
	case t.nodeHints.hinted == 0 && t.zoneHints.hinted == 0:
		return noHints
	case t.nodeHints.hinted < t.ready && t.zoneHints.hinted < t.ready:
		return hintsIncomplete
	default:
		return hintsElsewhere
	}
}

// policies are the effective traffic policies of a service.
type policies struct{ internalLocal, externalLocal bool }

func policiesOf(svc *api.Service) policies {
	return policies{internalLocal: internalPolicyLocal(svc), externalLocal: externalPolicyLocal(svc)}
}

// internalPolicyLocal reports whether traffic to the cluster IP uses the Local
// list (KEP 2086).
func internalPolicyLocal(svc *api.Service) bool { return svc.InternalTrafficToLocal }

// externalPolicyLocal reports whether traffic to external frontends uses the Local list.
// spec.externalTrafficPolicy applies to NodePort and LoadBalancer services, and to
// ClusterIP services with external IPs. For other services the policy is Cluster.
func externalPolicyLocal(svc *api.Service) bool {
	switch svc.Type {
	case api.NodePort, api.LoadBalancer:
		return svc.ExternalTrafficToLocal
	default:
		return svc.ExternalTrafficToLocal && !svc.IPs.ExternalIPs.IsZero()
	}
}

// The method scopes reports, for each kind of traffic, whether the list for this traffic
// contains the endpoint.
func (p policies) scopes(m listReasons) api.Scopes {
	return api.Scopes{
		Internal: m.list(p.internalLocal).In(),
		External: m.list(p.externalLocal).In(),
		Cluster:  p.externalLocal && m.shortCircuit().In(),
	}
}

// list returns the reason for the Local list or, if local is false, for the Cluster list.
func (m listReasons) list(local bool) reason {
	if local {
		return m.local
	}
	return m.cluster
}

// shortCircuit returns the reason for short-circuited traffic. This traffic goes from
// this node to an external frontend with policy Local. It uses the Cluster list, because
// a load balancer would send it to a node with endpoints.
func (m listReasons) shortCircuit() reason { return m.cluster }

// The function answers reports whether an endpoint may still have connections. Such an
// endpoint is draining if it is on no list. A ready endpoint may have connections even if
// its condition serving is false (publishNotReadyAddresses).
func answers(c api.Conditions) bool { return c.Serving || c.Ready }
