// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"k8s.io/klog/v2"
)

// object is a part of the table: all elements for an IP of a service, or the element for a
// pod in one of the sets of pods. Its value has a line for each element, sorted.
type object struct {
	part string
	ip   netip.Addr
}

// The parts. The parts about pods have the names of their sets.
const (
	addressPart = "address"
	hairpinSet  = "hairpin"
	egressSet   = "egress"
	// flowPart is not in the table. Its value is in dataplane.pods.
	flowPart = "flows"
)

// The annotations, see README.md.
const (
	allow  = "all-ip.kpng.io/allow"
	egress = "all-ip.kpng.io/egress"
)

// slots is the number of slots of an IP. A client's address is hashed to a slot, and each slot
// belongs to a pod. So the number of slots limits how many pods on a node get traffic of an IP.
const slots = 64

// maxItems limits the elements of a filter.
const maxItems = 100

// Plan emits the objects of a service. Services share the objects of pods. All other objects
// belong to one service, because each IP belongs to one service.
func (*dataplane) Plan(v *api.View, emit func(object, string)) error {
	log := klog.Background().WithValues("service", v.Key())
	if !v.Service.AllPorts {
		log.Error(nil, "Service not served: it is not an all-ports service; start the kpng server with --all-ports")
		return nil
	}
	for frontend, why := range nodeview.Unserved(v) {
		log.Info("Frontend not supported", "frontend", frontend.String(), "reason", why)
	}
	leaves := map[string]bool{} // the families in which connections of pods get an IP of the service
	for f := range nodeview.Frontends(v) {
		if f.Kind != nodeview.ExternalIP && f.Kind != nodeview.LoadBalancerIP {
			continue
		}
		var local []netip.Addr // pods on this node
		for _, e := range f.Elsewhere.Endpoints {
			if e.Local {
				local = append(local, e.Addr)
				emit(object{hairpinSet, e.Addr}, fmt.Sprintf("hairpin { %[1]s . %[1]s }", e.Addr))
			}
		}
		lines := ranges(f.Addr, f.Sources)
		if _, ok := v.Service.Annotations[allow]; ok {
			elements, err := filter(v.Service, f.Addr)
			if err != nil {
				return err
			}
			lines = append(lines, elements...)
		}
		switch {
		case len(local) == 1:
			lines = append(lines, fmt.Sprintf("pod { %s : %s }", f.Addr, local[0]))
		case len(local) > 1:
			for slot := range uint32(slots) {
				lines = append(lines, fmt.Sprintf("pods { %s . %d : %s }", f.Addr, slot, owner(slot, local)))
			}
		case f.Elsewhere.Verdict == nodeview.Reject:
			lines = append(lines, fmt.Sprintf("rejected { %s }", f.Addr))
		default:
			lines = append(lines, fmt.Sprintf("dropped { %s }", f.Addr))
		}
		emit(object{addressPart, f.Addr}, join(lines))
		for _, e := range v.Draining {
			if e.Local && api.FamilyOf(e.Addr) == f.Family {
				local = append(local, e.Addr)
			}
		}
		emit(object{flowPart, f.Addr}, strings.Trim(fmt.Sprint(local), "[]"))
		if v.Service.Annotations[egress] == "true" && !leaves[family(f.Addr)] {
			leaves[family(f.Addr)] = true
			for _, pod := range local {
				emit(object{egressSet, pod}, fmt.Sprintf("egress { %s : %s }", pod, f.Addr))
			}
		}
	}
	return nil
}

// join returns the value of an object.
func join(lines []string) string {
	slices.Sort(lines)
	return strings.Join(slices.Compact(lines), "\n")
}

// ranges returns the elements for the source ranges of an IP.
func ranges(ip netip.Addr, s nodeview.Sources) (lines []string) {
	if s.Restricted {
		lines = append(lines, fmt.Sprintf("restricted { %s }", ip))
	}
	var last netip.Prefix
	order := func(a, b netip.Prefix) int {
		return cmp.Or(a.Masked().Addr().Compare(b.Masked().Addr()), cmp.Compare(a.Bits(), b.Bits()))
	}
	for _, p := range slices.SortedFunc(slices.Values(s.Ranges), order) {
		if last.IsValid() && last.Contains(p.Addr()) {
			continue // the kernel refuses overlaps
		}
		last = p.Masked()
		lines = append(lines, fmt.Sprintf("sources { %s . %s }", ip, canonical(last.String())))
	}
	return lines
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
