// SPDX-License-Identifier: Apache-2.0

// Package userspace is what proxying by sockets (backends/userspace) needs of
// Windows: it puts the addresses of services on a network interface.
//
//	addresses, err := windows.New(windows.Options{})
//	…
//	b, err := userspace.New(userspace.Options{Addresses: addresses})
//
// Each is a host address (a prefix of /32 or /128), which Windows does not choose
// as the source of connections and which does not outlast a restart of Windows.
// An address is written to a file before it is added, so that a process that comes
// after one that was killed can use or remove it, and nothing else: an address that
// the host had already is used and left alone.
//
// Addresses are added by the IP Helper API, and by netsh where that fails. Whether netsh
// succeeded is seen from its exit status and from the address itself, never from what it
// prints, which is in the language of the system.
//
// The package builds everywhere, and works on Windows.
package userspace
