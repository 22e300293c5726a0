// SPDX-License-Identifier: Apache-2.0

package hns

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/Microsoft/hcsshim/hcn"
)

func open() (HNS, error) { return service{}, nil }

// service implements [HNS] with the Host Compute Network API. It is usable even before HNS
// runs.
type service struct{}

// wrap wraps an error of HNS. If an error of this package has the same meaning, the
// result wraps it, too.
func wrap(err error) error {
	if err == nil {
		return nil
	}
	meaning := error(nil)
	if hcn.IsNotFoundError(err) { // hcsshim itself creates this error, without an HRESULT
		meaning = ErrNotFound
	}
	for code, m := range results {
		if hcn.CheckErrorWithCode(err, hcn.ErrorCode(code)) {
			meaning = m
		}
	}
	if meaning == nil {
		return err
	}
	return fmt.Errorf("%w: %w", meaning, err)
}

// Features implements [HNS]. It does not use hcn.GetSupportedFeatures, because that
// function caches its first result forever, even if HNS did not run at that time.
func (service) Features() (Features, error) {
	globals, err := hcn.GetGlobals()
	if err != nil {
		return Features{}, wrap(err)
	}
	has := func(ranges hcn.VersionRanges) bool { return inRanges(globals.Version, ranges) }
	if !has(hcn.V2ApiSupport) {
		return Features{}, fmt.Errorf("HNS %d.%d is too old, need 9.2: %w",
			globals.Version.Major, globals.Version.Minor, ErrNotSupported)
	}
	return Features{
		DSR:                has(hcn.DSRVersion),
		DualStack:          has(hcn.IPv6DualStackVersion),
		RemoteSubnet:       has(hcn.RemoteSubnetVersion),
		SessionAffinity:    has(hcn.SessionAffinityVersion),
		ModifyLoadBalancer: has(hcn.ModifyLoadbalancerVersion),
	}, nil
}

func inRanges(v hcn.Version, ranges hcn.VersionRanges) bool {
	less := func(a, b hcn.Version) bool { return a.Major < b.Major || a.Major == b.Major && a.Minor < b.Minor }
	for _, r := range ranges {
		if !less(v, r.MinVersion) && !less(r.MaxVersion, v) {
			return true
		}
	}
	return false
}

// Network implements [HNS].
func (service) Network(name string) (*Network, error) {
	found, err := hcn.GetNetworkByName(name)
	if err != nil {
		return nil, wrap(err)
	}
	n := &Network{ID: found.Id, Name: found.Name, Overlay: found.Type == hcn.Overlay}
	for _, p := range found.Policies {
		if p.Type != hcn.RemoteSubnetRoute {
			continue
		}
		var setting hcn.RemoteSubnetRoutePolicySetting
		if err := json.Unmarshal(p.Settings, &setting); err != nil {
			return nil, fmt.Errorf("read remote subnet of network %s: %w", n.ID, err)
		}
		prefix, err := netip.ParsePrefix(setting.DestinationPrefix)
		if err != nil {
			return nil, fmt.Errorf("read remote subnet of network %s: %w", n.ID, err)
		}
		provider, err := netip.ParseAddr(setting.ProviderAddress)
		if err != nil {
			return nil, fmt.Errorf("read provider of remote subnet %s of network %s: %w", prefix, n.ID, err)
		}
		n.RemoteSubnets = append(n.RemoteSubnets, RemoteSubnet{Prefix: prefix, Provider: provider})
	}
	return n, nil
}

// Endpoints implements [HNS].
func (service) Endpoints(network string) ([]Endpoint, error) {
	listed, err := list(func() ([]hcn.HostComputeEndpoint, error) { return hcn.ListEndpointsOfNetwork(network) })
	if err != nil {
		return nil, err
	}
	all := make([]Endpoint, 0, len(listed))
	for i := range listed {
		// HNS may also list the endpoints of other networks.
		if e := endpoint(&listed[i]); strings.EqualFold(e.Network, network) {
			all = append(all, e)
		}
	}
	return all, nil
}

// LoadBalancers implements [HNS].
func (service) LoadBalancers() ([]LoadBalancer, error) {
	listed, err := list(hcn.ListLoadBalancers)
	if err != nil {
		return nil, err
	}
	all := make([]LoadBalancer, 0, len(listed))
	for i := range listed {
		if lb, ok := balancer(&listed[i]); ok {
			all = append(all, lb)
		}
	}
	return all, nil
}

// list calls f. If an object is deleted during the call, f fails, because
// package hcn first lists the IDs and then reads each object. After such an error, list
// calls f again, at most twice.
func list[T any](f func() ([]T, error)) (all []T, err error) {
	for range 3 {
		all, err = f()
		if err = wrap(err); !errors.Is(err, ErrNotFound) {
			break
		}
	}
	return all, err
}

// CreateEndpoint implements [HNS].
func (service) CreateEndpoint(e Endpoint) (string, error) {
	create := &hcn.HostComputeEndpoint{
		Name:               e.Name,
		HostComputeNetwork: e.Network,
		MacAddress:         e.MAC,
		SchemaVersion:      hcn.V2SchemaVersion(),
	}
	for _, a := range e.Addrs {
		create.IpConfigurations = append(create.IpConfigurations, hcn.IpConfig{IpAddress: a.String()})
	}
	if e.Remote {
		create.Flags = hcn.EndpointFlagsRemoteEndpoint
	}
	if e.Provider.IsValid() {
		setting, err := json.Marshal(hcn.ProviderAddressEndpointPolicySetting{ProviderAddress: e.Provider.String()})
		if err != nil {
			return "", err
		}
		create.Policies = []hcn.EndpointPolicy{{Type: hcn.NetworkProviderAddress, Settings: setting}}
	}
	created, err := create.Create()
	if err != nil {
		return "", wrap(err)
	}
	return strings.ToLower(created.Id), nil
}

// DeleteEndpoint implements [HNS].
func (service) DeleteEndpoint(id string) error {
	return wrap((&hcn.HostComputeEndpoint{Id: id}).Delete())
}

// CreateLoadBalancer implements [HNS].
func (service) CreateLoadBalancer(lb LoadBalancer) (LoadBalancer, error) {
	created, err := hcnBalancer(lb).Create()
	if err != nil {
		return LoadBalancer{}, wrap(err)
	}
	made, _ := balancer(created) // the addresses come from lb, so they are valid
	made.ID = strings.ToLower(created.Id)
	return made, nil
}

// UpdateLoadBalancer implements [HNS].
func (service) UpdateLoadBalancer(lb LoadBalancer) error {
	_, err := hcnBalancer(lb).Update(lb.ID)
	return wrap(err)
}

// DeleteLoadBalancer implements [HNS].
func (service) DeleteLoadBalancer(id string) error {
	return wrap((&hcn.HostComputeLoadBalancer{Id: id}).Delete())
}
