// SPDX-License-Identifier: Apache-2.0

package kernelspace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/hns"
)

// endpointIDs returns the sorted IDs of the endpoints of a policy. It omits endpoints that
// HNS does not have. If it omits one, the result "all" is false.
func (b *backend) endpointIDs(p *policy) (ids []string, all bool) {
	if p.toRoot {
		id, ok := b.rootEndpoint()
		if !ok {
			return nil, false
		}
		return []string{id}, true
	}
	all = true
	ids = make([]string, 0, len(p.endpoints))
	for _, d := range p.endpoints {
		if id, ok := b.holdings.endpointFor(d); ok {
			ids = append(ids, id)
		} else {
			all = all && d.at == hostHere
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids), all
}

// endpoints creates those remote endpoints of a policy that HNS lacks. It returns the
// sorted IDs of all endpoints of the policy. The error names the endpoints that are still
// missing.
func (b *backend) endpoints(p *policy) (ids []string, lacking error) {
	ids, all := b.endpointIDs(p)
	if all {
		return ids, nil
	}
	if p.toRoot {
		return nil, fmt.Errorf("HNS network %q has no endpoint %q for health checks", b.opts.Network, b.opts.RootEndpoint)
	}
	var errs []error
	for _, d := range p.endpoints {
		if err := b.ensureEndpoint(d); isFatal(err) {
			return nil, err
		} else if err != nil {
			errs = append(errs, fmt.Errorf("endpoint %s: %w", d.addr, err))
		}
	}
	ids, _ = b.endpointIDs(p)
	return ids, errors.Join(errs...)
}

// rootEndpoint returns the ID of this node's endpoint. After a listing, it searches all
// endpoints only once.
func (b *backend) rootEndpoint() (id string, ok bool) {
	if b.root == "" {
		b.root, _ = b.holdings.endpointNamed(b.opts.RootEndpoint)
	}
	return b.root, b.root != ""
}

// ensureEndpoint creates the endpoint of a destination if HNS lacks it. It does not create
// an endpoint for the node's own address. Other owners' endpoints are used too, because HNS
// may allow only one endpoint per address.
func (b *backend) ensureEndpoint(d destination) error {
	if _, ok := b.holdings.endpointFor(d); ok || d.at == hostHere {
		return nil
	}
	if d.at == podHere || b.isUnreachable(d.addr) {
		// The pod or node may have been created after the last listing.
		if err := b.relist(); err != nil {
			return err
		}
		if _, ok := b.holdings.endpointFor(d); ok {
			return nil
		}
	}
	if d.at == podHere {
		return errors.New("pod of this node has no HNS endpoint; the network plug-in has to create it")
	}
	err := b.createEndpoint(b.environment.remoteEndpoint(endpointName(b.opts.Instance, d.addr), d.addr))
	if !errors.Is(err, hns.ErrExists) {
		return err
	}
	if err := b.relist(); err != nil {
		return err
	}
	if _, ok := b.holdings.endpointFor(d); ok {
		return nil
	}
	if stale, ok := b.holdings.endpointAt(d.addr); ok {
		return fmt.Errorf("%w: HNS still has endpoint %s of a deleted pod of this node; delete it", err, stale.ID)
	}
	return err
}

func (b *backend) createEndpoint(e hns.Endpoint) error {
	id, err := b.hns.CreateEndpoint(e)
	if err != nil {
		b.doubtful = true
		return fmt.Errorf("create: %w", err)
	}
	b.log.V(4).Info("Created endpoint", "addresses", e.Addrs, "id", id)
	e.ID = id
	b.holdings.addEndpoint(e)
	return nil
}

// ensureVIPEndpoint creates the endpoint of a cluster IP on an overlay network.
func (b *backend) ensureVIPEndpoint(vip netip.Addr) error {
	if _, ok := b.holdings.endpointAt(vip); ok {
		return nil
	}
	mac, err := b.hostMAC()
	if err == nil && !b.environment.nodeIP(api.FamilyOf(vip)).IsValid() {
		err = errors.New("node address unknown")
	}
	if err == nil {
		err = b.createEndpoint(b.environment.vipEndpoint(endpointName(b.opts.Instance, vip), vip, mac))
	}
	if err != nil && !errors.Is(err, hns.ErrExists) {
		return fmt.Errorf("create endpoint of cluster IP: %w", err)
	}
	return nil // ErrExists means that the endpoint was created after the last listing
}

// hostMAC returns this node's hardware address. Endpoints for source VIPs and cluster IPs
// get this hardware address, because this node claims their IP addresses.
func (b *backend) hostMAC() (string, error) {
	if b.mac == "" {
		b.mac = cmp.Or(b.opts.HostMAC, macOfInterface(b.environment.nodeIPs))
	}
	if b.mac == "" {
		return "", fmt.Errorf("find hardware address: no interface has one of the node's addresses %v", b.environment.nodeIPs)
	}
	return b.mac, nil
}

// isUnreachable reports whether an overlay network has no tunnel to an address.
func (b *backend) isUnreachable(a netip.Addr) bool {
	return b.environment.network.Overlay && !b.environment.tunnels.provider(a).IsValid() && !slices.Contains(b.environment.nodeIPs, a)
}

// ensureSourceVIPs creates the HNS endpoints of the source VIPs on an overlay network.
// HNS uses an address as a source only if it belongs to an endpoint of this machine.
func (b *backend) ensureSourceVIPs() error {
	if !b.environment.network.Overlay {
		return nil
	}
	for _, vip := range b.opts.SourceVIPs {
		if _, ok := b.holdings.endpointAt(vip); ok || !vip.Is4() {
			continue // the address has an endpoint, or is an IPv6 address, which HNS does not balance on overlay networks
		}
		b.reportDrift(!b.passing)
		mac, err := b.hostMAC()
		if err == nil {
			err = b.createEndpoint(hns.Endpoint{Name: sourceVIPName(b.opts.Instance), Network: b.environment.network.ID, Addrs: []netip.Addr{vip}, MAC: mac})
		}
		if err != nil {
			return fmt.Errorf("create endpoint of source VIP %s: %w", vip, err)
		}
	}
	return nil
}

// dropMoved removes this backend's endpoints whose addresses are on another node now. An
// address moves if a new node gets the pod network of a removed node. The load balancers
// of such endpoints no longer work, so dropMoved removes them too. Later steps create the
// endpoints and load balancers again.
func (b *backend) dropMoved() error {
	network := b.environment.network
	if !network.Overlay {
		return nil
	}
	var moved []hns.Endpoint
	for _, id := range sortedKeys(b.holdings.endpoints) {
		e := b.holdings.endpoints[id]
		if !b.holdings.isOwn(e) || !e.Provider.IsValid() {
			continue
		}
		if provider := b.environment.remoteEndpoint("", e.Addrs[0]).Provider; provider.IsValid() && provider != e.Provider {
			moved = append(moved, e)
		}
	}
	for _, user := range b.holdings.users(moved) {
		if !b.record.owns(user) {
			continue
		}
		if err := b.deleteBalancer(user); err != nil {
			return err
		}
	}
	for _, e := range moved {
		if err := b.dropEndpoint(e.ID); err != nil {
			return err
		}
	}
	return nil
}

// dropIdle removes endpoints of this backend that no load balancer uses.
func (b *backend) dropIdle(ctx context.Context) error {
	for _, id := range sortedKeys(b.holdings.idle) {
		if ctx.Err() != nil {
			return nil
		}
		if err := b.dropEndpoint(id); err != nil {
			return err
		}
	}
	return nil
}

// dropEndpoint deletes an endpoint of this backend. HNS refuses the deletion, for
// example, if a load balancer of another owner uses the endpoint. If the endpoint is
// unused in the next listing, the backend tries again.
func (b *backend) dropEndpoint(id string) error {
	addr := b.holdings.endpoints[id].Addrs
	err := b.hns.DeleteEndpoint(id)
	if err != nil && !isFatal(err) && !errors.Is(err, hns.ErrNotFound) {
		// Retry, because Windows Server 2019 may return an error although it deletes the
		// endpoint. Then the second call returns ErrNotFound.
		err = b.hns.DeleteEndpoint(id)
	}
	switch {
	case isFatal(err):
		return fmt.Errorf("delete endpoint %s, %v: %w", id, addr, err)
	case err != nil && !errors.Is(err, hns.ErrNotFound):
		b.log.Error(err, "Cannot delete unused endpoint; retrying later", "endpoint", id, "addresses", addr)
		delete(b.holdings.idle, id)
	default:
		b.log.V(4).Info("Deleted endpoint", "addresses", addr, "id", id)
		b.holdings.removeEndpoint(id)
	}
	return nil
}
