// SPDX-License-Identifier: Apache-2.0

package localv1

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/plain"
	"k8s.io/apimachinery/pkg/types"
)

// FromNode returns the wire form of n.
func FromNode(n *api.Node) *Node {
	var addresses []*NodeAddress
	for _, a := range n.Addresses {
		if a.IP.IsValid() { // omit invalid addresses, because the receiver would reject the whole node
			addresses = append(addresses, &NodeAddress{Type: a.Type, IP: a.IP.String()})
		}
	}
	return &Node{
		Name:      n.Name,
		UID:       string(n.UID),
		Labels:    n.Labels,
		Addresses: addresses,
		PodCIDRs:  convert(n.PodCIDRs, func(p *netip.Prefix) string { return p.String() }),
		Taints: convert(n.Taints, func(t *api.Taint) *Taint {
			return &Taint{Key: t.Key, Value: t.Value, Effect: t.Effect}
		}),
		Deleting: n.Deleting,
	}
}

// ToNode converts x to an api.Node. An error names the field that cannot be read.
func (x *Node) ToNode() (*api.Node, error) {
	n := &api.Node{
		Name:   x.GetName(),
		UID:    types.UID(x.GetUID()),
		Labels: x.GetLabels(),
		Taints: convertPointers(x.GetTaints(), func(t *Taint) api.Taint {
			return api.Taint{Key: t.GetKey(), Value: t.GetValue(), Effect: t.GetEffect()}
		}),
		Deleting: x.GetDeleting(),
	}
	texts := []string{n.Name, string(n.UID)}
	for _, t := range n.Taints {
		texts = append(texts, t.Key, t.Value, t.Effect)
	}
	if err := errors.Join(plain.Check(texts...), plain.CheckMap(n.Labels)); err != nil {
		return nil, fmt.Errorf("node: %w", err)
	}
	for _, a := range x.GetAddresses() {
		if err := plain.Check(a.GetType()); err != nil {
			return nil, fmt.Errorf("node %s: %w", n.Name, err)
		}
		ip, err := netip.ParseAddr(a.GetIP())
		if err != nil {
			return nil, fmt.Errorf("node %s: %w", n.Name, err)
		}
		n.Addresses = append(n.Addresses, api.NodeAddress{Type: a.GetType(), IP: ip})
	}
	var err error
	if n.PodCIDRs, err = toPrefixes(x.GetPodCIDRs()); err != nil {
		return nil, fmt.Errorf("node %s: pod CIDR: %w", n.Name, err)
	}
	return n, nil
}
