// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"iter"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
)

// The names of a table's sets and maps.
const (
	// podMap maps each external IP that has only one pod to this pod.
	podMap = "pod"
	// slotMap maps (external IP, slot) to a pod. It contains only external IPs with several
	// pods.
	slotMap = "pods"
	// hairpinSet has an element for each pod, with the pod as source and as destination. It
	// matches packets that a pod sends to itself through an external IP. A rule masquerades
	// them, because a pod does not answer packets from its own address.
	hairpinSet = "hairpin"
	// rejectedSet contains the external IPs without a usable pod in the cluster.
	rejectedSet = "rejected"
	// droppedSet contains the external IPs whose usable pods are all on other nodes.
	droppedSet = "dropped"
)

// slots is the number of slots of an external IP. A client's address is hashed to a slot,
// and each slot belongs to a pod. So the number of slots limits how many pods on a node
// get traffic of an external IP.
const slots = 64

// element identifies an element of an nftables set or map.
type element struct {
	family api.Family
	set    string
	key    string
}

// state is the content of the tables. It maps each element of an nftables map to its
// value, and each element of an nftables set to an empty string.
type state map[element]string

// elements yields the elements of a service. If v is nil, it yields none. A hairpin
// element occurs once for each external IP of the service, and may also be an element of
// other services. All other elements belong to one service, because each external IP
// belongs to one service.
func elements(v *api.View) iter.Seq2[element, string] {
	return func(yield func(element, string) bool) {
		for f := range frontends(v) {
			add := func(set string, value string, key ...[]byte) bool {
				return yield(element{f.Family, set, string(bytes.Join(key, nil))}, value)
			}
			ip := f.Addr.AsSlice()
			local := localPods(&f)
			switch {
			case len(local) == 1:
				if !add(podMap, string(local[0].AsSlice()), ip) {
					return
				}
			case len(local) > 1:
				for slot := range uint32(slots) {
					if !add(slotMap, string(owner(slot, local).AsSlice()), ip, binary.NativeEndian.AppendUint32(nil, slot)) {
						return
					}
				}
			case f.Elsewhere.Verdict == nodeview.Reject:
				if !add(rejectedSet, "", ip) {
					return
				}
			default:
				if !add(droppedSet, "", ip) {
					return
				}
			}
			for _, self := range local {
				if !add(hairpinSet, "", self.AsSlice(), self.AsSlice()) {
					return
				}
			}
		}
	}
}

// frontends yields the frontends that all-ip serves: the external IPs of an all-ports
// service.
func frontends(v *api.View) iter.Seq[nodeview.Frontend] {
	return func(yield func(nodeview.Frontend) bool) {
		if v == nil || !v.Service.AllPorts {
			return
		}
		for f := range nodeview.Frontends(v) {
			if f.Kind == nodeview.ExternalIP && !yield(f) {
				return
			}
		}
	}
}

// localPods returns those pods of a frontend that run on this node.
func localPods(f *nodeview.Frontend) []netip.Addr {
	var local []netip.Addr
	for _, target := range f.Elsewhere.Endpoints {
		if target.Local {
			local = append(local, target.Addr)
		}
	}
	return local
}

// owner returns the pod of a slot. It uses rendezvous hashing: if a pod is added or
// removed, slots move only to or from this pod, and the clients of all other slots keep
// their pod.
func owner(slot uint32, pods []netip.Addr) netip.Addr {
	var owner netip.Addr
	var highest uint64
	for _, pod := range pods {
		sum := sha256.Sum256(binary.BigEndian.AppendUint32(pod.AsSlice(), slot))
		if score := binary.BigEndian.Uint64(sum[:]); !owner.IsValid() || score > highest {
			owner, highest = pod, score
		}
	}
	return owner
}
