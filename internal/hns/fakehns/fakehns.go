// SPDX-License-Identifier: Apache-2.0

// Package fakehns is an in-memory Host Networking Service, for tests on any system. It
// rejects the same requests as known versions of HNS:
//   - duplicate addresses and frontends
//   - load balancers without endpoints, with missing endpoints, or with two targets
//     for one port
//   - IPv6 on an overlay network
//   - cluster IPs and source VIPs without an endpoint on an overlay network
//   - the deletion of an endpoint in use
//   - unsupported features
//
// [HNS.SetQuirks] adds irregularities that callers of HNS must tolerate. Example:
//
//	fake := fakehns.New(fakehns.AllFeatures())
//	fake.AddNetwork(hns.Network{Name: "l2bridge"})
//	fakehns.Use(t, fake)
//	backend, err := kernelspace.New(kernelspace.Options{Network: "l2bridge"})
package fakehns

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kpng-project/kpng/internal/hns"
)

// AllFeatures returns the features of the latest version of Windows.
func AllFeatures() hns.Features {
	return hns.Features{DSR: true, DualStack: true, RemoteSubnet: true, SessionAffinity: true, ModifyLoadBalancer: true}
}

var (
	// ErrInUse is returned if a caller deletes an endpoint that a load balancer uses.
	ErrInUse = errors.New("endpoint is used by a load balancer")

	// ErrAnswerLost may be returned by a hook. Then the call to HNS takes effect, but the
	// caller of HNS gets this error.
	ErrAnswerLost = errors.New("the answer of HNS is lost")
	// ErrIgnored may be returned by a hook for a call that changes objects. Then the call to
	// HNS changes nothing, but the caller of HNS gets no error.
	ErrIgnored = errors.New("HNS did not do what it said it did")
)

// HNS implements [hns.HNS]. It is safe for concurrent use.
type HNS struct {
	mu        sync.Mutex
	features  hns.Features
	networks  map[string]hns.Network
	endpoints map[string]hns.Endpoint
	balancers map[string]hns.LoadBalancer
	frontends map[frontend]string
	addrs     map[addrKey]string
	uses      map[string]int
	next      uint64
	calls     map[string]int
	hook      func(call string) error
	quirks    Quirks
	host      []netip.Addr
}

// Use makes h the Host Networking Service of this machine until the end of the test or
// benchmark.
func Use(tb testing.TB, h hns.HNS) {
	open := hns.Open
	hns.Open = func() (hns.HNS, error) { return h, nil }
	tb.Cleanup(func() { hns.Open = open })
}

// Quirks are irregularities of HNS that callers must tolerate, mainly in listings. With
// the zero value, a listing is sorted by ID, contains each object once, and shows each
// object as it was created.
type Quirks struct {
	// Descriptions of load balancers omit the flags in HiddenFlags and HiddenPortFlags.
	HiddenFlags     hns.LoadBalancerFlags
	HiddenPortFlags hns.PortFlags
	// Each of HidesSourceVIP, HidesDistribution, HidesRemote and HidesProvider omits one
	// setting from the descriptions of load balancers or endpoints.
	HidesSourceVIP, HidesDistribution, HidesRemote, HidesProvider bool
	// Descriptions add the flags in AddsPortFlags to each port of a load balancer.
	AddsPortFlags hns.PortFlags
	// With ListsTwice, listings contain each object twice. ListsBackwards reverses the order
	// of the objects in a listing, and of the endpoints in a load balancer.
	ListsTwice, ListsBackwards bool
	// SharesFrontends allows several load balancers with the same frontend.
	SharesFrontends bool
	// With EmptyBalancersBlock, HNS refuses to create or change a load balancer while any
	// load balancer has no endpoints (kubernetes/kubernetes#137530).
	EmptyBalancersBlock bool
}

// AllQuirks returns sets of quirks by name. The set "none" is empty, "all" contains most
// quirks, and each other set contains one quirk.
func AllQuirks() map[string]Quirks {
	const ports = hns.LocalRoutedVIP | hns.UseMux | hns.PreserveDIP | hns.VIPExternalIP
	return map[string]Quirks{
		"none":                 {},
		"hides flags":          {HiddenFlags: hns.DSR},
		"hides port flags":     {HiddenPortFlags: hns.VIPExternalIP},
		"hides all port flags": {HiddenPortFlags: ports},
		"hides source VIPs":    {HidesSourceVIP: true},
		"hides distribution":   {HidesDistribution: true},
		"hides remote":         {HidesRemote: true},
		"hides providers":      {HidesProvider: true},
		"adds port flags":      {AddsPortFlags: 1 | hns.LocalRoutedVIP},
		"lists twice":          {ListsTwice: true},
		"lists backwards":      {ListsBackwards: true},
		"empty ones block":     {EmptyBalancersBlock: true},
		"all": {
			HiddenFlags: hns.DSR, HiddenPortFlags: ports, HidesSourceVIP: true, HidesDistribution: true,
			HidesRemote: true, HidesProvider: true, ListsTwice: true, ListsBackwards: true, SharesFrontends: true,
			EmptyBalancersBlock: true,
		},
	}
}

