// SPDX-License-Identifier: Apache-2.0

package kernelspace

import (
	"cmp"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/internal/hns"
	"github.com/kpng-project/kpng/internal/journal"
	"k8s.io/apimachinery/pkg/types"
)

// A record lists the load balancers that the backend owns, because HNS stores no owner.
// The record is stored in a journal. A load balancer has one of these states:
//
//	planned    its creation is about to be requested
//	requested  its creation was requested; the next listing shows whether HNS
//	           has it under an unknown ID
//	made       HNS has it, under a known ID
//	deleted    HNS reported its deletion, which the next listing confirms
//
// The backend owns a load balancer only if the record has its ID. The journal stores
// planned and requested as the same state. It also stores made and deleted as the same
// state. So a new process does not know the exact state until it compares the record with
// a listing.
type record struct {
	journal *journal.Journal
	planned map[frontend]*plannedBalancer
	made    map[string]*madeBalancer // by ID
	// deleted is the number of deleted load balancers in the map made.
	deleted int
}

// plannedBalancer describes a load balancer whose ID is unknown.
type plannedBalancer struct {
	Service types.NamespacedName
	Target  uint16
	// Asked is the digest of the requested settings.
	Asked     digest
	requested bool
}

// madeBalancer describes a load balancer that HNS created.
type madeBalancer struct {
	Frontend frontend
	Service  types.NamespacedName
	// Asked is the digest of the requested settings. Answered is the digest of the settings
	// that HNS reported. The digests may differ, because HNS may omit settings.
	Asked, Answered digest
	deleted         bool
}

const (
	journalKind   = "load balancers"
	plannedPrefix = "planned "
	madePrefix    = "made "
)

// readRecord reads the record from a file. If the file is missing, the record is empty.
// If path is empty, the record is only in memory.
func readRecord(path string) (*record, error) {
	j, err := journal.Open(path, journalKind)
	if err != nil {
		return nil, err
	}
	r := newRecord(j)
	for key, value := range j.All() {
		if err := r.read(key, value); err != nil {
			return nil, fmt.Errorf("read journal %s: entry %q: %w", path, key, err)
		}
	}
	return r, nil
}

func newRecord(j *journal.Journal) *record {
	return &record{journal: j, planned: map[frontend]*plannedBalancer{}, made: map[string]*madeBalancer{}}
}

func (r *record) read(key, value string) error {
	if id, ok := strings.CutPrefix(key, madePrefix); ok {
		m := &madeBalancer{}
		r.made[id] = m
		return json.Unmarshal([]byte(value), m)
	}
	text, ok := strings.CutPrefix(key, plannedPrefix)
	if !ok {
		return fmt.Errorf("want prefix %q or %q", plannedPrefix, madePrefix)
	}
	var f frontend
	if err := json.Unmarshal([]byte(text), &f); err != nil {
		return err
	}
	p := &plannedBalancer{requested: true}
	r.planned[f] = p
	return json.Unmarshal([]byte(value), p)
}

// owns reports whether the backend owns a load balancer.
func (r *record) owns(id string) bool { return r.made[id] != nil }

// plan records a load balancer whose creation is about to be requested.
func (r *record) plan(f frontend, p plannedBalancer) {
	r.planned[f] = &p
	r.journal.Set(plannedPrefix+encode(f), encode(p))
}

// add records a load balancer that exists in HNS, and removes the plan for its
// frontend.
func (r *record) add(id string, m madeBalancer) {
	r.setDeleted(id, false)
	r.made[id] = &m
	r.journal.Set(madePrefix+id, encode(m))
	r.dropPlan(m.Frontend)
}

// dropPlan removes the plan for a frontend.
func (r *record) dropPlan(f frontend) {
	if r.planned[f] != nil {
		delete(r.planned, f)
		r.journal.Delete(plannedPrefix + encode(f))
	}
}

// dropUnrequested removes plans for load balancers whose creation was not requested.
func (r *record) dropUnrequested() {
	for f, p := range r.planned {
		if !p.requested {
			r.dropPlan(f)
		}
	}
}

// forget removes from the record a load balancer that HNS no longer has.
func (r *record) forget(id string) {
	r.setDeleted(id, false)
	delete(r.made, id)
	r.journal.Delete(madePrefix + id)
}

// confirm compares the record with a listing. It removes load balancers that are not
// listed. For each requested load balancer whose ID is unknown, it adds the listed load
// balancer that has the same frontend and target port.
func (r *record) confirm(have *holdings) {
	for id := range r.made {
		if _, listed := have.balancers[id]; !listed {
			r.forget(id)
		} else {
			r.setDeleted(id, false)
		}
	}
	for f, p := range r.planned {
		if !p.requested {
			continue
		}
		for _, id := range have.byFrontend[f] {
			lb := have.balancers[id]
			if !r.owns(id) && len(frontendsOf(lb)) == 1 && len(lb.Ports) == 1 && lb.Ports[0].Internal == p.Target {
				r.add(id, madeBalancer{Frontend: f, Service: p.Service, Asked: p.Asked, Answered: digestOf(lb)})
			}
		}
		r.dropPlan(f)
	}
}

// setDeleted records whether HNS has reported the deletion of a load balancer, if the
// backend owns it.
func (r *record) setDeleted(id string, deleted bool) {
	m := r.made[id]
	if m == nil || m.deleted == deleted {
		return
	}
	if m.deleted = deleted; deleted {
		r.deleted++
	} else {
		r.deleted--
	}
}

// len returns the number of this backend's load balancers in HNS.
func (r *record) len() int { return len(r.made) - r.deleted }

// unchanged reports whether two load balancers have the same settings, apart from the
// endpoints. HNS does not report all settings. HNS may still report the same settings as
// after the creation. Then the load balancer is assumed to have all requested settings.
func (r *record) unchanged(have, want hns.LoadBalancer) bool {
	got, asked := digestOf(have), digestOf(want)
	if m := r.made[have.ID]; m != nil && got == m.Answered {
		return asked == m.Asked
	}
	if !want.SourceVIP.IsValid() {
		have.SourceVIP = netip.Addr{} // ignore the source VIP that HNS chose
		got = digestOf(have)
	}
	return got == asked
}

// digest identifies the settings of a load balancer, except its endpoints.
type digest uint64

// The flags that the backend controls. HNS may add other flags.
const (
	knownFlags     = hns.DSR | hns.IPv6
	knownPortFlags = hns.LocalRoutedVIP | hns.UseMux | hns.PreserveDIP | hns.VIPExternalIP
)

func digestOf(lb hns.LoadBalancer) digest {
	ports := slices.Clone(lb.Ports)
	slices.SortFunc(ports, func(a, b hns.PortMapping) int {
		return cmp.Or(cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.External, b.External), cmp.Compare(a.Internal, b.Internal))
	})
	h := fnv.New64a()
	fmt.Fprint(h, lb.SourceVIP, lb.Flags&knownFlags, lb.VIPs)
	for _, p := range ports {
		fmt.Fprint(h, " ", p.Protocol, p.External, p.Internal, p.Distribution, p.Flags&knownPortFlags)
	}
	return digest(h.Sum64())
}

func encode(v any) string {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err) // encoding numbers, strings and addresses cannot fail
	}
	return string(data)
}
