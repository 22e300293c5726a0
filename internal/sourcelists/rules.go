// SPDX-License-Identifier: Apache-2.0

//go:build linux

package sourcelists

import (
	"fmt"

	"github.com/google/nftables/expr"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/nftrule"
)

// SetName returns the name of the set with the ranges of a family.
func SetName(family api.Family) string { return fmt.Sprintf("sources%d", family) }

// ChainName returns the name of the chain that looks up the ranges of a family.
func ChainName(family api.Family) string { return SetName(family) }

// Lengths are lengths of prefixes of one family. The zero value has none.
type Lengths [129]bool

// Counts counts ranges of the kernel by family and prefix length. It has no zero counts.
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

// Lengths returns the prefix lengths of a family.
func (c Counts) Lengths(family api.Family) (lengths Lengths) {
	for of := range c {
		if of.family == family {
			lengths[of.bits] = true
		}
	}
	return lengths
}

// Rules returns the rules of the chain ChainName. The chain admits a packet if its priority
// is the number of a list that has the source of the packet. Each rule looks for ranges of
// one length.
//
// The chain must be called from a chain of type filter, and only after a rule has set the
// priority. A packet that the chain does not admit must be dropped. If the chain lacks the
// rule of a length, it admits no packet by a range of this length.
func (l *Lengths) Rules(family api.Family) (rules [][]expr.Any) {
	for n := 8 * nftrule.AddrLen(family); n > 0; n-- {
		if !l[n] {
			continue
		}
		key := nftrule.NewKey(family).Meta(expr.MetaKeyPRIORITY).Masked(nftrule.Native(^uint32(lengthMask) | uint32(n))).Source()
		if n < 8*nftrule.AddrLen(family) {
			key.Masked(nftrule.PrefixMask(family, n))
		}
		rules = append(rules, key.FollowedBy(
			&expr.Lookup{SourceRegister: nftrule.Reg(0), SetName: SetName(family)},
			&expr.Immediate{Register: nftrule.Reg(0), Data: nftrule.Native(0)}, nftrule.SetMeta(expr.MetaKeyPRIORITY),
			&expr.Verdict{Kind: expr.VerdictAccept}))
	}
	return rules
}