var _ hns.HNS = &HNS{}

type frontend struct {
	vip      netip.Addr
	v6       bool
	protocol uint32
	port     uint16
}

// addrKey is a key that no two endpoints share. The field isRemote distinguishes a pod's
// endpoint from a remote endpoint with the same address. Both endpoints may exist,
// because the network plug-in does not check for remote endpoints.
type addrKey struct {
	network  string
	addr     netip.Addr
	isRemote bool
}

// New returns an HNS without any objects.
func New(features hns.Features) *HNS {
	return &HNS{
		features:  features,
		networks:  map[string]hns.Network{},
		endpoints: map[string]hns.Endpoint{},
		balancers: map[string]hns.LoadBalancer{},
		frontends: map[frontend]string{},
		addrs:     map[addrKey]string{},
		uses:      map[string]int{},
		calls:     map[string]int{},
	}
}

// SetHost sets the addresses of the machine. On an overlay network, a source VIP must be
// one of these addresses, or the address of an endpoint.
func (h *HNS) SetHost(addrs ...netip.Addr) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.host = addrs
}

// SetHook sets a hook. Each method of [hns.HNS] first calls hook with the
// method's name. If hook returns an error other than ErrIgnored, the method returns that
// error. The hook must not call the HNS.
func (h *HNS) SetHook(hook func(call string) error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.hook = hook
}

// SetQuirks sets the quirks of all later results.
func (h *HNS) SetQuirks(q Quirks) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.quirks = q
}

// describeEndpoint applies the quirks in q to the description of an endpoint.
func (q *Quirks) describeEndpoint(e hns.Endpoint) hns.Endpoint {
	e.Remote = e.Remote && !q.HidesRemote
	if q.HidesProvider {
		e.Provider = netip.Addr{}
	}
	return e
}

func (q *Quirks) describeBalancer(lb hns.LoadBalancer) hns.LoadBalancer {
	lb.Endpoints, lb.VIPs, lb.Ports = slices.Clone(lb.Endpoints), slices.Clone(lb.VIPs), slices.Clone(lb.Ports)
	if q.ListsBackwards {
		slices.Reverse(lb.Endpoints)
	}
	if q.HidesSourceVIP {
		lb.SourceVIP = netip.Addr{}
	}
	lb.Flags &^= q.HiddenFlags
	for i := range lb.Ports {
		p := &lb.Ports[i]
		p.Flags = p.Flags&^q.HiddenPortFlags | q.AddsPortFlags
		if q.HidesDistribution {
			p.Distribution = hns.PerConnection
		}
	}
	return lb
}

// list applies the quirks ListsBackwards and ListsTwice to the IDs in a listing.
func (q *Quirks) list(ids []string) []string {
	if q.ListsBackwards {
		slices.Reverse(ids)
	}
	if q.ListsTwice {
		ids = append(ids, ids...)
	}
	return ids
}

// Calls returns how often each method was called since the last call of Calls.
func (h *HNS) Calls() map[string]int {
	h.mu.Lock()
	defer h.mu.Unlock()
	calls := h.calls
	h.calls = map[string]int{}
	return calls
}

// AddNetwork adds n and returns its ID. It replaces a network with the same ID.
func (h *HNS) AddNetwork(n hns.Network) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if n.ID == "" {
		n.ID = h.newID()
	}
	h.networks[n.ID] = n
	return n.ID
}

// RemoveNetwork removes a network, its endpoints, and the load balancers that use these
// endpoints.
func (h *HNS) RemoveNetwork(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.networks, id)
	for _, e := range maps.Clone(h.endpoints) {
		if e.Network != id {
			continue
		}
		for _, lb := range maps.Clone(h.balancers) {
			if slices.Contains(lb.Endpoints, e.ID) {
				h.drop(lb)
			}
		}
		h.forget(e)
	}
}

// Endpoint returns HNS' description of the endpoint with this ID.
func (h *HNS) Endpoint(id string) (hns.Endpoint, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	e, ok := h.endpoints[id]
	return h.quirks.describeEndpoint(e), ok
}

