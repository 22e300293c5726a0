// SPDX-License-Identifier: Apache-2.0

// Package nodeproxy runs kpng in place of kube-proxy: the command, with only the
// capability of its DaemonSet, on a node made of network namespaces, with a real API
// server and real packets. It needs root.
package nodeproxy
