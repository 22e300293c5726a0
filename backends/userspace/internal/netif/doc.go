// SPDX-License-Identifier: Apache-2.0

// Package netif makes the addresses of services local to a Windows host. It adds them to a
// network interface.
//
// The package adds each address with the prefix length 32 or 128. Windows does not use an
// added address as the source of connections, and removes it at a restart. The package
// records each address in a file before it adds the address. So after a crash the next
// process knows which addresses the package added, and can use or remove them. If the
// host already has an address, the package uses it and does not remove it.
//
// To add an address, the package tries the IP Helper API first and then netsh. The output
// of netsh is in the language of the system, so the package ignores it. Instead, it
// checks the exit status of netsh and whether the address exists.
//
// The package compiles on every platform but works only on Windows.
package netif
