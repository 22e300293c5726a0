// SPDX-License-Identifier: Apache-2.0

// Package localv1 is the wire form of one node's view. A server sends these messages to
// backends in other processes. The package also converts them from and to package api.
//
// docs/wire.md describes the protocol. The conversion preserves everything that a backend
// sees. The protocol does not transmit api.EndpointSlice.TriggerTime.
//
// hack/generate generates the code of the messages.
package localv1
