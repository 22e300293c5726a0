// SPDX-License-Identifier: Apache-2.0

// Package world is a small world of network namespaces to test service proxies in.
//
//	         client
//	            |
//	          router --- node2 --- pods d, e
//	            |
//	beyond --- node --- pods a, b, c
//
// Node is where the proxy runs. The router sends it whatever is for a service, and
// it sends everything it does not know to beyond, which has all addresses of
// services: what the proxy leaves alone is answered there. Everything is IPv4 and
// IPv6. The namespaces have no names, and go with the process that made them.
package world
