// SPDX-License-Identifier: Apache-2.0

// Package userspace adapts the userspace proxy (backends/userspace) to Windows. It adds
// the addresses of services to a network interface.
//
//	addresses, err := windows.New(windows.Options{})
//	…
//	b, err := userspace.New(userspace.Options{Addresses: addresses})
//
// Each address has the prefix length 32 or 128. Windows does not use such an address as
// the source of connections, and removes it at a restart. The package records an address
// in a file before it adds it. So a process after a killed one can use or remove these
// addresses and no others. If the host already has an address, the package uses it and
// does not remove it.
//
// It adds addresses with the IP Helper API, and with netsh if that fails. It detects
// success of netsh by its exit status and by the address itself, not by its output, which
// is in the language of the system.
//
// The package builds on every platform and works on Windows.
package userspace
