// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/kpng-project/kpng/backends/nodeaddr"
	"k8s.io/utils/clock"
)

// Options are a Backend's settings. The zero value needs no privileges.
type Options struct {
	// Addresses makes the addresses of services local to this host. Default nil: only
	// addresses that are already local work.
	Addresses Addresses
	// Sockets opens the listening sockets. Default: the host's sockets.
	Sockets Sockets
	// NodeAddresses provides the addresses of node ports. Default nil: the machine's
	// addresses that NodePorts selects. The backend follows changes of these addresses.
	NodeAddresses nodeaddr.Source
	// NodePorts selects addresses of the machine if NodeAddresses is nil.
	// Default: the primary ones.
	NodePorts nodeaddr.Selection
	// ExcludeInterfaces are names of interfaces whose addresses NodePorts does not select,
	// because Addresses adds addresses of services there. Default: none.
	ExcludeInterfaces []string
	// PodCIDRs contain the addresses of this node's pods, or of all pods if those cannot be
	// distinguished. Traffic from them counts as starting on this node, like traffic from
	// the node's own addresses. At external frontends with externalTrafficPolicy Local, such
	// traffic may use endpoints on any node. Default: none.
	PodCIDRs []netip.Prefix

	// DialTimeouts are the time limits for the first, second and later attempts to connect
	// to an endpoint. The attempts use different endpoints as far as possible. Default 250
	// ms, 500 ms, 1 s, 2 s.
	DialTimeouts []time.Duration
	// DrainTimeout is how long TCP connections may continue after their frontend was deleted
	// or the backend began to stop. Then they are reset. When the backend stops, a shorter
	// sink.Options.StopTimeout applies. Default 30 s.
	DrainTimeout time.Duration
	// HalfClosedTimeout is how long a TCP connection may be idle after one side has closed
	// its direction. Then it is reset. Default 1 h, the default of kube-proxy's
	// --conntrack-tcp-timeout-close-wait.
	HalfClosedTimeout time.Duration
	// UDPTimeout is how long an idle UDP client keeps its endpoint. Default 60 s.
	UDPTimeout time.Duration
	// MaxUDPClients limits the number of UDP clients. Each client needs a socket with an
	// ephemeral port, of which a host has 28,232 on Linux and 16,384 on Windows. Another
	// limit is half the number of file descriptors. When a limit is reached, the service
	// with the most clients loses those that have been idle longest. Default 8,192.
	MaxUDPClients int

	// Clock measures the timeouts of UDP clients and affinity. Default: the real clock.
	Clock clock.WithTicker
}

func (o *Options) complete() error {
	if len(o.DialTimeouts) == 0 {
		o.DialTimeouts = []time.Duration{250 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second}
	}
	if slices.ContainsFunc(o.DialTimeouts, func(d time.Duration) bool { return d <= 0 }) {
		return fmt.Errorf("dial timeouts %v: all must be positive", o.DialTimeouts)
	}
	for _, d := range []struct {
		name  string
		value *time.Duration
		def   time.Duration
	}{{"drain timeout", &o.DrainTimeout, 30 * time.Second}, {"timeout of half-closed connections", &o.HalfClosedTimeout, time.Hour}, {"UDP timeout", &o.UDPTimeout, time.Minute}} {
		if *d.value < 0 {
			return fmt.Errorf("%s %v: negative", d.name, *d.value)
		}
		if *d.value == 0 {
			*d.value = d.def
		}
	}
	if o.MaxUDPClients < 0 {
		return fmt.Errorf("maximum of %d UDP clients: negative", o.MaxUDPClients)
	}
	if o.MaxUDPClients == 0 {
		o.MaxUDPClients = 8192
	}
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	if o.Sockets == nil {
		o.Sockets = hostSockets{anyAddress: o.Addresses != nil}
	}
	return nil
}
