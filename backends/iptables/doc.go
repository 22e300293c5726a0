// SPDX-License-Identifier: Apache-2.0

// Package iptables is a sink that programs services into the Linux kernel with iptables,
// like kube-proxy's mode iptables. It is for nodes whose kernel or firewall does not
// allow nftables.
//
//	b, err := iptables.New(iptables.Options{})
//	if err != nil {
//		return err
//	}
//	return kpng.Run(ctx, opts, b)
//
// # From a Sync to the kernel
//
// For each changed service, the file render.go computes the rules of the service's own
// chains, and its entries in the dispatch chains. The files lists.go, sources.go and
// dispatch.go have the chains of endpoints, the sets of source ranges, and the dispatch
// chains. The type ruleset (ruleset.go) has the needed rules and the rules in the kernel.
// The file record.go changes the needed rules. Then commit.go writes one input for
// iptables-restore, with only the changed chains. The file runner.go runs the programs.
//
// # Chains
//
// The names of all chains begin with "KPNG-" and the instance. The chains PREROUTING and
// OUTPUT of tables mangle and nat, and INPUT, FORWARD and OUTPUT of table filter, jump to
// the chain SERVICES of their table. This chain selects a dispatch chain by the low bits
// of the destination address. Therefore a packet passes about 50 rules in a cluster of
// 5,000 services.
//
// In table mangle, the entry of a frontend with source ranges drops packets from other
// sources. In table nat, an entry of a dispatch chain jumps to a chain that selects an
// endpoint at random. If the connection is to be masqueraded, the packet first passes a
// chain that marks it. If a packet is addressed to a frontend and table nat did not
// translate it, table filter rejects or drops the packet.
//
// Chains of endpoints belong to lists of endpoints, and sets of source ranges to lists of
// ranges. All frontends with the same list share them. So the number of rules of a service
// is proportional to the sum of its frontends, endpoints and source ranges.
package iptables
