// SPDX-License-Identifier: Apache-2.0

package watcher

import (
	"fmt"
	"maps"

	"github.com/kpng-project/kpng/api"
	corev1 "k8s.io/api/core/v1"
)

// Node converts n. It returns nil if n is nil.
func (c *Converter) Node(n *corev1.Node) (*api.Node, []error) {
	if n == nil {
		return nil, nil
	}
	var r report
	out := &api.Node{
		Name:     n.Name,
		UID:      n.UID,
		Labels:   maps.Clone(n.Labels),
		Deleting: n.DeletionTimestamp != nil,
	}
	for i := range n.Status.Addresses {
		a := &n.Status.Addresses[i]
		if a.Type != corev1.NodeInternalIP && a.Type != corev1.NodeExternalIP {
			continue
		}
		ip, ok := parseAddr(a.Address)
		if !ok {
			r.add(fmt.Sprintf("status.addresses[%d].address", i), "%q is not an IP address", a.Address)
			continue
		}
		out.Addresses = append(out.Addresses, api.NodeAddress{Type: string(a.Type), IP: ip})
	}
	cidrs := n.Spec.PodCIDRs
	if len(cidrs) == 0 && n.Spec.PodCIDR != "" {
		cidrs = []string{n.Spec.PodCIDR} // the API server would copy podCIDR to podCIDRs
	}
	for i, text := range cidrs {
		p, ok := parsePrefix(text)
		if !ok {
			r.add(fmt.Sprintf("spec.podCIDRs[%d]", i), "%q is not a CIDR", text)
			continue
		}
		out.PodCIDRs = append(out.PodCIDRs, p)
	}
	for _, t := range n.Spec.Taints {
		out.Taints = append(out.Taints, api.Taint{Key: t.Key, Value: t.Value, Effect: string(t.Effect)})
	}
	return out, r.done()
}
