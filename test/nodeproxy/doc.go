// SPDX-License-Identifier: Apache-2.0

// Package nodeproxy runs the command kpng in place of kube-proxy, with only the
// capability of its DaemonSet. The node consists of network namespaces. The tests use a
// real API server and real packets. They need root.
package nodeproxy
