// SPDX-License-Identifier: Apache-2.0

// Package ovs proxies services in a bridge of Open vSwitch. It is for programs that own
// such a bridge, such as CNI agents: they send the bridge's IP packets through the tables
// of this package. docs/operate/ovs.md describes the tables.
//
//	backend, err := ovs.New(ovs.Options{Bridge: "br-int", MasqueradeAddresses: gateways})
//	…
//	return kpng.Run(ctx, options, backend)
//
// Each list of endpoints is a select group, which the frontends of a service share.
// Changes are bundles, which the switch executes atomically. Cleanup deletes the flows
// and groups; Stop leaves them, so that traffic continues.
package ovs
