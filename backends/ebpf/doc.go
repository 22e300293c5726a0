// SPDX-License-Identifier: Apache-2.0

// Package ebpf is a sink that balances connections of a node and its pods when sockets
// connect, without network address translation. Programs at hooks of a cgroup replace the
// address of a service by that of an endpoint.
//
// The sink is a layer above another sink. The other sink also programs all services. It
// handles the traffic that the programs of this package do not translate:
//
//	proxy, err := nftables.New(nftables.Options{})
//	if err != nil {
//		return err
//	}
//	b, err := ebpf.New(proxy, ebpf.Options{})
//	if err != nil {
//		return err
//	}
//	return kpng.Run(ctx, opts, b)
//
// Therefore a service that the programs cannot handle still works. docs/operate/ebpf.md
// describes the supported traffic and the maps of the programs.
package ebpf