// LoadBalancer returns HNS' description of the load balancer with this ID.
func (h *HNS) LoadBalancer(id string) (hns.LoadBalancer, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	lb, ok := h.balancers[id]
	return h.quirks.describeBalancer(lb), ok
}

// NetworkByID returns the network with this ID.
func (h *HNS) NetworkByID(id string) (hns.Network, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n, ok := h.networks[id]
	return n, ok
}

// newID returns a new ID in the form of a GUID.
func (h *HNS) newID() string {
	h.next++
	return fmt.Sprintf("%08x-0000-4000-8000-%012x", h.next>>48, h.next&(1<<48-1))
}

// call counts one call to HNS, calls the hook, and returns the hook's error.
func (h *HNS) call(name string) error {
	h.calls[name]++
	if h.hook == nil {
		return nil
	}
	return h.hook(name)
}

// write performs a call to HNS that changes an object.
func (h *HNS) write(name string, do func() (id string, err error)) (string, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	hooked := h.call(name)
	switch {
	case errors.Is(hooked, ErrIgnored):
		return h.newID(), nil
	case hooked != nil && !errors.Is(hooked, ErrAnswerLost):
		return "", hooked
	}
	id, err := do()
	if err == nil && hooked != nil {
		return "", hooked
	}
	return id, err
}

// Features implements hns.HNS.
func (h *HNS) Features() (hns.Features, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.features, h.call("Features")
}

// Network implements hns.HNS.
func (h *HNS) Network(name string) (*hns.Network, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.call("Network"); err != nil {
		return nil, err
	}
	for _, n := range h.networks {
		if n.Name == name {
			n.RemoteSubnets = slices.Clone(n.RemoteSubnets)
			return &n, nil
		}
	}
	return nil, fmt.Errorf("network %q: %w", name, hns.ErrNotFound)
}

// Endpoints implements hns.HNS.
func (h *HNS) Endpoints(network string) ([]hns.Endpoint, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.call("Endpoints"); err != nil {
		return nil, err
	}
	var list []hns.Endpoint
	for _, id := range h.quirks.list(slices.Sorted(maps.Keys(h.endpoints))) {
		if e := h.endpoints[id]; e.Network == network {
			list = append(list, h.quirks.describeEndpoint(e))
		}
	}
	return list, nil
}

// LoadBalancers implements hns.HNS.
func (h *HNS) LoadBalancers() ([]hns.LoadBalancer, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.call("LoadBalancers"); err != nil {
		return nil, err
	}
	var list []hns.LoadBalancer
	for _, id := range h.quirks.list(slices.Sorted(maps.Keys(h.balancers))) {
		list = append(list, h.quirks.describeBalancer(h.balancers[id]))
	}
	return list, nil
}

// CreateEndpoint implements hns.HNS.
func (h *HNS) CreateEndpoint(e hns.Endpoint) (string, error) {
	return h.write("CreateEndpoint", func() (string, error) { return h.createEndpoint(e) })
}

func (h *HNS) createEndpoint(e hns.Endpoint) (string, error) {
	if _, ok := h.networks[e.Network]; !ok {
		return "", fmt.Errorf("network %s: %w", e.Network, hns.ErrNotFound)
	}
	if len(e.Addrs) == 0 {
		return "", errors.New("an endpoint needs an address")
	}
	for _, a := range e.Addrs {
		if id, ok := h.addrs[addrKey{e.Network, a, e.Remote}]; ok {
			return "", fmt.Errorf("address %s is that of endpoint %s: %w", a, id, hns.ErrExists)
		}
	}
	e.ID = h.newID()
	h.endpoints[e.ID] = e
	for _, a := range e.Addrs {
		h.addrs[addrKey{e.Network, a, e.Remote}] = e.ID
	}
	return e.ID, nil
}

// DeleteEndpoint implements hns.HNS.
func (h *HNS) DeleteEndpoint(id string) error {
	_, err := h.write("DeleteEndpoint", func() (string, error) { return "", h.deleteEndpoint(id) })
	return err
}

func (h *HNS) deleteEndpoint(id string) error {
	e, ok := h.endpoints[id]
	if !ok {
		return fmt.Errorf("endpoint %s: %w", id, hns.ErrNotFound)
	}
	if h.uses[id] > 0 {
		return fmt.Errorf("endpoint %s: %w", id, ErrInUse)
	}
	h.forget(e)
	return nil
}

func (h *HNS) forget(e hns.Endpoint) {
	delete(h.endpoints, e.ID)
	for _, a := range e.Addrs {
		delete(h.addrs, addrKey{e.Network, a, e.Remote})
	}
}

