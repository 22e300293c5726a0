// SPDX-License-Identifier: Apache-2.0

// Package calibration runs the conformance kit against kube-proxy in nftables mode with a
// real API server. If kube-proxy fails a case, docs/conformance.md explains why the case
// is nevertheless correct.
//
//	go test -timeout 30m ./calibration -args -matrix kube-proxy.md
package calibration
