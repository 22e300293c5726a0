// SPDX-License-Identifier: Apache-2.0

// Package allip tests examples/all-ip, and the script for kpng-callout that does
// the same, with packets: a node, its pods and a client outside are network
// namespaces, and the services come from a real API server.
//
// It needs root, and ip, nft, iptables, ip6tables, ping and jq.
package allip
