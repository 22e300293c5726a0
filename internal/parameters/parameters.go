// SPDX-License-Identifier: Apache-2.0

// Package parameters reads the traffic parameters of services and EndpointSlices from
// annotations of kpng and, on request, of other service proxies. It also writes the
// annotations of kpng.
package parameters

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/kpng-project/kpng/api"
)

// The annotations of kpng.
const (
	Algorithm         = "kpng.io/algorithm"           // random, hash-client or hash-connection
	Connections       = "kpng.io/connections"         // keep or reset
	SourceRanges      = "kpng.io/source-ranges"       // allow or deny
	SourceRangesScope = "kpng.io/source-ranges-scope" // load-balancer or all
	Weight            = "kpng.io/weight"              // 0 to 65535, of an EndpointSlice
)

// dialect has the annotations of a service proxy. An empty key means that the proxy has no
// such annotation. Values are compared without regard to case.
type dialect struct {
	algorithm  string
	algorithms map[string]api.Algorithm
	// If the annotation byPort contains the text portFlag, hashing uses the port, too.
	byPort, portFlag string

	connections, policy, scope, weight string
}

var own = dialect{
	algorithm: Algorithm, connections: Connections, policy: SourceRanges, scope: SourceRangesScope, weight: Weight,
	algorithms: map[string]api.Algorithm{"random": api.Random, "hash-client": api.HashClient, "hash-connection": api.HashConnection},
}

// others are the dialects of other proxies by their names.
var others = map[string]dialect{
	"cilium": {
		algorithm: "service.cilium.io/lb-algorithm", policy: "service.cilium.io/src-ranges-policy", weight: "service.cilium.io/weight",
		algorithms: map[string]api.Algorithm{"random": api.Random, "maglev": api.HashConnection},
	},
	// The schedulers sh and mh of IPVS hash the client's address. The second flag of a
	// scheduler adds the port.
	"kube-router": {
		algorithm: "kube-router.io/service.scheduler", byPort: "kube-router.io/service.schedflags", portFlag: "flag-2",
		algorithms: map[string]api.Algorithm{"rr": api.Random, "sh": api.HashClient, "mh": api.HashClient},
	},
	// In Calico, Maglev applies only to external traffic.
	"calico": {
		algorithm:  "lb.projectcalico.org/external-traffic-strategy",
		algorithms: map[string]api.Algorithm{"maglev": api.HashConnection},
	},
}

// Names are the names of the other proxies.
var Names = []string{"cilium", "kube-router", "calico"}

// Reader reads annotations.
type Reader struct{ dialects []dialect }

// NewReader returns a Reader of the annotations of kpng and of other proxies. If a service
// has several annotations for a parameter, annotations of kpng have precedence, then
// annotations of the other proxies in the order of names.
func NewReader(names []string) (*Reader, error) {
	r := &Reader{[]dialect{own}}
	for _, name := range names {
		d, ok := others[name]
		if !ok {
			return nil, fmt.Errorf("unknown kind of annotations %q: use %s", name, strings.Join(Names, ", "))
		}
		r.dialects = append(r.dialects, d)
	}
	return r, nil
}

// Keys returns the keys of the annotations that the Reader reads.
func (r *Reader) Keys() (service, slice []string) {
	for _, d := range r.dialects {
		service = append(service, d.algorithm, d.byPort, d.connections, d.policy, d.scope)
		slice = append(slice, d.weight)
	}
	none := func(key string) bool { return key == "" }
	return slices.DeleteFunc(service, none), slices.DeleteFunc(slice, none)
}

// Report receives a wrong value. The argument field is the path of the annotation.
type Report func(field, format string, args ...any)

// Service has the traffic parameters of a service.
type Service struct {
	Algorithm        api.Algorithm
	ResetConnections bool
	// Deny is true if loadBalancerSourceRanges contains refused sources. Everywhere is true
	// if the ranges apply to all frontends.
	Deny, Everywhere bool
}

