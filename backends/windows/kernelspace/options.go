// SPDX-License-Identifier: Apache-2.0

package kernelspace

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendoptions"
)

// Options are the settings of the dataplane. Of [backends.Options], it supports Instance,
// NodeAddresses and Observer.
//
// The names of its HNS endpoints begin with Instance or, if Instance is empty, with "kpng".
// Two instances on one machine need different names.
//
// NodeAddresses are this node's addresses, which Sync and Verify read. Default: the
// addresses in its Node object.
//
// The Observer's method Wrote is called after each call that changes an object of HNS, with
// the size 1. Its method Holds gets the numbers of the "endpoints" and "load_balancers"
// that the instance has in HNS, unless these numbers are unknown.
type Options struct {
	backends.Options

	// Network is the name of the HNS network of the pods. Required. The network need not
	// exist when the dataplane starts: the network plug-in may create it later.
	Network string
	// StateFile is a file that records which load balancers the dataplane created, because
	// HNS stores no owner. Without a file, Cleanup removes no load balancers. Load
	// balancers of services that were deleted while the dataplane did not run also stay.
	// Each instance needs a file of its own. Default: none.
	StateFile string

	// EnableDSR enables direct server return for cluster IPs. The dataplane does not start if
	// this version of Windows lacks the feature. If Windows has the feature, frontends with
	// externalTrafficPolicy Local use it even without EnableDSR. Default: false.
	EnableDSR bool
	// SourceVIPs are the source addresses for forwarded packets, at most one per family. An
	// overlay network requires an IPv4 address, which must be an unused address of the pod
	// network. Default on other networks: the node's addresses.
	SourceVIPs []netip.Addr
	// HostMAC is this node's hardware address, in the form "00-15-5d-01-02-03". On an
	// overlay network, the endpoints for source VIPs and cluster IPs get this hardware
	// address. Default: the hardware address of the interface that has the node's IP
	// address.
	HostMAC string

	// MaxLoadBalancers limits the load balancers of one service: one for each of its
	// frontends. Those for forwarded health checks do not count. HNS needs several
	// milliseconds for each load balancer, and other services wait meanwhile. Sync refuses
	// a service that needs more: it returns an error for this service, and the service
	// keeps its last load balancers. Default: 1,024.
	MaxLoadBalancers int

	// RootEndpoint is the name of this node's own HNS endpoint, such as "cbr0". It receives
	// health checks that are sent to a service's load-balancer addresses, at the port
	// HealthCheckNodePort of the service or, if that is 0, at HealthzPort. If both are 0,
	// it receives no such health checks. Default: none; then no health checks are
	// forwarded.
	RootEndpoint string
	HealthzPort  uint16
}

// complete checks o and sets the defaults.
func (o *Options) complete() error {
	if err := backendoptions.Complete(&o.Options, false, "Instance", "NodeAddresses", "Observer"); err != nil {
		return fmt.Errorf("kernelspace: %w", err)
	}
	if o.Network == "" {
		return errors.New("kernelspace: Options.Network is required: the name of the HNS network that pods are on")
	}
	if o.MaxLoadBalancers < 0 {
		return fmt.Errorf("kernelspace: Options.MaxLoadBalancers is %d: negative", o.MaxLoadBalancers)
	}
	if len(o.SourceVIPs) > 2 || len(o.SourceVIPs) == 2 && o.SourceVIPs[0].Is4() == o.SourceVIPs[1].Is4() {
		return errors.New("kernelspace: Options.SourceVIPs has more than one address of a family")
	}
	o.Instance = cmp.Or(o.Instance, "kpng")
	o.MaxLoadBalancers = cmp.Or(o.MaxLoadBalancers, 1024)
	o.Observer = backendoptions.Observe(o.Observer)
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
