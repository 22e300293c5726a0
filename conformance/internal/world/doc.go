// SPDX-License-Identifier: Apache-2.0

// Package world is a set of network namespaces for tests of service proxies.
//
//	         client
//	            |
//	          router --- node2 --- pods d, e
//	            |
//	beyond --- node --- pods a, b, c
//
// The proxy runs on the host named node. The router sends all service traffic to this
// host, which routes unknown destinations to the host named beyond. The host beyond has
// all addresses of services, so it answers the traffic that the proxy does not handle.
// All networks have IPv4 and IPv6. The namespaces have no names. When the process that
// created them ends, the kernel removes them.
package world
