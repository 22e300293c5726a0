// SPDX-License-Identifier: Apache-2.0

package kernelspace

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
)

// endpoints returns the IDs of a policy's endpoints, and an error that names
// those that there are not. Remote ones are made.
func (p *pass) endpoints(policy *policy) (ids []string, lacking error) {
	if policy.toRoot {
		id, ok := p.have.endpointNamed(p.opts.RootEndpoint)
		if !ok {
			return nil, fmt.Errorf("HNS network %q has no endpoint %q for health checks", p.opts.Network, p.opts.RootEndpoint)
		}
		return []string{id}, nil
	}
	var errs []error
	for _, d := range policy.endpoints {
		id, err := p.endpoint(d)
		switch {
		case ends(err):
			return nil, err
		case err != nil:
			errs = append(errs, fmt.Errorf("endpoint %s: %w", d.addr, err))
		case id != "" && !slices.Contains(ids, id):
			ids = append(ids, id)
		}
	}
	return ids, errors.Join(errs...)
}

// endpoint returns the ID of the endpoint of an address, "" if the address is this node's
// own and HNS has no endpoint for it. Whoever's the endpoint is, there can only be one.
func (p *pass) endpoint(d destination) (string, error) {
	if e, ok := p.have.endpointAt(d.addr); ok && !p.isLeftover(e, d) {
		return e.ID, nil
	}
	if d.at == hostHere {
		return "", nil
	}
	if d.at == podHere || p.astray(d.addr) {
		// A pod, or a node, that came after the last listing.
		if err := p.relist(); err != nil {
			return "", err
		}
		if e, ok := p.have.endpointAt(d.addr); ok && !p.isLeftover(e, d) {
			return e.ID, nil
		}
	}
	if d.at == podHere {
		return "", errors.New("is a pod of this node, and the network plug-in has not made an HNS endpoint for it")
	}
	e := p.terrain.remote(endpointName(p.opts.Name, d.addr), d.addr)
	id, err := p.createEndpoint(e)
	if errors.Is(err, ErrExists) && !p.listed {
		if err := p.relist(); err != nil {
			return "", err
		}
		if e, ok := p.have.endpointAt(d.addr); ok {
			return e.ID, nil
		}
	}
	return id, err
}

// isLeftover reports whether an endpoint is that of a pod elsewhere which had the address
// of a pod of this node.
func (p *pass) isLeftover(e Endpoint, d destination) bool {
	return d.at == podHere && p.have.isRemote(e)
}

func (p *pass) createEndpoint(e Endpoint) (id string, err error) {
	id, err = p.hns.CreateEndpoint(e)
	if err != nil {
		p.wrong = true
		return "", fmt.Errorf("create: %w", err)
	}
	p.log.V(4).Info("Created endpoint", "addresses", e.Addrs, "id", id)
	e.ID = id
	p.have.addEndpoint(e)
	return id, nil
}

// ensureVIPEndpoint makes the endpoint of a cluster IP on an overlay network.
func (p *pass) ensureVIPEndpoint(vip netip.Addr) error {
	if _, ok := p.have.endpointAt(vip); ok {
		return nil
	}
	mac, err := p.hostMAC()
	if err == nil && !p.terrain.nodeIP(api.FamilyOf(vip)).IsValid() {
		err = errors.New("this node's address is not known")
	}
	if err == nil {
		_, err = p.createEndpoint(p.terrain.vipEndpoint(endpointName(p.opts.Name, vip), vip, mac))
	}
	if err != nil && !errors.Is(err, ErrExists) {
		return fmt.Errorf("endpoint of the cluster IP: %w", err)
	}
	return nil // one that came after the last listing serves as well
}

// hostMAC returns the hardware address of this node for endpoints of addresses that the
// node claims.
func (p *pass) hostMAC() (string, error) {
	if p.mac == "" {
		p.mac = cmp.Or(p.opts.HostMAC, macOfInterface(p.nodeIPs))
	}
	if p.mac == "" {
		return "", fmt.Errorf("no interface has one of this node's addresses %v, so that its hardware address is not known", p.nodeIPs)
	}
	return p.mac, nil
}

// astray reports whether no tunnel of an overlay network is known to lead to
// an address.
func (p *pass) astray(a netip.Addr) bool {
	return p.terrain.network.Overlay && !p.terrain.network.Provider(a).IsValid() && !slices.Contains(p.nodeIPs, a)
}

// ensureSourceVIPs makes, on an overlay network, the endpoints of the source
// addresses: HNS sends from them only if they are endpoints of this machine.
func (p *pass) ensureSourceVIPs() error {
	if !p.terrain.network.Overlay {
		return nil
	}
	for _, vip := range p.opts.SourceVIPs {
		if _, ok := p.have.endpointAt(vip); ok || !vip.Is4() {
			continue // IPv6 is not balanced there
		}
		mac, err := p.hostMAC()
		if err == nil {
			_, err = p.createEndpoint(Endpoint{Name: sourceVIPName(p.opts.Name), Network: p.terrain.network.ID, Addrs: []netip.Addr{vip}, MAC: mac})
		}
		if err != nil {
			return fmt.Errorf("endpoint of the source VIP %s: %w", vip, err)
		}
	}
	return nil
}

// dropMoved removes own endpoints of addresses that are on another node now, as
// when the pod network of a node that is gone was given to a new one. Their load
// balancers go as well: nothing of them works any more, and they are made anew.
func (p *pass) dropMoved() error {
	network := p.terrain.network
	if !network.Overlay {
		return nil
	}
	for _, id := range sortedKeys(p.have.endpoints) {
		e := p.have.endpoints[id]
		if !p.have.isOwn(e) || !e.Provider.IsValid() {
			continue
		}
		provider := p.terrain.remote("", e.Addrs[0]).Provider
		if !provider.IsValid() || provider == e.Provider {
			continue
		}
		for _, user := range p.have.users(e) {
			if !p.record.owns(user) {
				continue
			}
			p.todo[p.record.made[user].Frontend] = true
			if err := p.deleteBalancer(user); err != nil {
				return err
			}
		}
		if err := p.dropEndpoint(id); err != nil {
			return err
		}
	}
	return nil
}

// dropIdle removes own endpoints that no load balancer uses.
func (p *pass) dropIdle() error {
	for _, id := range sortedKeys(p.have.idle) {
		if err := p.ctx.Err(); err != nil {
			return err
		}
		if err := p.dropEndpoint(id); err != nil {
			return err
		}
	}
	return nil
}

// dropEndpoint deletes an own endpoint. If HNS does not let it go, as when
// somebody else's load balancer has come to use it, the next listing tells
// whether to try again.
func (p *pass) dropEndpoint(id string) error {
	addr := p.have.endpoints[id].Addrs
	err := p.hns.DeleteEndpoint(id)
	if err != nil && !ends(err) && !errors.Is(err, ErrNotFound) {
		// Windows Server 2019 at times refuses once what it then does.
		err = p.hns.DeleteEndpoint(id)
	}
	switch {
	case ends(err):
		return fmt.Errorf("delete endpoint %s, %v: %w", id, addr, err)
	case err != nil && !errors.Is(err, ErrNotFound):
		p.log.Error(err, "An endpoint that is not used cannot be deleted, will try again later", "endpoint", id, "addresses", addr)
		delete(p.have.idle, id)
	default:
		p.log.V(4).Info("Deleted endpoint", "addresses", addr, "id", id)
		p.have.removeEndpoint(id)
	}
	return nil
}
