// SPDX-License-Identifier: Apache-2.0

// Package calibration runs the conformance kit against kube-proxy in nftables mode with a
// real API server. For each case that kube-proxy fails, docs/reference/conformance.md
// explains why the case is correct.
//
//	go test -timeout 30m ./calibration -args -matrix kube-proxy.md
package calibration