// LoseEndpoint removes an endpoint, and also removes it from the load balancers that use
// it. HNS does this when a pod ends. A load balancer may then have no endpoints.
func (h *HNS) LoseEndpoint(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.forget(h.endpoints[id])
	for _, lb := range maps.Clone(h.balancers) {
		if i := slices.Index(lb.Endpoints, id); i >= 0 {
			h.drop(lb)
			lb.Endpoints = slices.Delete(slices.Clone(lb.Endpoints), i, i+1)
			h.add(lb)
		}
	}
}

// CreateLoadBalancer implements hns.HNS.
func (h *HNS) CreateLoadBalancer(lb hns.LoadBalancer) (hns.LoadBalancer, error) {
	id, err := h.write("CreateLoadBalancer", func() (string, error) { return h.createLoadBalancer(lb) })
	if err != nil {
		return hns.LoadBalancer{}, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	lb.ID = id
	return h.quirks.describeBalancer(lb), nil
}

func (h *HNS) createLoadBalancer(lb hns.LoadBalancer) (string, error) {
	if err := h.check(lb); err != nil {
		return "", err
	}
	lb.ID = h.newID()
	h.add(lb)
	return lb.ID, nil
}

// UpdateLoadBalancer implements hns.HNS.
func (h *HNS) UpdateLoadBalancer(lb hns.LoadBalancer) error {
	_, err := h.write("UpdateLoadBalancer", func() (string, error) { return "", h.updateLoadBalancer(lb) })
	return err
}

func (h *HNS) updateLoadBalancer(lb hns.LoadBalancer) error {
	if !h.features.ModifyLoadBalancer {
		return hns.ErrNotSupported
	}
	old, ok := h.balancers[lb.ID]
	if !ok {
		return fmt.Errorf("load balancer %s: %w", lb.ID, hns.ErrNotFound)
	}
	if err := h.check(lb); err != nil {
		return err
	}
	h.drop(old)
	h.add(lb)
	return nil
}

// DeleteLoadBalancer implements hns.HNS.
func (h *HNS) DeleteLoadBalancer(id string) error {
	_, err := h.write("DeleteLoadBalancer", func() (string, error) { return "", h.deleteLoadBalancer(id) })
	return err
}

func (h *HNS) deleteLoadBalancer(id string) error {
	lb, ok := h.balancers[id]
	if !ok {
		return fmt.Errorf("load balancer %s: %w", id, hns.ErrNotFound)
	}
	h.drop(lb)
	return nil
}

// check returns an error if HNS would reject the load balancer.
func (h *HNS) check(lb hns.LoadBalancer) error {
	if len(lb.Endpoints) == 0 || len(lb.Ports) == 0 {
		return errors.New("a load balancer needs endpoints and ports")
	}
	for _, other := range h.balancers {
		if h.quirks.EmptyBalancersBlock && len(other.Endpoints) == 0 {
			return fmt.Errorf("load balancer %s without endpoints: %w", other.ID, ErrInUse)
		}
	}
	for i, id := range lb.Endpoints {
		if _, ok := h.endpoints[id]; !ok {
			return fmt.Errorf("endpoint %s: %w", id, hns.ErrNotFound)
		}
		if slices.Contains(lb.Endpoints[:i], id) {
			return fmt.Errorf("endpoint %s twice", id)
		}
		if err := h.checkOverlay(lb, h.endpoints[id].Network); err != nil {
			return err
		}
	}
	for i, p := range lb.Ports {
		if slices.ContainsFunc(lb.Ports[:i], func(other hns.PortMapping) bool {
			return other.Protocol == p.Protocol && other.External == p.External
		}) {
			return fmt.Errorf("port %d twice: %w", p.External, hns.ErrExists)
		}
	}
	if lb.Flags&hns.DSR != 0 && !h.features.DSR || lb.Flags&hns.IPv6 != 0 && !h.features.DualStack {
		return fmt.Errorf("flags %d: %w", lb.Flags, hns.ErrNotSupported)
	}
	for _, p := range lb.Ports {
		if p.Distribution != hns.PerConnection && !h.features.SessionAffinity {
			return fmt.Errorf("distribution %d: %w", p.Distribution, hns.ErrNotSupported)
		}
	}
	for _, f := range frontendsOf(lb) {
		if id, ok := h.frontends[f]; ok && id != lb.ID && !h.quirks.SharesFrontends {
			return fmt.Errorf("frontend %v is that of load balancer %s: %w", f, id, hns.ErrExists)
		}
	}
	return nil
}

// checkOverlay returns an error if an overlay network would reject the load balancer.
func (h *HNS) checkOverlay(lb hns.LoadBalancer, network string) error {
	if !h.networks[network].Overlay {
		return nil
	}
	if lb.Flags&hns.IPv6 != 0 {
		return errors.New("IPv6 on an overlay network")
	}
	if _, ok := h.addrs[addrKey{network, lb.SourceVIP, false}]; !ok && !slices.Contains(h.host, lb.SourceVIP) {
		return fmt.Errorf("source VIP %s has no endpoint", lb.SourceVIP)
	}
	for _, vip := range lb.VIPs {
		if _, ok := h.addrs[addrKey{network, vip, true}]; !ok && lb.Ports[0].Flags&hns.VIPExternalIP == 0 {
			return fmt.Errorf("VIP %s has no endpoint", vip)
		}
	}
	return nil
}

func (h *HNS) add(lb hns.LoadBalancer) {
	lb.Endpoints, lb.VIPs, lb.Ports = slices.Clone(lb.Endpoints), slices.Clone(lb.VIPs), slices.Clone(lb.Ports)
	h.balancers[lb.ID] = lb
	for _, f := range frontendsOf(lb) {
		h.frontends[f] = lb.ID
	}
	for _, id := range lb.Endpoints {
		h.uses[id]++
	}
}

func (h *HNS) drop(lb hns.LoadBalancer) {
	delete(h.balancers, lb.ID)
	for _, f := range frontendsOf(lb) {
		if h.frontends[f] == lb.ID {
			delete(h.frontends, f)
		}
	}
	for _, id := range lb.Endpoints {
		h.uses[id]--
	}
}

func frontendsOf(lb hns.LoadBalancer) []frontend {
	vips := lb.VIPs
	if len(vips) == 0 {
		vips = []netip.Addr{{}}
	}
	var all []frontend
	for _, vip := range vips {
		for _, p := range lb.Ports {
			all = append(all, frontend{vip, lb.Flags&hns.IPv6 != 0, p.Protocol, p.External})
		}
	}
	return all
}

// Dump returns all endpoints and load balancers as sorted lines without IDs, so that
// tests can compare states.
func (h *HNS) Dump() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var lines []string
	for _, e := range h.endpoints {
		line := fmt.Sprintf("endpoint %v", e.Addrs)
		if e.Remote {
			line += " remote mac " + e.MAC
		}
		if e.Provider.IsValid() {
			line += " at " + e.Provider.String()
		}
		if e.Name != "" {
			line += " named " + e.Name
		}
		lines = append(lines, line)
	}
	for _, lb := range h.balancers {
		lines = append(lines, h.dump(lb))
	}
	slices.Sort(lines)
	return strings.Join(append(lines, ""), "\n")
}

