// SPDX-License-Identifier: Apache-2.0

// Package allip sends packets through examples/all-ip, and through the equivalent script
// for kpng-callout. A node, its pods and a client outside are network namespaces. The
// services come from a real API server.
//
// It needs root, and ip, nft, iptables, ip6tables, ping and jq.
package allip
