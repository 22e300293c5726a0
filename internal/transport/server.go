// SPDX-License-Identifier: Apache-2.0

package transport

import "time"

// The defaults of the limits in remote.ServerOptions, and of the flags of kpng to-api.
const (
	DefaultMaxConnections        = 20_000
	DefaultMaxConnectionsPerPeer = 256
	DefaultMaxStreamsPerPeer     = 32
	DefaultStreamRate            = 20.0
	DefaultSendTimeout           = 30 * time.Second
	DefaultConnectionAge         = 30 * time.Minute
	DefaultCacheBytes            = 64 << 20
)

// Stats are statistics of a remote.Server.
type Stats struct {
	// Streams is the number of open streams.
	Streams int
	// Views counts the computed views. Values counts the services and endpoints that were
	// marshalled for views.
	Views, Values uint64
	// Bytes counts the bytes of sent messages, without framing and TLS.
	Bytes uint64
	// Refused counts the connections and streams that were refused because of a limit.
	// LastRefused is the time of the last refusal, and Refusal is its reason.
	Refused     uint64
	LastRefused time.Time
	Refusal     string
	// Stalled counts the connections and streams that ended because their client read too
	// slowly.
	Stalled uint64
}
