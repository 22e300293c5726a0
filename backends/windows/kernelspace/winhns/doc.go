// SPDX-License-Identifier: Apache-2.0

// Package winhns is the Host Networking Service of Windows, by its Host Compute
// Network API (hcsshim's package hcn). On other systems it has only the table of HNS'
// results, so programs that import it are for Windows only.
package winhns
