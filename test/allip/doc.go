// SPDX-License-Identifier: Apache-2.0

// Package allip tests two programs with packets: examples/all-ip, and the equivalent
// script for kpng-callout. Network namespaces represent a node, its pods and a client
// outside the node. The services come from a real API server.
//
// The tests need root, and the tools ip, nft, iptables, ip6tables, ping and jq.
package allip
