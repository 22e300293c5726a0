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

// Options are a Backend's settings. The zero value serves what can be served
// without a privilege.
type Options struct {
	// Addresses makes the addresses of services local to this host. Default nil:
	// they have to be local already.
	Addresses Addresses
	// Sockets opens the sockets to listen with. Default: the host's.
	Sockets Sockets
	// NodeAddresses has the addresses at which node ports are served. Default
	// nil: those of the machine that NodePorts selects, followed.
	NodeAddresses nodeaddr.Source
	// NodePorts selects addresses of the machine if NodeAddresses is nil.
	// Default: the primary ones.
	NodePorts nodeaddr.Selection
	// ExcludeInterfaces are the names of interfaces whose addresses NodePorts does
	// not select, as it is there that Addresses puts those of services. Default:
	// none.
	ExcludeInterfaces []string
	// PodCIDRs hold the addresses of this node's pods, or of all pods where those
	// are not told apart: traffic from them counts as starting on this node,
	// besides what comes from the node's own addresses. That to an external frontend
	// with externalTrafficPolicy Local may then use endpoints anywhere. Default: none.
	PodCIDRs []netip.Prefix

	// DialTimeouts are how long the endpoints of one TCP connection have to
	// accept it: the first, the second, and so on, each a different one as long
	// as there are any. Default 250 ms, 500 ms, 1 s, 2 s.
	DialTimeouts []time.Duration
	// DrainTimeout is how long TCP connections may go on after their frontend has
	// gone, be it that the service was deleted or that the backend stops, unless
	// sink.Options.StopTimeout is shorter. Then they are reset. Default 30 s.
	DrainTimeout time.Duration
	// HalfClosedTimeout is how long a TCP connection may be idle after one side has
	// ended its direction. Then it is reset. Default 1 h, which is the default of
	// kube-proxy's --conntrack-tcp-timeout-close-wait.
	HalfClosedTimeout time.Duration
	// UDPTimeout is how long a UDP client that neither sends nor is sent
	// anything keeps its endpoint. Default 60 s.
	UDPTimeout time.Duration
	// MaxUDPClients is how many UDP clients there are at most, each with a
	// socket of its own, and so with one of the ports that the host has for all
	// its clients: 28,232 on Linux, 16,384 on Windows. There are no more than half as many
	// as file descriptors. Above that, or when one of these runs out, those of the
	// service with the most clients that were silent longest lose theirs. Default 8,192.
	MaxUDPClients int

	// Clock is what time-outs of UDP clients and of affinity are measured with.
	// Default: the real one.
	Clock clock.WithTicker
}

func (o *Options) complete() error {
	if len(o.DialTimeouts) == 0 {
		o.DialTimeouts = []time.Duration{250 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second}
	}
	if slices.ContainsFunc(o.DialTimeouts, func(d time.Duration) bool { return d <= 0 }) {
		return fmt.Errorf("dial timeouts %v: one is not positive", o.DialTimeouts)
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
		return fmt.Errorf("at most %d UDP clients: negative", o.MaxUDPClients)
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
