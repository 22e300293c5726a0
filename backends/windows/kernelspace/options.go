// SPDX-License-Identifier: Apache-2.0

package kernelspace

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
)

// Options are a backend's settings.
type Options struct {
	// Network is the name of the HNS network of the pods. Required. It need not exist when
	// the backend starts: the network plug-in may create it later.
	Network string
	// Name identifies this backend: the names of its endpoints begin with it. Two backends
	// on one machine need different names. Default: "kpng".
	Name string
	// StateFile is a file that records which load balancers the backend created, because HNS
	// stores no owner. Without a file, Cleanup removes no load balancers, and a restarted
	// backend does not remove load balancers of services that were deleted while it did not
	// run. Backends with different names need different files. Default: none.
	StateFile string

	// EnableDSR enables direct server return for cluster IPs. The backend does not start if
	// this version of Windows lacks the feature. If Windows has the feature, frontends with
	// externalTrafficPolicy Local use it even without EnableDSR. Default: false.
	EnableDSR bool
	// SourceVIPs are the source addresses for forwarded packets, at most one per family. An
	// overlay network requires an IPv4 address, which must be an unused address of the pod
	// network. Default on other networks: the node's addresses.
	SourceVIPs []netip.Addr
	// NodeIPs are this node's addresses. Default: the addresses in its Node object.
	NodeIPs []netip.Addr
	// HostMAC is this node's hardware address, in the form "00-15-5d-01-02-03". On an
	// overlay network, the endpoints for source VIPs and cluster IPs get this hardware
	// address. Default: the hardware address of the interface that has the node's IP
	// address.
	HostMAC string

	// MaxLoadBalancers limits the load balancers of one service: one for each of its
	// frontends. Those for forwarded health checks do not count. Each takes HNS several
	// milliseconds, and other services wait meanwhile. Sync refuses a service that needs
	// more: it returns an error for this service, and the service keeps its last load
	// balancers. Default: 1,024.
	MaxLoadBalancers int

	// ForwardHealthChecks makes this node receive health checks that are sent to a service's
	// load-balancer addresses. It applies to the port HealthCheckNodePort of the service or,
	// if that is 0, to HealthzPort. If both are 0, this node receives no such health checks.
	// Default: false.
	ForwardHealthChecks bool
	HealthzPort         uint16
	// RootEndpoint is the name of this node's HNS endpoint, which ForwardHealthChecks uses.
	// Default: "cbr0".
	RootEndpoint string

	// Observer receives reports of the backend's work.
	Observer Observer
}

func (o *Options) check() error {
	if o.Network == "" {
		return errors.New("kernelspace: Options.Network is required: the name of the HNS network that pods are on")
	}
	if o.MaxLoadBalancers < 0 {
		return fmt.Errorf("kernelspace: Options.MaxLoadBalancers is %d: negative", o.MaxLoadBalancers)
	}
	if len(o.SourceVIPs) > 2 || len(o.SourceVIPs) == 2 && o.SourceVIPs[0].Is4() == o.SourceVIPs[1].Is4() {
		return errors.New("kernelspace: Options.SourceVIPs has more than one address of a family")
	}
	return nil
}

// macOfInterface returns the hardware address of an interface that has one of these IP
// addresses. It returns "" if there is no such interface.
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
			return strings.ReplaceAll(i.HardwareAddr.String(), ":", "-") // the form that HNS uses
		}
	}
	return ""
}
