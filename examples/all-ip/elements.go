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

// The sets of a table.
const (
	// pod is a map: external IP → pod, if there is one.
	pod = "pod"
	// pods is a map: external IP and slot → pod, if there are several.
	pods = "pods"
	// hairpin has pod, pod for each pod: the source and destination of what a pod
	// sends to itself by way of an external IP. Its own address is no source that
	// it would answer to.
	hairpin = "hairpin"
	// rejected has the external IPs for which no pod is usable in the cluster.
	rejected = "rejected"
	// dropped has those for which no pod is on this node, but on others.
	dropped = "dropped"
)

// slots is how many slots there are: a client's address is hashed to one of
// them, and each belongs to a pod. So it is also the number of pods on a node
// that get traffic from one external IP.
const slots = 64

// element is the key of an element of a set.
type element struct {
	family api.Family
	set    string
	key    string
}

// state is what tables hold: the value of each element, empty if its set is no
// map.
type state map[element]string

// elements yields what the tables hold for a service, nil for none. Elements of
// hairpin come once for each external IP, and may come of other services too; all
// others are one service's alone, as no two are given the same external IP.
func elements(v *api.ServiceEndpoints) iter.Seq2[element, string] {
	return func(yield func(element, string) bool) {
		for f := range frontends(v) {
			add := func(set string, value string, key ...[]byte) bool {
				return yield(element{f.Family, set, string(bytes.Join(key, nil))}, value)
			}
			ip := f.Addr.AsSlice()
			local := localPods(&f)
			switch {
			case len(local) == 1:
				if !add(pod, string(local[0].AsSlice()), ip) {
					return
				}
			case len(local) > 1:
				for slot := range uint32(slots) {
					if !add(pods, string(owner(slot, local).AsSlice()), ip, binary.NativeEndian.AppendUint32(nil, slot)) {
						return
					}
				}
			case f.Elsewhere.Verdict == nodeview.Reject:
				if !add(rejected, "", ip) {
					return
				}
			default:
				if !add(dropped, "", ip) {
					return
				}
			}
			for _, self := range local {
				if !add(hairpin, "", self.AsSlice(), self.AsSlice()) {
					return
				}
			}
		}
	}
}

// frontends yields the external IPs of a service that are this proxier's.
func frontends(v *api.ServiceEndpoints) iter.Seq[nodeview.Frontend] {
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

// localPods returns the pods on this node that a frontend leads to.
func localPods(f *nodeview.Frontend) []netip.Addr {
	var local []netip.Addr
	for _, target := range f.Elsewhere.Endpoints {
		if target.Local {
			local = append(local, target.Addr)
		}
	}
	return local
}

// owner returns the pod that a slot belongs to, by rendezvous hashing: a pod that
// comes or goes takes over or hands over slots, and none move between others, so
// that no other client changes its pod.
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
