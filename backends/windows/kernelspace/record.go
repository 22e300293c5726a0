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

	"github.com/kpng-project/kpng/backends/windows/internal/journal"
	"k8s.io/apimachinery/pkg/types"
)

// record remembers, in a journal, which of the machine's load balancers are own ones, as HNS
// gives them no name to tell by. A load balancer is in one of these states:
//
//	planned    its creation is about to be requested
//	requested  its creation was requested; whether HNS has it under an ID that is not known is
//	           for the next listing to tell
//	made       HNS has it, under an ID
//	deleted    HNS says that it was deleted, which the next listing confirms
//
// A load balancer is an own one by its ID alone. In the journal requested looks like
// planned, and deleted like made: a process that begins knows neither an answer of HNS nor
// its own request, and a listing settles both.
type record struct {
	journal *journal.Journal
	planned map[Frontend]*planned
	made    map[string]*made // by ID
}

// planned is a load balancer whose ID is not known.
type planned struct {
	Service types.NamespacedName
	Target  uint16
	// Asked is the digest of the settings that HNS is asked for.
	Asked     digest
	requested bool
}

// made is a load balancer that HNS created.
type made struct {
	Frontend Frontend
	Service  types.NamespacedName
	// Asked is the digest of the settings that HNS was asked for, and Answered of those
	// that it described in return: HNS does not tell all settings.
	Asked, Answered digest
	deleted         bool
}

const (
	journalKind   = "load balancers"
	plannedPrefix = "planned "
	madePrefix    = "made "
)

// readRecord reads the record of a file. One that does not exist is empty. An empty path
// keeps the record in memory.
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
	return &record{journal: j, planned: map[Frontend]*planned{}, made: map[string]*made{}}
}

func (r *record) read(key, value string) error {
	if id, ok := strings.CutPrefix(key, madePrefix); ok {
		m := &made{}
		r.made[id] = m
		return json.Unmarshal([]byte(value), m)
	}
	text, ok := strings.CutPrefix(key, plannedPrefix)
	if !ok {
		return fmt.Errorf("neither %q nor %q", plannedPrefix, madePrefix)
	}
	var f Frontend
	if err := json.Unmarshal([]byte(text), &f); err != nil {
		return err
	}
	p := &planned{requested: true}
	r.planned[f] = p
	return json.Unmarshal([]byte(value), p)
}

// owns reports whether a load balancer is an own one.
func (r *record) owns(id string) bool { return r.made[id] != nil }

// plan notes that the creation of a load balancer is about to be requested.
func (r *record) plan(f Frontend, p planned) {
	r.planned[f] = &p
	r.journal.Set(plannedPrefix+encode(f), encode(p))
}

// add notes that HNS has a load balancer, whose plan it fulfills if there was one.
func (r *record) add(id string, m made) {
	r.made[id] = &m
	r.journal.Set(madePrefix+id, encode(m))
	r.drop(m.Frontend)
}

// drop forgets a plan.
func (r *record) drop(f Frontend) {
	if r.planned[f] != nil {
		delete(r.planned, f)
		r.journal.Delete(plannedPrefix + encode(f))
	}
}

// dropUnrequested forgets plans that were not carried out.
func (r *record) dropUnrequested() {
	for f, p := range r.planned {
		if !p.requested {
			r.drop(f)
		}
	}
}

// forget forgets a load balancer that HNS does not have.
func (r *record) forget(id string) {
	delete(r.made, id)
	r.journal.Delete(madePrefix + id)
}

// confirm brings the record in line with a listing. It forgets load balancers that are not
// listed, and finds out which requests HNS carried out: a load balancer that is not known has
// the frontend of the request, no other one, and the same target.
func (r *record) confirm(have *holdings) {
	for id, m := range r.made {
		if _, listed := have.balancers[id]; !listed {
			r.forget(id)
		} else {
			m.deleted = false
		}
	}
	for f, p := range r.planned {
		if !p.requested {
			continue
		}
		for _, id := range have.byFrontend[f] {
			lb := have.balancers[id]
			if !r.owns(id) && len(frontendsOf(lb)) == 1 && len(lb.Ports) == 1 && lb.Ports[0].Internal == p.Target {
				r.add(id, made{Frontend: f, Service: p.Service, Asked: p.Asked, Answered: digestOf(lb)})
			}
		}
		r.drop(f)
	}
}

// len returns how many load balancers HNS has that are own ones.
func (r *record) len() int {
	n := 0
	for _, m := range r.made {
		if !m.deleted {
			n++
		}
	}
	return n
}

// unchanged reports whether a load balancer has the settings want, endpoints aside. HNS does
// not describe all settings, so a description that is the same as after the creation stands
// for what was asked for then.
func (r *record) unchanged(have, want LoadBalancer) bool {
	got, asked := digestOf(have), digestOf(want)
	if m := r.made[have.ID]; m != nil && got == m.Answered {
		return asked == m.Asked
	}
	if !want.SourceVIP.IsValid() {
		have.SourceVIP = netip.Addr{} // one that HNS chose
		got = digestOf(have)
	}
	return got == asked
}

// digest stands for the settings of a load balancer, endpoints aside.
type digest uint64

// The settings that the backend decides; HNS may add its own.
const (
	knownFlags     = DSR | IPv6
	knownPortFlags = LocalRoutedVIP | UseMux | PreserveDIP | VIPExternalIP
)

func digestOf(lb LoadBalancer) digest {
	ports := slices.Clone(lb.Ports)
	slices.SortFunc(ports, func(a, b PortMapping) int {
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
		panic(err) // structs of numbers, strings and addresses
	}
	return string(data)
}

func compareFrontends(a, b Frontend) int {
	return cmp.Or(a.VIP.Compare(b.VIP), cmp.Compare(a.Family, b.Family), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
}