// OfService returns the parameters of a service with these annotations. It reports each
// wrong value, and ignores it.
func (r *Reader) OfService(annotations map[string]string, report Report) (s Service) {
	if len(annotations) == 0 {
		return s
	}
	read(r, annotations, report, func(d *dialect) string { return d.algorithm }, func(d *dialect, text string) (ok bool) {
		s.Algorithm, ok = d.algorithms[text]
		if s.Algorithm == api.HashClient && d.byPort != "" && strings.Contains(annotations[d.byPort], d.portFlag) {
			s.Algorithm = api.HashConnection
		}
		return ok
	})
	either := func(key func(*dialect) string, to *bool, no, yes string) {
		read(r, annotations, report, key, func(_ *dialect, text string) bool {
			*to = text == yes
			return text == yes || text == no
		})
	}
	either(func(d *dialect) string { return d.connections }, &s.ResetConnections, "keep", "reset")
	either(func(d *dialect) string { return d.policy }, &s.Deny, "allow", "deny")
	either(func(d *dialect) string { return d.scope }, &s.Everywhere, "load-balancer", "all")
	return s
}

// WeightOf returns the weight, as in api.SliceEndpoint, of the endpoints of an EndpointSlice
// with these annotations, and whether these endpoints drain. It reports a wrong value, and
// ignores it.
func (r *Reader) WeightOf(annotations map[string]string, report Report) (weight int32, drain bool) {
	if len(annotations) == 0 {
		return 0, false
	}
	read(r, annotations, report, func(d *dialect) string { return d.weight }, func(_ *dialect, text string) bool {
		n, err := strconv.ParseUint(text, 10, 16)
		if err != nil {
			return false
		}
		weight, drain = int32(n), n == 0
		return true
	})
	return weight, drain
}

// read finds the first annotation that a dialect has for a parameter, and passes its value
// to the function set. This function reports whether the value is right. The function key
// returns the annotation's key in a dialect.
func read(r *Reader, annotations map[string]string, report Report, key func(*dialect) string, set func(*dialect, string) bool) {
	for i := range r.dialects {
		d := &r.dialects[i]
		text, ok := annotations[key(d)]
		if !ok || key(d) == "" {
			continue
		}
		if len(text) > maxText || !set(d, strings.ToLower(strings.TrimSpace(text))) {
			report("metadata.annotations["+key(d)+"]", "%q is not a value that kpng knows; ignoring it", text[:min(len(text), maxText)])
			continue
		}
		return
	}
}

// maxText is the maximum length of a value. A report contains at most this part of a
// longer value.
const maxText = 64

// maxDenied limits the number of refused sources, because each may need a hundred admitted
// ranges.
const maxDenied = 4096

// AllExcept returns ranges of both families. They contain all addresses except the
// addresses in denied. If there are too many, it returns false.
func AllExcept(denied []netip.Prefix) ([]netip.Prefix, bool) {
	if len(denied) > maxDenied {
		return nil, false
	}
	var families [2][]netip.Prefix
	for _, p := range denied {
		f := 0
		if p.Addr().Is6() {
			f = 1
		}
		families[f] = append(families[f], p.Masked())
	}
	var out []netip.Prefix
	for f, all := range [...]netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)} {
		slices.SortFunc(families[f], func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
		out = appendExcept(out, all, families[f])
	}
	return out, true
}

// appendExcept appends ranges of all addresses that are in p but in no element of denied.
// The elements of denied overlap p, and are sorted by address.
func appendExcept(out []netip.Prefix, p netip.Prefix, denied []netip.Prefix) []netip.Prefix {
	if len(denied) == 0 {
		return append(out, p)
	}
	if slices.ContainsFunc(denied, func(d netip.Prefix) bool { return d.Bits() <= p.Bits() }) {
		return out
	}
	low, high := halves(p)
	n, _ := slices.BinarySearchFunc(denied, high.Addr(), func(d netip.Prefix, a netip.Addr) int { return d.Addr().Compare(a) })
	return appendExcept(appendExcept(out, low, denied[:n]), high, denied[n:])
}

func halves(p netip.Prefix) (low, high netip.Prefix) {
	bits := p.Bits()
	b := p.Addr().AsSlice()
	b[bits/8] |= 0x80 >> (bits % 8)
	a, _ := netip.AddrFromSlice(b)
	return netip.PrefixFrom(p.Addr(), bits+1), netip.PrefixFrom(a, bits+1)
}

// Annotations returns the annotations of kpng for a service.
func Annotations(s *api.Service) map[string]string {
	out := map[string]string{}
	for text, a := range own.algorithms {
		if a == s.Algorithm && a != api.Random {
			out[Algorithm] = text
		}
	}
	if s.ResetConnections {
		out[Connections] = "reset"
	}
	if slices.ContainsFunc(s.SourceRanges, func(r api.SourceRanges) bool { return r.NodePorts }) {
		out[SourceRangesScope] = "all"
	}
	return out
}
