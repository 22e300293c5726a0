// SPDX-License-Identifier: Apache-2.0

package kernelspace

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/hns"
)

// endpoints returns the IDs of a policy's HNS endpoints. It creates remote endpoints that
// HNS lacks. The error names the endpoints that are still missing.
func (p *pass) endpoints(policy *policy) (ids []string, lacking error) {
	if policy.toRoot {
		id, ok := p.rootEndpoint()
		if !ok {
			return nil, fmt.Errorf("HNS network %q has no endpoint %q for health checks", p.opts.Network, p.opts.RootEndpoint)
		}
		return []string{id}, nil
	}
	var errs []error
	known := make(map[string]bool, len(policy.endpoints))
	for _, d := range policy.endpoints {
		id, err := p.endpoint(d)
		switch {
		case isFatal(err):
			return nil, err
		case err != nil:
			errs = append(errs, fmt.Errorf("endpoint %s: %w", d.addr, err))
		case id != "" && !known[id]:
			known[id] = true
			ids = append(ids, id)
		}
	}
	return ids, errors.Join(errs...)
}

// rootEndpoint returns the ID of this node's endpoint. It searches all endpoints only once,
// because no pass creates or deletes this endpoint.
func (p *pass) rootEndpoint() (id string, ok bool) {
	if p.root == "" {
		p.root, _ = p.holdings.endpointNamed(p.opts.RootEndpoint)
	}
	return p.root, p.root != ""
}

// endpoint returns the ID of the HNS endpoint with the address of the destination d. It
// returns "" if the address is this node's own and HNS has no endpoint for it. Other
// owners' endpoints are used too, because HNS may allow only one endpoint per address.
func (p *pass) endpoint(d destination) (string, error) {
	if id, ok := p.holdings.endpointFor(d); ok {
		return id, nil
	}
	if d.at == hostHere {
		return "", nil
	}
	if d.at == podHere || p.isUnreachable(d.addr) {
		// The pod or node may have been created after the last listing.
		if err := p.relist(); err != nil {
			return "", err
		}
		if id, ok := p.holdings.endpointFor(d); ok {
			return id, nil
		}
	}
	if d.at == podHere {
		return "", errors.New("pod of this node has no HNS endpoint; the network plug-in has to create it")
	}
	e := p.environment.remote(endpointName(p.opts.Instance, d.addr), d.addr)
	id, err := p.createEndpoint(e)
	if errors.Is(err, hns.ErrExists) && !p.listed {
		if err := p.relist(); err != nil {
			return "", err
		}
		if id, ok := p.holdings.endpointFor(d); ok {
			return id, nil
		}
	}
	if stale, ok := p.holdings.endpointAt(d.addr); ok && errors.Is(err, hns.ErrExists) {
		return "", fmt.Errorf("%w: HNS still has endpoint %s of a deleted pod of this node; delete it", err, stale.ID)
	}
	return id, err
}

func (p *pass) createEndpoint(e hns.Endpoint) (id string, err error) {
	id, err = p.hns.CreateEndpoint(e)
	if err != nil {
		p.wrong = true
		return "", fmt.Errorf("create: %w", err)
	}
	p.log.V(4).Info("Created endpoint", "addresses", e.Addrs, "id", id)
	e.ID = id
	p.holdings.addEndpoint(e)
	return id, nil
}

// ensureVIPEndpoint creates the endpoint of a cluster IP on an overlay network.
func (p *pass) ensureVIPEndpoint(vip netip.Addr) error {
	if _, ok := p.holdings.endpointAt(vip); ok {
		return nil
	}
	mac, err := p.hostMAC()
	if err == nil && !p.environment.nodeIP(api.FamilyOf(vip)).IsValid() {
		err = errors.New("node address unknown")
	}
	if err == nil {
		_, err = p.createEndpoint(p.environment.vipEndpoint(endpointName(p.opts.Instance, vip), vip, mac))
	}
	if err != nil && !errors.Is(err, hns.ErrExists) {
		return fmt.Errorf("create endpoint of cluster IP: %w", err)
	}
	return nil // ErrExists means that the endpoint was created after the last listing
}

