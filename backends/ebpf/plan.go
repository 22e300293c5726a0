// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"net/netip"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"golang.org/x/sys/unix"
)

// The following types are keys and values of maps. They have the same layout as in
// connect.c, and all their fields are exported, because package cilium/ebpf requires
// exported fields.

// address is an address and a port in network byte order. An IPv4 address is stored as an
// IPv4-mapped IPv6 address.
type address struct {
	IP        [16]byte
	Port, Pad [2]byte
}

func toAddress(addr netip.Addr, port int32) address {
	a := address{IP: addr.As16()}
	binary.BigEndian.PutUint16(a.Port[:], uint16(port))
	return a
}

func (a address) String() string {
	return netip.AddrPortFrom(netip.AddrFrom16(a.IP).Unmap(), binary.BigEndian.Uint16(a.Port[:])).String()
}

type frontendKey struct {
	IP       [16]byte
	Port     [2]byte
	Protocol uint8
	Pad      uint8
}

func (k frontendKey) String() string {
	return fmt.Sprintf("%s/%s", address{IP: k.IP, Port: k.Port}, map[uint8]string{unix.IPPROTO_TCP: "TCP", unix.IPPROTO_UDP: "UDP"}[k.Protocol])
}

var protocols = map[api.Protocol]uint8{api.TCP: unix.IPPROTO_TCP, api.UDP: unix.IPPROTO_UDP}

func toFrontend(addr netip.Addr, protocol api.Protocol, port int32) frontendKey {
	a := toAddress(addr, port)
	return frontendKey{IP: a.IP, Port: a.Port, Protocol: protocols[protocol]}
}

// list is a value in the map frontends: it describes the list of endpoints of a frontend.
// Affinity is in seconds.
type list struct {
	ID              uint64
	Count, Affinity uint32
}

type slotKey struct {
	List       uint64
	Index, Pad uint32
}

type memberKey struct {
	List     uint64
	Endpoint address
	Pad      [4]byte
}

// clientKey is a client of a frontend with session affinity.
type clientKey struct {
	NetNS    uint64
	Frontend frontendKey
	Pad      uint32
}

// choice is the endpoint of a client. Time is in nanoseconds since the boot.
type choice struct {
	Time     uint64
	Endpoint address
	Pad      uint32
}

// peer is what a TCP socket uses in place of a service.
type peer struct{ Service, Endpoint address }

// wanted is a frontend that a service needs.
type wanted struct {
	frontend frontendKey
	affinity uint32
	// The field endpoints has the endpoints for new clients. The field members has the
	// endpoints that existing clients may keep. One of both may be empty.
	endpoints, members []address
}

// slotDigest returns the digest of a slot. The digest of a list is the sum of the digests
// of its slots and members, so the order in which a map is read does not matter.
func slotDigest(seed maphash.Seed, index uint32, a address) uint64 {
	return maphash.Comparable(seed, slotKeyDigest{index, a})
}

func memberDigest(seed maphash.Seed, a address) uint64 { return maphash.Comparable(seed, a) }

type slotKeyDigest struct {
	index uint32
	a     address
}

func (w *wanted) digest(seed maphash.Seed) (sum uint64) {
	for i, a := range w.endpoints {
		sum += slotDigest(seed, uint32(i), a)
	}
	for _, a := range w.members {
		sum += memberDigest(seed, a)
	}
	return sum
}

// plan returns the frontends that the programs handle for a view. A nil view has none.
func plan(se *api.ServiceEndpoints, annotation string) (all []wanted) {
	if se == nil {
		return nil
	}
	for f := range nodeview.Frontends(se) {
		// UDP sockets may keep a draining endpoint although new sockets have none to use.
		if reason := unsuitable(se, &f, annotation); reason != "" && !(reason == noEndpoint && f.Protocol == api.UDP) {
			continue
		}
		w := wanted{affinity: uint32(f.Affinity / time.Second)}
		for _, e := range f.Node.Endpoints {
			w.endpoints = append(w.endpoints, toAddress(e.Addr, e.Port))
		}
		if f.Protocol == api.UDP {
			w.members = existing(se, &f)
		} else if w.affinity != 0 {
			w.members = w.endpoints
		}
		if len(w.endpoints)+len(w.members) == 0 {
			continue
		}
		w.frontend = toFrontend(f.Addr, f.Protocol, f.Port)
		all = append(all, w)
	}
	return all
}

const noEndpoint = "it has no usable endpoint"

// unsuitable returns the reason why the programs cannot handle a frontend, or the empty
// string if they can. They handle only cluster IPs, because connections to a cluster IP
// keep the source address of the client.
func unsuitable(se *api.ServiceEndpoints, f *nodeview.Frontend, annotation string) string {
	switch {
	case f.Kind != nodeview.ClusterIP:
		return "it is not a cluster IP"
	case f.Protocol != api.TCP && f.Protocol != api.UDP:
		return "the protocol is not TCP or UDP"
	case f.Sources.Restricted:
		return "it has source ranges"
	case f.Protocol == api.UDP && f.Affinity != 0:
		return "it is a UDP port with session affinity"
	case se.Service.Annotations[annotation] == "false":
		return "the annotation " + annotation + " of the service excludes it"
	case f.Node.Verdict != nodeview.Forward:
		return noEndpoint
	default:
		return ""
	}
}

// The function existing returns the endpoints that UDP sockets may keep: all endpoints of
// the frontend's port and family, including draining endpoints.
func existing(se *api.ServiceEndpoints, f *nodeview.Frontend) (all []address) {
	for _, endpoints := range [...][]api.Endpoint{se.Endpoints, se.Draining} {
		for i := range endpoints {
			if port := endpoints[i].TargetPort(f.ServicePort); port != 0 && api.FamilyOf(endpoints[i].Addr) == f.Family {
				all = append(all, toAddress(endpoints[i].Addr, port))
			}
		}
	}
	slices.SortFunc(all, func(a, b address) int {
		return slices.Compare(append(a.IP[:], a.Port[:]...), append(b.IP[:], b.Port[:]...))
	})
	return slices.Compact(all)
}
