// SPDX-License-Identifier: Apache-2.0

//go:build linux

package sourcelists

import (
	"fmt"
	"maps"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/nft"
	"golang.org/x/sys/unix"
)

// setName returns the name of the set with the ranges of a family.
func setName(family api.Family) string { return fmt.Sprintf("sources%d", family) }

// chainName returns the name of the chain that looks up the ranges of a family.
func chainName(family api.Family) string { return setName(family) }

// Counts has the number of ranges in the kernel by family and prefix length. It has no
// entry for zero ranges.
type Counts map[familyLength]int

type familyLength struct {
	family api.Family
	bits   int
}

// Add adds n to the count of the range with a key.
func (c Counts) Add(family api.Family, key []byte, n int) {
	r, _ := ParseKey(key)
	of := familyLength{family, r.Prefix.Bits()}
	if c[of] += n; c[of] == 0 {
		delete(c, of)
	}
}

// Chains returns the chains that admit packets by source. They admit a packet if its
// priority is the number of a list, and this list has the packet's source. Each rule looks
// for ranges of one length. If a chain lacks the rule of a length, it admits no packet by a
// range of this length.
func (c Counts) Chains() (chains nft.Chains) {
	for _, family := range nft.Families {
		var rules []nft.Rule
		for n := 8 * nft.AddrLen(family); n > 0; n-- {
			if c[familyLength{family, n}] == 0 {
				continue
			}
			key := nft.NewKey(family).Meta(unix.NFT_META_PRIORITY).Masked(nft.Native(^uint32(lengthMask) | uint32(n))).Source()
			if n < 8*nft.AddrLen(family) {
				key.Masked(nft.PrefixMask(family, n))
			}
			rules = append(rules, key.Then(nft.InSet(setName(family))+nft.SetPriority(0)+nft.Accept))
		}
		chains.Add(chainName(family), rules...)
	}
	return chains
}

// Changed returns the new chains that differ from the old ones. The arguments are the counts
// before and after a change.
func Changed(before, after Counts) nft.Chains {
	if maps.EqualFunc(before, after, func(int, int) bool { return true }) {
		return nil // the lengths are the same
	}
	old := before.Chains()
	return slices.DeleteFunc(after.Chains(), func(c nft.Chain) bool {
		return slices.ContainsFunc(old, func(o nft.Chain) bool { return o.Name == c.Name && slices.Equal(o.Rules, c.Rules) })
	})
}

// Restrict returns the rule for packets of frontends with source ranges. The map leads from
// the key of a frontend to the number of its list.
func Restrict(family api.Family, key *nft.Key, m string) nft.Rule {
	return key.Then(nft.Lookup(m) + nft.SetMeta(unix.NFT_META_PRIORITY) + nft.GoTo(admitChain(family)))
}

// admitChain returns the name of the chain that drops packets if no range admits them.
func admitChain(family api.Family) string { return fmt.Sprintf("service-sources%d", family) }

// AddChains adds chains that apply rules of Restrict to new connections. The table must also
// have the chains of Counts.
//
// Source ranges must not depend on the nat chains of other programs. If one of these
// chains translates a packet, the kernel skips the later chains. So chains of type filter
// apply source ranges, before any translation.
func AddChains(chains *nft.Chains, restrict ...nft.Rule) {
	// With this priority, the chains come before all chains of type nat, as in
	// kube-proxy.
	const priority = -110
	for _, family := range nft.Families {
		chains.Add(admitChain(family), nft.Jump(chainName(family)), nft.Drop)
	}
	chains.Add("restricted", restrict...)
	isNew := nft.InState(nft.StateNew) + nft.Jump("restricted")
	chains.AddBase("sources-prerouting", nft.Filter(unix.NF_INET_PRE_ROUTING, priority), isNew)
	chains.AddBase("sources-output", nft.Filter(unix.NF_INET_LOCAL_OUT, priority), isNew)
}
