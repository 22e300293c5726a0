// SPDX-License-Identifier: Apache-2.0

// Package winhns connects package kernelspace with the Host Networking Service of
// Windows. It uses the Host Compute Network API (hcsshim's package hcn). The type HNS
// exists only on Windows, so programs that use it compile only there.
package winhns
