// SPDX-License-Identifier: Apache-2.0

// Package nodeproxy tests the program kpng as a replacement for kube-proxy, with only the
// capabilities that its DaemonSets grant. Network namespaces stand for the node, its pods
// and a client. The tests use a real API server and real packets, and need root.
package nodeproxy
