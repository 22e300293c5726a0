// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendoptions"
	"k8s.io/utils/clock"
)

// Options are the settings of the dataplane. The zero value needs no privileges. Of
// [backends.Options], it supports ClusterCIDRs, NodeAddresses and Stats, and on Linux Instance.
//
// ClusterCIDRs contain the addresses of pods, if possible only those of this node's pods.
// Traffic from them counts as starting on this node, like traffic from the node's own
// addresses.
//
// NodeAddresses may change. Then the dataplane listens at the new addresses. The default
// does not include the addresses that AddAddresses adds.
//
// Instance is the routing protocol number of the routes that AddAddresses adds, from "5" to
// "255". The dataplane treats all local routes with this number as its own. Default: "107".
type Options struct {
	backends.Options

	// OnlyNodePorts makes the dataplane serve node ports only, so that it can run beside a
	// dataplane that serves node ports at other addresses. Default: false.
	OnlyNodePorts bool
	// AddAddresses makes the addresses of services local to this host, while services use
	// them. Each address gets a local route on Linux, which requires CAP_NET_ADMIN. On
	// Windows, the dataplane adds the address to a network interface, which requires an
	// administrator. New refuses the option on other systems. Default: false, so the
	// dataplane listens only at addresses that are already local.
	AddAddresses bool
	// Interface is the name of the network interface to which AddAddresses adds addresses.
	// It is only for Windows. Default: "vEthernet (HNS Internal NIC)".
	Interface string
	// StateFile is the path of a file that records the addresses on the interface. Missing
	// folders in the path are created. Two dataplanes on one host need different files.
	// StateFile is only for Windows. Default: kpng\userspace.journal in the folder
	// %ProgramData%.
	StateFile string

	// MaxListeners limits the listeners of one service, one for each address and port. Sync
	// refuses a service that would need more: it returns an error for this service, and the
	// service keeps its last state. A service also may not have more than a quarter of the
	// listeners that other services leave. All listeners together use at most three quarters
	// of the file descriptors. A listener takes about 10 KB of memory. Default: 4,096.
	MaxListeners int
	// MaxUDPClients limits the number of UDP clients. Half the number of file descriptors is
	// also a limit. When a limit is reached, the dataplane removes the longest idle clients
	// of the service that has the most clients. Each client needs an ephemeral port. A host
	// has 28,232 ephemeral ports on Linux and 16,384 on Windows. Default: 8,192.
	MaxUDPClients int

	// DrainTimeout is how long TCP connections may continue after their frontend was deleted
	// or the dataplane began to stop. Then the dataplane resets these connections. Default:
	// 30 s.
	DrainTimeout time.Duration
	// HalfClosedTimeout is how long a TCP connection may be idle after one side has closed
	// its direction. Then it is reset. Default: 1 h, as for kube-proxy's flag
	// --conntrack-tcp-timeout-close-wait.
	HalfClosedTimeout time.Duration
	// UDPTimeout is how long an idle UDP client keeps its endpoint. Default: 60 s.
	UDPTimeout time.Duration
}

// settings are complete options, and the parts that tests replace.
type settings struct {
	Options
	// The field addresses makes the addresses of services local. Default: none, unless
	// AddAddresses is set.
	addresses addresses
	// sockets opens the listening sockets. Default: sockets of the host.
	sockets sockets
	// clock measures the timeouts of UDP clients and affinity. Default: the real clock.
	clock clock.WithTicker
	// descriptors has the file descriptors that the backend may use, and pipes opens pipes.
	// Default: most descriptors of the process, and pipes of the kernel.
	descriptors *descriptors
	pipes       *pipes
}

// dialTimeouts are the time limits of the first and later attempts to connect to an
// endpoint. Each attempt uses another endpoint, if there is one. With session affinity, each
// attempt has the last limit, because another endpoint would end the session of a client.
var dialTimeouts = [...]time.Duration{250 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second}

// complete checks s and sets the defaults.
func (s *settings) complete() error {
	errs := []error{backendoptions.Complete(&s.Options.Options, false, append(slices.Clone(platformOptions), "ClusterCIDRs", "NodeAddresses", "Stats")...)}
	for name, d := range map[string]*time.Duration{
		"drain timeout": &s.DrainTimeout, "timeout of half-closed connections": &s.HalfClosedTimeout, "UDP timeout": &s.UDPTimeout,
	} {
		if *d < 0 {
			errs = append(errs, fmt.Errorf("%s %v: negative", name, *d))
		}
	}
	for name, n := range map[string]int{"listeners": s.MaxListeners, "UDP clients": s.MaxUDPClients} {
		if n < 0 {
			errs = append(errs, fmt.Errorf("maximum of %d %s: negative", n, name))
		}
	}
	s.DrainTimeout = cmp.Or(s.DrainTimeout, 30*time.Second)
	s.HalfClosedTimeout = cmp.Or(s.HalfClosedTimeout, time.Hour)
	s.UDPTimeout = cmp.Or(s.UDPTimeout, time.Minute)
	s.MaxListeners = cmp.Or(s.MaxListeners, 4096)
	s.MaxUDPClients = cmp.Or(s.MaxUDPClients, 8192)
	if s.addresses == nil {
		var err error
		if s.addresses, err = hostAddresses(&s.Options); err != nil {
			errs = append(errs, fmt.Errorf("make addresses of services local: %w", err))
		}
	}
	if s.clock == nil {
		s.clock = clock.RealClock{}
	}
	if s.descriptors == nil {
		limit := openFilesLimit()
		s.descriptors = newDescriptors(limit - limit/10) // one tenth of the limit is for other purposes
	}
	if s.pipes == nil {
		s.pipes = newPipes()
	}
	if s.sockets == nil {
		s.sockets = hostSockets{anyAddress: s.addresses != nil}
	}
	return errors.Join(errs...)
}
