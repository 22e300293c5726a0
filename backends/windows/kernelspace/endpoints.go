// SPDX-License-Identifier: Apache-2.0

package kernelspace

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

// endpoints returns the IDs of a policy's endpoints, and an error that names
// those that there are not. Remote ones are made.
func (p *pass) endpoints(policy *policy) (ids []string, lacking error) {
	var errs []error
	for _, d := range policy.endpoints {
		id, err := p.endpoint(d)
		if ends(err) {
			return nil, err
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("endpoint %s: %w", d.addr, err))
		} else if !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	return ids, errors.Join(errs...)
}

// endpoint returns the ID of the endpoint of an address. Whoever's it is, there
// can only be one.
func (p *pass) endpoint(d destination) (string, error) {
	if id, ok := p.have.endpointAt(d.addr); ok {
		return id, nil
	}
	if d.local || p.astray(d.addr) {
		// A pod, or a node, that came after the last listing.
		if err := p.relist(); err != nil {
			return "", err
		}
		if id, ok := p.have.endpointAt(d.addr); ok {
			return id, nil
		}
	}
	if d.local {
		return "", errors.New("is a pod of this node, and the network plug-in has not made an HNS endpoint for it")
	}
	e := p.terrain.remote(endpointName(p.opts.Name, d.addr), d.addr)
	id, err := p.hns.CreateEndpoint(e)
	if errors.Is(err, ErrExists) && !p.listed {
		if err := p.relist(); err != nil {
			return "", err
		}
		if id, ok := p.have.endpointAt(d.addr); ok {
			return id, nil
		}
	}
	if err != nil {
		p.wrong = true
		return "", fmt.Errorf("create: %w", err)
	}
	p.log.V(4).Info("Created endpoint", "address", d.addr, "id", id)
	e.ID = id
	p.have.addEndpoint(e)
	return id, nil
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
		if _, ok := p.have.endpointAt(vip); ok {
			continue
		}
		mac := p.opts.HostMAC
		if mac == "" {
			mac = macOfInterface(p.nodeIPs)
		}
		if mac == "" {
			return fmt.Errorf("endpoint of the source VIP %s: no interface has one of this node's addresses %v, so that its hardware address is not known", vip, p.nodeIPs)
		}
		e := Endpoint{Name: sourceVIPName(p.opts.Name), Network: p.terrain.network.ID, Addrs: []netip.Addr{vip}, MAC: mac}
		id, err := p.hns.CreateEndpoint(e)
		if err != nil {
			return fmt.Errorf("create the endpoint of the source VIP %s: %w", vip, err)
		}
		e.ID = id
		p.have.addEndpoint(e)
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
		for _, user := range p.have.users(id) {
			frontends := frontendsOf(p.have.balancers[user])
			if len(frontends) != 1 || !p.record.owns(frontends[0], user) {
				continue
			}
			p.todo[frontends[0]] = true
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