func (h *HNS) dump(lb hns.LoadBalancer) string {
	var b strings.Builder
	b.WriteString("load balancer")
	for _, vip := range lb.VIPs {
		fmt.Fprintf(&b, " %s", vip)
	}
	if len(lb.VIPs) == 0 {
		b.WriteString(" node port")
	}
	for _, name := range []struct {
		flag hns.LoadBalancerFlags
		name string
	}{{hns.DSR, " DSR"}, {hns.IPv6, " IPv6"}} {
		if lb.Flags&name.flag != 0 {
			b.WriteString(name.name)
		}
	}
	if lb.SourceVIP.IsValid() {
		fmt.Fprintf(&b, " source %s", lb.SourceVIP)
	}
	for _, p := range lb.Ports {
		fmt.Fprintf(&b, " protocol %d port %d->%d", p.Protocol, p.External, p.Internal)
		for _, name := range []struct {
			flag hns.PortFlags
			name string
		}{
			{hns.LocalRoutedVIP, " LocalRoutedVIP"}, {hns.UseMux, " UseMux"},
			{hns.PreserveDIP, " PreserveDIP"}, {hns.VIPExternalIP, " VIPExternalIP"},
		} {
			if p.Flags&name.flag != 0 {
				b.WriteString(name.name)
			}
		}
		if p.Distribution == hns.PerClient {
			b.WriteString(" per client")
		}
	}
	var addrs []string
	for _, id := range lb.Endpoints {
		addr := h.endpoints[id].Addrs[0]
		for _, a := range h.endpoints[id].Addrs {
			if a.Is6() == (lb.Flags&hns.IPv6 != 0) {
				addr = a
			}
		}
		addrs = append(addrs, addr.String())
	}
	slices.Sort(addrs)
	fmt.Fprintf(&b, " to %s", strings.Join(addrs, " "))
	return b.String()
}
