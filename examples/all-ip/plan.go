// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"k8s.io/klog/v2"
)

// The sets and maps of a table, see table.nft.
const (
	podMap      = "pod"
	slotMap     = "pods"
	hairpinSet  = "hairpin"
	rejectedSet = "rejected"
	droppedSet  = "dropped"
	// flowSet is not a set of the table. Its elements are in dataplane.pods.
	flowSet = "flows"
)

// slots is the number of slots of an external IP. A client's address is hashed to a slot,
// and each slot belongs to a pod. So the number of slots limits how many pods on a node
// get traffic of an external IP.
const slots = 64

// Plan emits the elements of a service. Services share the elements of pods in hairpinSet. All
// other elements belong to one service, because each external IP belongs to one service.
func (*dataplane) Plan(v *api.View, emit func(object, string)) error {
	log := klog.Background().WithValues("service", v.Key())
	if !v.Service.AllPorts {
		log.Error(nil, "Service not served: it is not an all-ports service; start the kpng server with --all-ports")
		return nil
	}
	for frontend, why := range nodeview.Unserved(v) {
		log.Info("Frontend not supported", "frontend", frontend.String(), "reason", why)
	}
	for f := range nodeview.Frontends(v) {
		if f.Kind != nodeview.ExternalIP {
			continue
		}
		add := func(set, key, value string) { emit(object{family(f.Addr), set, key}, value) }
		ip := f.Addr.String()
		var local []netip.Addr // pods on this node
		for _, e := range f.Elsewhere.Endpoints {
			if e.Local {
				local = append(local, e.Addr)
				add(hairpinSet, fmt.Sprintf("%[1]s . %[1]s", e.Addr), "")
			}
		}
		switch {
		case len(local) == 1:
			add(podMap, ip, local[0].String())
		case len(local) > 1:
			for slot := range uint32(slots) {
				add(slotMap, fmt.Sprintf("%s . %d", ip, slot), owner(slot, local).String())
			}
		case f.Elsewhere.Verdict == nodeview.Reject:
			add(rejectedSet, ip, "")
		default:
			add(droppedSet, ip, "")
		}
		for i := range v.Draining {
			local = append(local, v.Draining[i].Addr)
		}
		add(flowSet, ip, strings.Trim(fmt.Sprint(local), "[]"))
	}
	return nil
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

// family returns the family of the table for an address.
func family(ip netip.Addr) string {
	if ip.Is4() {
		return "ip"
	}
	return "ip6"
}
