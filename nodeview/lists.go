// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"slices"

	"github.com/kpng-project/kpng/api"
)

// place is where the view is taken from.
type place struct{ node, zone string }

func placeOf(n *api.Node) place {
	if n == nil {
		return place{}
	}
	return place{node: n.Name, zone: n.Zone()}
}

// runs reports whether ep runs on this node. Without a node name, nothing does.
func (h place) runs(ep *api.SliceEndpoint) bool { return h.node != "" && ep.NodeName == h.node }

// hintedNode reports whether ep should be preferred by this node.
func (h place) hintedNode(ep *api.SliceEndpoint) bool {
	return h.node != "" && slices.Contains(hints(ep).ForNodes, h.node)
}

// hintedZone reports whether ep should be preferred by this node's zone. A node
// without a zone never matches.
func (h place) hintedZone(ep *api.SliceEndpoint) bool {
	return h.zone != "" && slices.Contains(hints(ep).ForZones, h.zone)
}

func hints(ep *api.SliceEndpoint) api.Hints {
	if ep.Hints == nil {
		return api.Hints{}
	}
	return *ep.Hints
}

// membership says of an endpoint why it is, or is not, on the two lists that
// are made for each port and family. Its zero value is undecided: the endpoint
// is still in the contest.
type membership struct{ cluster, local Reason }

// competes reports whether the endpoint serves the port and is no duplicate.
func (m membership) competes() bool { return m.cluster != outNoPort && m.cluster != outDuplicate }

// tally is what the lists of one port and family depend on besides the
// endpoint itself.
type tally struct {
	ready     int
	readyHere int
	usable    bool // see usable
	nodeHints hintTally
	zoneHints hintTally
	topology  Topology
}

// hintTally counts ready endpoints that have hints of one kind, and those whose
// hints match this node.
type hintTally struct{ hinted, matching int }

func (t *tally) count(ep *api.SliceEndpoint, here place) {
	t.usable = t.usable || usable(ep.Conditions)
	if !ep.Ready {
		return
	}
	t.ready++
	if here.runs(ep) {
		t.readyHere++
	}
	if ep.Hints != nil {
		t.nodeHints.count(ep.Hints.ForNodes, here.hintedNode(ep))
		t.zoneHints.count(ep.Hints.ForZones, here.hintedZone(ep))
	}
}

func (t *hintTally) count(hints []string, matches bool) {
	if len(hints) > 0 {
		t.hinted++
	}
	if matches {
		t.matching++
	}
}

// decide makes the Cluster and the Local list of one port and family: it fills
// in the members that are still undecided.
func decide(members []membership, candidates []candidate, here place) tally {
	var t tally
	for i := range candidates {
		if members[i].competes() {
			t.count(candidates[i].ep, here)
		}
	}
	t.topology = topology(&t)
	for i := range candidates {
		if ep := candidates[i].ep; members[i].competes() {
			members[i] = membership{
				cluster: clusterList(ep, &t, here),
				local:   localList(ep, &t, here),
			}
		}
	}
	return t
}

// usable reports whether connections may go to an endpoint at all.
func usable(c api.Conditions) bool { return c.Ready || c.Serving && c.Terminating }

// clusterList decides who is on the Cluster list: the ready endpoints that
// topology admits; if none is ready, those serving and terminating (KEP 1669),
// topology ignored.
func clusterList(ep *api.SliceEndpoint, t *tally, here place) Reason {
	if !ep.Ready {
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

// localList decides who is on the Local list: ready endpoints on this node; if
// there is none, those on this node that serve and terminate. Topology plays
// no part.
func localList(ep *api.SliceEndpoint, t *tally, here place) Reason {
	switch {
	case !here.runs(ep):
		return outNotHere
	case ep.Ready:
		return inHere
	default:
		return terminatingFallback(ep.Conditions, t.readyHere)
	}
}

// terminatingFallback decides about an endpoint that is not ready: it is on the
// list if it serves while it terminates and the list has no ready one.
func terminatingFallback(c api.Conditions, ready int) Reason {
	switch {
	case !usable(c):
		return outNotReady
	case ready > 0:
		return outOthersReady
	default:
		return inTerminating
	}
}

// topology decides which hints the Cluster list follows, over all ready
// endpoints of the port and family (KEP 2433, KEP 3015).
func topology(t *tally) Topology {
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

// policies are the traffic policies of a service that count.
type policies struct{ internalLocal, externalLocal bool }

func policiesOf(svc *api.Service) policies {
	return policies{internalLocal: internalPolicyLocal(svc), externalLocal: externalPolicyLocal(svc)}
}

// internalPolicyLocal reports whether traffic to the cluster IP uses the Local
// list (KEP 2086).
func internalPolicyLocal(svc *api.Service) bool { return svc.InternalTrafficToLocal }

// externalPolicyLocal reports whether traffic to external frontends uses the
// Local list. externalTrafficPolicy counts for NodePort and LoadBalancer
// services, and for ClusterIP services with external IPs; elsewhere it is
// Cluster.
func externalPolicyLocal(svc *api.Service) bool {
	switch svc.Type {
	case api.NodePort, api.LoadBalancer:
		return svc.ExternalTrafficToLocal
	default:
		return svc.ExternalTrafficToLocal && !svc.IPs.ExternalIPs.IsZero()
	}
}

// scopes says which list each kind of traffic uses.
func (p policies) scopes(m membership) api.Scopes {
	return api.Scopes{
		Internal: m.list(p.internalLocal).In(),
		External: m.list(p.externalLocal).In(),
		Cluster:  p.externalLocal && m.shortCircuit().In(),
	}
}

// list returns what m says about the Local or the Cluster list.
func (m membership) list(local bool) Reason {
	if local {
		return m.local
	}
	return m.cluster
}

// shortCircuit: what starts on this node and goes to an external frontend with
// policy Local uses the Cluster list, as a load balancer would have brought it
// to a node that has endpoints.
func (m membership) shortCircuit() Reason { return m.cluster }

// answers reports whether an endpoint may still have connections to keep: on
// no list, it is draining. One that is ready counts, though its condition
// serving may be false (publishNotReadyAddresses).
func answers(c api.Conditions) bool { return c.Serving || c.Ready }
