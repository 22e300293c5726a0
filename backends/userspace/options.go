// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/kpng-project/kpng/node/nodeaddr"
	"k8s.io/utils/clock"
)

// Options are the settings of a Backend. The zero value needs no privileges.
type Options struct {
	// Addresses makes the addresses of services local to this host. Default: none, so that
	// only addresses that are already local work.
	Addresses Addresses
	// Sockets opens the listening sockets. Default: sockets of the host.
	Sockets Sockets
	// NodeAddresses provides the addresses at which node ports are reachable. If these
	// addresses change, the backend listens at the new ones. Default: those addresses of the
	// machine that NodePorts selects.
	NodeAddresses nodeaddr.Source
	// NodePorts selects addresses of the machine if NodeAddresses is nil.
	// Default: the primary addresses.
	NodePorts nodeaddr.Selection
	// ExcludeInterfaces are names of interfaces whose addresses NodePorts does not select.
	// Include each interface to which the option Addresses adds addresses. Default: none.
	ExcludeInterfaces []string
	// PodCIDRs contain the addresses of pods, if possible only those of this node's pods.
	// Traffic from them counts as starting on this node, like traffic from the node's own
	// addresses. At external frontends with externalTrafficPolicy Local, such traffic may
	// use endpoints on any node. Default: none.
	PodCIDRs []netip.Prefix

	// MaxListeners limits the listeners of one service, one for each address and port. Sync
	// refuses a service that would need more: it returns an error for this service, and the
	// service keeps its last state. A service also may not have more than a quarter of the
	// listeners that other services leave. All listeners together use at most three quarters
	// of the file descriptors. A listener takes about 10 KB of memory. Default: 4,096.
	MaxListeners int

	// DialTimeouts are the time limits of the first and later attempts to connect to an
	// endpoint. Each attempt uses another endpoint, if there is one. Default: 250 ms, 500
	// ms, 1 s, 2 s.
	DialTimeouts []time.Duration
	// DrainTimeout is how long TCP connections may continue after their frontend was deleted
	// or the backend began to stop. Then the backend resets these connections. Default: 30 s.
	DrainTimeout time.Duration
	// HalfClosedTimeout is how long a TCP connection may be idle after one side has closed
	// its direction. Then it is reset. Default: 1 h, as for kube-proxy's flag
	// --conntrack-tcp-timeout-close-wait.
	HalfClosedTimeout time.Duration
	// UDPTimeout is how long an idle UDP client keeps its endpoint. Default: 60 s.
	UDPTimeout time.Duration
	// MaxUDPClients limits the number of UDP clients. Half the number of file descriptors is
	// also a limit. When a limit is reached, the backend removes the longest idle clients of
	// the service that has the most clients. Each client needs an ephemeral port. A host has
	// 28,232 ephemeral ports on Linux and 16,384 on Windows. Default: 8,192.
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
	if o.MaxListeners < 0 {
		return fmt.Errorf("maximum of %d listeners: negative", o.MaxListeners)
	}
	if o.MaxListeners == 0 {
		o.MaxListeners = 4096
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
