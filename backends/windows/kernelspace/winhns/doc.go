// SPDX-License-Identifier: Apache-2.0

// Package winhns connects package kernelspace with the Host Networking Service of
// Windows. It uses the Host Compute Network API (hcsshim's package hcn). On other systems
// it lacks the type HNS, so programs that use it compile only for Windows.
package winhns
