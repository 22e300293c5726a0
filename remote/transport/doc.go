// SPDX-License-Identifier: Apache-2.0

// Package transport is how the two ends of a wire reach each other: addresses,
// listeners, mutual TLS from files that may change, and a client that comes back
// for as long as it takes.
//
// Plaintext is for loopback and unix sockets. Elsewhere it is refused, unless the
// user says that it is what he wants.
package transport
