// SPDX-License-Identifier: Apache-2.0

package healthcheck

import (
	"context"
	"net"
	"net/netip"

	"k8s.io/utils/clock"
)

// NewServer is New with a function that opens listeners, and with a clock or nil.
func NewServer(opts Options, listen func(context.Context, netip.AddrPort) (net.Listener, error), clock clock.Clock) *server {
	opts.listen, opts.clock = listen, clock
	return New(opts).(*server)
}
