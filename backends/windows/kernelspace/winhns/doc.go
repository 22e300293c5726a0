// SPDX-License-Identifier: Apache-2.0

// Package winhns is the Host Networking Service of Windows. It uses the Host Compute
// Network API (hcsshim's package hcn). On other systems it contains only the table of HNS
// results, so programs that use it are for Windows only.
package winhns