// hostMAC returns this node's hardware address. Endpoints for source VIPs and cluster IPs
// get this hardware address, because this node claims their IP addresses.
func (p *pass) hostMAC() (string, error) {
	if p.mac == "" {
		p.mac = cmp.Or(p.opts.HostMAC, macOfInterface(p.nodeIPs))
	}
	if p.mac == "" {
		return "", fmt.Errorf("find hardware address: no interface has one of the node's addresses %v", p.nodeIPs)
	}
	return p.mac, nil
}

// isUnreachable reports whether an overlay network has no tunnel to an address.
func (p *pass) isUnreachable(a netip.Addr) bool {
	return p.environment.network.Overlay && !p.environment.tunnels.provider(a).IsValid() && !slices.Contains(p.nodeIPs, a)
}

// ensureSourceVIPs creates the HNS endpoints of the source VIPs on an overlay network.
// HNS uses an address as a source only if it belongs to an endpoint of this machine.
func (p *pass) ensureSourceVIPs() error {
	if !p.environment.network.Overlay {
		return nil
	}
	for _, vip := range p.opts.SourceVIPs {
		if _, ok := p.holdings.endpointAt(vip); ok || !vip.Is4() {
			continue // the address has an endpoint, or is an IPv6 address, which HNS does not balance on overlay networks
		}
		mac, err := p.hostMAC()
		if err == nil {
			_, err = p.createEndpoint(hns.Endpoint{Name: sourceVIPName(p.opts.Instance), Network: p.environment.network.ID, Addrs: []netip.Addr{vip}, MAC: mac})
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
func (p *pass) dropMoved() error {
	network := p.environment.network
	if !network.Overlay {
		return nil
	}
	var moved []hns.Endpoint
	for _, id := range sortedKeys(p.holdings.endpoints) {
		e := p.holdings.endpoints[id]
		if !p.holdings.isOwn(e) || !e.Provider.IsValid() {
			continue
		}
		if provider := p.environment.remote("", e.Addrs[0]).Provider; provider.IsValid() && provider != e.Provider {
			moved = append(moved, e)
		}
	}
	for _, user := range p.holdings.users(moved) {
		if !p.record.owns(user) {
			continue
		}
		p.todo[p.record.made[user].Frontend] = true
		if err := p.deleteBalancer(user); err != nil {
			return err
		}
	}
	for _, e := range moved {
		if err := p.dropEndpoint(e.ID); err != nil {
			return err
		}
	}
	return nil
}

// dropIdle removes endpoints of this backend that no load balancer uses.
func (p *pass) dropIdle() error {
	for _, id := range sortedKeys(p.holdings.idle) {
		if err := p.ctx.Err(); err != nil {
			return err
		}
		if err := p.dropEndpoint(id); err != nil {
			return err
		}
	}
	return nil
}

// dropEndpoint deletes an endpoint of this backend. HNS refuses the deletion, for
// example, if a load balancer of another owner uses the endpoint. If the endpoint is
// unused in the next listing, the backend tries again.
func (p *pass) dropEndpoint(id string) error {
	addr := p.holdings.endpoints[id].Addrs
	err := p.hns.DeleteEndpoint(id)
	if err != nil && !isFatal(err) && !errors.Is(err, hns.ErrNotFound) {
		// Retry, because Windows Server 2019 may return an error although it deletes the
		// endpoint. Then the second call returns ErrNotFound.
		err = p.hns.DeleteEndpoint(id)
	}
	switch {
	case isFatal(err):
		return fmt.Errorf("delete endpoint %s, %v: %w", id, addr, err)
	case err != nil && !errors.Is(err, hns.ErrNotFound):
		p.log.Error(err, "Cannot delete unused endpoint; retrying later", "endpoint", id, "addresses", addr)
		delete(p.holdings.idle, id)
	default:
		p.log.V(4).Info("Deleted endpoint", "addresses", addr, "id", id)
		p.holdings.removeEndpoint(id)
	}
	return nil
}
