// SPDX-License-Identifier: Apache-2.0

// Package localv1 defines the messages for one node's view. A server sends them to
// backends in other processes. The package also converts them to and from types of
// package api.
//
// docs/reference/wire.md describes the protocol. The conversion preserves everything that
// a backend sees. The messages contain no trigger times (api.EndpointSlice.TriggerTime).
//
// hack/generate generates the code of the messages.
package localv1
