// SPDX-License-Identifier: Apache-2.0

// Package calibration runs the conformance kit against kube-proxy in nftables
// mode, fed by a real API server. Where kube-proxy fails a case, docs/conformance.md
// says why the case is right.
//
//	go test -timeout 30m ./calibration -args -matrix kube-proxy.md
package calibration
