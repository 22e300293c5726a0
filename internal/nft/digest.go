// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nft

import (
	"cmp"
	"encoding/binary"
	"hash/maphash"
	"slices"

	"github.com/kpng-project/kpng/internal/netfilter"
	"golang.org/x/sys/unix"
)

// Digest summarizes the hook and the rules of a chain. If two digests are equal, the
// chains are equal. Only digests of the same process are comparable.
type Digest struct {
	// Rules is the number of rules.
	Rules int
	sum   uint64
}

var seed = maphash.MakeSeed()

// Digest returns the digest of the chain.
func (c Chain) Digest() Digest {
	d := Digest{sum: maphash.Comparable(seed, c.Hook)}
	for _, rule := range c.Rules {
		d.add([]byte(rule))
	}
	return d
}

func (d *Digest) add(rule []byte) {
	d.Rules++
	d.sum = d.sum*31 + maphash.Bytes(seed, canonical(rule))
}

// canonical returns the normal form of an encoded rule. The kernel lists a rule with
// reordered attributes and with additional default values. The listed rule and the rule
// that was sent have the same normal form.
func canonical(rule []byte) (b []byte) {
	for _, expression := range netfilter.Attributes(rule) {
		name := netfilter.String(netfilter.Attribute(expression, unix.NFTA_EXPR_NAME))
		b = append(append(b, name...), 0)
		b = appendCanonical(b, name, netfilter.Attribute(expression, unix.NFTA_EXPR_DATA))
	}
	return b
}

// nestedAttributes has the attributes that contain other attributes. The first key is the
// name of an expression, and the second key is the number of its attribute. The value is
// a name for the contained attributes, for example "data". This name can again be a first
// key.
var nestedAttributes = map[string]map[uint16]string{
	"cmp":       {unix.NFTA_CMP_DATA: "data"},
	"immediate": {unix.NFTA_IMMEDIATE_DATA: "data"},
	"bitwise":   {unix.NFTA_BITWISE_MASK: "data", unix.NFTA_BITWISE_XOR: "data"},
	"data":      {unix.NFTA_DATA_VERDICT: "verdict"},
}

func appendCanonical(b []byte, of string, data []byte) []byte {
	type attribute struct {
		number uint16
		v      []byte
	}
	var attributes []attribute
	for number, v := range netfilter.Attributes(data) {
		if inner, ok := nestedAttributes[of][number]; ok {
			v = appendCanonical(nil, inner, v)
		} else if of == "nat" && number == unix.NFTA_NAT_FLAGS {
			// Newer kernels set two additional NAT flags. The normal form omits them.
			v = binary.BigEndian.AppendUint32(nil, netfilter.Uint32(v)&^3)
		}
		if isZero := !slices.ContainsFunc(v, func(c byte) bool { return c != 0 }); !isZero {
			attributes = append(attributes, attribute{number, v})
		}
	}
	slices.SortFunc(attributes, func(a, b attribute) int { return cmp.Compare(a.number, b.number) })
	for _, a := range attributes {
		b = binary.NativeEndian.AppendUint16(b, a.number)
		b = binary.NativeEndian.AppendUint16(b, uint16(len(a.v)))
		b = append(b, a.v...)
	}
	return b
}
