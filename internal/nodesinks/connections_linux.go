// SPDX-License-Identifier: Apache-2.0

package nodesinks

import (
	"context"

	"github.com/kpng-project/kpng/internal/conntrack"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
)

// connections returns a sink that deletes the connections to removed endpoints if opts
// allow that.
func connections(opts *Options, addrs nodeaddr.Source) sink.Sink {
	if opts.KeepConnections {
		return sink.Func(func(context.Context, *sink.Changes) error { return nil })
	}
	return conntrack.New(conntrack.Options{NodeAddresses: addrs, Observe: opts.Flows})
}
