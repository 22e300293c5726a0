// SPDX-License-Identifier: Apache-2.0

// Package transport connects clients and servers. It contains addresses, listeners,
// mutual TLS with files that may change, and a client that reconnects.
//
// Plaintext is allowed on loopback and unix sockets. On other addresses it is an error
// unless the user allows it.
package transport
