// SPDX-License-Identifier: Apache-2.0

// Package nodeproxy runs kpng in place of kube-proxy: the command, with the
// capability of its DaemonSet and no other, on a node made of network namespaces,
// fed by a real API server and tried with packets. It needs root.
package nodeproxy
