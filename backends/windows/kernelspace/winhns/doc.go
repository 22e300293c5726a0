// SPDX-License-Identifier: Apache-2.0

// Package winhns is the Host Networking Service of Windows, by its Host Compute
// Network API (hcsshim's package hcn). On other systems it is empty, so that what
// imports it is for Windows only.
package winhns
