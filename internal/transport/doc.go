// SPDX-License-Identifier: Apache-2.0

// Package transport connects clients and servers. It provides addresses, listeners, a
// dialer that reconnects, and mutual TLS with certificate files that may change. It also
// has the defaults of a server's limits, and the statistics of a server.
//
// Plaintext is allowed on loopback addresses and unix sockets. On other addresses,
// plaintext is an error unless the option Insecure allows it.
package transport
