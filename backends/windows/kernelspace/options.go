// SPDX-License-Identifier: Apache-2.0

package kernelspace

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
)

// Options are a backend's settings.
type Options struct {
	// HNS is the Host Networking Service. It is required.
	HNS HNS
	// Network is the name of the HNS network that pods are on. It is required.
	// It need not exist when the backend starts: the network plug-in may come
	// later.
	Network string
	// Name tells what this backend made from what others did: its endpoints begin
	// with it. Two backends on one machine need two names. Default: "kpng".
	Name string
	// StateFile is where the backend remembers which load balancers it made, which
	// HNS does not. Without it, load balancers of services that are deleted while
	// no backend runs are left behind, and Cleanup removes none. Backends of
	// different names need different files. Default: none.
	StateFile string

	// EnableDSR asks for direct server return for cluster IPs. Where Windows lacks it,
	// the backend does not start. Default: false. Frontends with externalTrafficPolicy
	// Local have it wherever Windows does.
	EnableDSR bool
	// SourceVIPs are the source addresses of what load balancers send on, at most
	// one a family. An overlay network needs one of IPv4: an address of the pod network
	// that no pod has. Default: on other networks, the node's addresses.
	SourceVIPs []netip.Addr
	// NodeIPs are this node's addresses. Default: those of its Node object.
	NodeIPs []netip.Addr
	// HostMAC is the hardware address, as in "00-15-5d-01-02-03", for the endpoints of
	// source VIPs and cluster IPs on an overlay network. Default: that of the interface that has
	// the node's address.
	HostMAC string

	// ForwardHealthChecks has load balancers, for each load-balancer address of a service,
	// forward health checks to this node: to the service's health-check node port, or, of
	// services without one, to HealthzPort unless that is 0. Default: false.
	ForwardHealthChecks bool
	HealthzPort         uint16
	// RootEndpoint is the name of the HNS endpoint through which this node itself is
	// reached, for ForwardHealthChecks. Default: "cbr0".
	RootEndpoint string

	// Observer is told what the backend does.
	Observer Observer
}

func (o *Options) check() error {
	if o.HNS == nil {
		return errors.New("kernelspace: Options.HNS is required")
	}
	if o.Network == "" {
		return errors.New("kernelspace: Options.Network is required: the name of the HNS network that pods are on")
	}
	if len(o.SourceVIPs) > 2 || len(o.SourceVIPs) == 2 && o.SourceVIPs[0].Is4() == o.SourceVIPs[1].Is4() {
		return errors.New("kernelspace: Options.SourceVIPs has more than one address of a family")
	}
	return nil
}

// macOfInterface returns the hardware address of the interface that has one of
// these addresses, "" if there is none.
func macOfInterface(addrs []netip.Addr) string {
	interfaces, err := net.Interfaces()
	if err != nil {
		return ""
	}
	for _, i := range interfaces {
		has, err := i.Addrs()
		if err != nil || len(i.HardwareAddr) == 0 {
			continue
		}
		if slices.ContainsFunc(has, func(a net.Addr) bool {
			prefix, err := netip.ParsePrefix(a.String())
			return err == nil && slices.Contains(addrs, prefix.Addr())
		}) {
			return strings.ReplaceAll(i.HardwareAddr.String(), ":", "-") // as HNS writes it
		}
	}
	return ""
}
