// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nft

import (
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netfilter"
	"golang.org/x/sys/unix"
)

// Set describes a map or set.
type Set struct {
	Name   string
	Flags  uint32
	KeyLen int
	// DataLen is the length of an element's data. It is 0 for sets and for maps of verdicts.
	DataLen           int
	keyType, dataType uint32
	// Size is the maximum number of elements, or 0 for no limit.
	Size uint32
	// Elements is the number of elements, or -1 if the kernel does not report it.
	Elements int
	// The field typeof describes the types of key and data for nft, see the function
	// typeof.
	typeof []byte
}

// NewSet returns a set, or a map if the argument data is not empty. The arguments key and
// data have the types of an element's parts. If an element has several parts, the kernel
// rounds up the length of each part to a multiple of four octets.
func NewSet(name string, flags uint32, key, data []Type) Set {
	s := Set{Name: name, Flags: flags, typeof: typeof(key, data)}
	s.keyType, s.KeyLen = concatenation(key)
	if len(data) > 0 {
		s.Flags |= unix.NFT_SET_MAP
		s.dataType, s.DataLen = concatenation(data)
	}
	return s
}

// HasVerdicts reports whether the data of elements are verdicts.
func (s *Set) HasVerdicts() bool { return s.dataType == TypeVerdict.number }

// SameAs reports whether two sets have the same layout.
func (s *Set) SameAs(o *Set) bool {
	return s.Flags == o.Flags && s.keyType == o.keyType && s.KeyLen == o.KeyLen && s.dataType == o.dataType &&
		(s.DataLen == o.DataLen || s.HasVerdicts())
}

// Type is a data type of nft. It determines how nft prints a value of that type.
type Type struct {
	number uint32
	// Length is the length of a value in octets.
	Length    int
	isInteger bool
}

// These are the types of the keys and data in sets. Rules store the result of a lookup in
// the packet's priority, for the lookup in the next map. So these results have the type
// of the packet priority, a 32-bit integer. TypeInteger is the type of all other
// integers. The kernel identifies both types by the same number, see the function typeof.
var (
	TypeVerdict  = Type{number: unix.NFT_DATA_VERDICT}
	TypeIPv4     = Type{number: 7, Length: 4}
	TypeIPv6     = Type{number: 8, Length: 16}
	TypeProtocol = Type{number: 12, Length: 1}
	TypePort     = Type{number: 13, Length: 2}
	TypePriority = Type{number: 23, Length: 4}
	TypeInteger  = Type{number: 23, Length: 4, isInteger: true}
)

// TypeAddr returns the type of the addresses of a family.
func TypeAddr(family api.Family) Type {
	if family == api.IPv6 {
		return TypeIPv6
	}
	return TypeIPv4
}

// concatenation returns two properties of the data type that consists of parts: the
// number by which nft identifies it, and the length of a value.
func concatenation(parts []Type) (number uint32, length int) {
	if len(parts) == 1 {
		return parts[0].number, parts[0].Length
	}
	for _, part := range parts {
		number = number<<6 | part.number
		length += (part.Length + 3) &^ 3
	}
	return number, length
}

// byteOrders returns the byte orders of keys and data, encoded as nft stores them with
// each set.
func (s *Set) byteOrders() (encoded []byte) {
	for i, datatype := range []uint32{s.keyType, s.dataType} {
		if datatype == 0 || datatype == unix.NFT_DATA_VERDICT {
			break
		}
		order := uint32(2) // network byte order
		if datatype == TypePriority.number {
			order = 1 // host byte order
		}
		encoded = append(encoded, userdata(byte(i), Native(order))...)
	}
	return encoded
}

// decodeSet decodes a NFT_MSG_NEWSET message.
func decodeSet(attributes []byte) Set {
	number := func(attr uint16) uint32 { return netfilter.Uint32(netfilter.Attribute(attributes, attr)) }
	s := Set{
		Name:  netfilter.String(netfilter.Attribute(attributes, unix.NFTA_SET_NAME)),
		Flags: number(unix.NFTA_SET_FLAGS), Elements: -1,
		keyType: number(unix.NFTA_SET_KEY_TYPE), KeyLen: int(number(unix.NFTA_SET_KEY_LEN)),
		dataType: number(unix.NFTA_SET_DATA_TYPE), DataLen: int(number(unix.NFTA_SET_DATA_LEN)),
	}
	if count := netfilter.Attribute(attributes, nftaSetCount); count != nil {
		s.Elements = int(netfilter.Uint32(count))
	}
	return s
}

// typeof describes the types of a map for nft. If the key has no part of TypeInteger,
// typeof returns nil. Otherwise the map has the type "typeof meta priority . meta length
// : …". In this type, "meta length" stands for TypeInteger, because nft has no name for
// the type of an integer. nft stores the description with the map, and needs it to load
// rules with these maps. Only nft 0.9.8 ignores the description. It uses the numbers that
// the kernel has for the types.
func typeof(key, data []Type) []byte {
	if !slices.Contains(key, TypeInteger) {
		return nil
	}
	return append(userdata(3, typeofExpression(key)), userdata(4, typeofExpression(data))...)
}

// The numbers of nft for expressions, and for the headers and their fields.
const (
	nftPayload, nftMeta, nftConcat     = 7, 9, 13
	nftTransport, nftIPv4, nftIPv6     = 11, 12, 13
	nftDestinationPort                 = 2
	nftDestinationIPv4, nftDestination = 12, 9
)

// typeofExpression encodes an expression with these types as nft stores it.
func typeofExpression(types []Type) []byte {
	number := func(attr byte, v uint32) []byte { return userdata(attr, Native(v)) }
	meta := func(key uint32) []byte { return append(number(0, nftMeta), userdata(1, number(0, key))...) }
	payload := func(header, field uint32) []byte {
		return append(number(0, nftPayload), userdata(1, append(number(0, header), number(1, field)...))...)
	}
	var all [][]byte
	for _, t := range types {
		switch t {
		case TypePriority:
			all = append(all, meta(unix.NFT_META_PRIORITY))
		case TypeInteger:
			all = append(all, meta(unix.NFT_META_LEN))
		case TypeProtocol:
			all = append(all, meta(unix.NFT_META_L4PROTO))
		case TypePort:
			all = append(all, payload(nftTransport, nftDestinationPort))
		case TypeIPv4:
			all = append(all, payload(nftIPv4, nftDestinationIPv4))
		case TypeIPv6:
			all = append(all, payload(nftIPv6, nftDestination))
		}
	}
	if len(all) == 1 {
		return all[0]
	}
	var parts []byte
	for i, e := range all {
		parts = append(parts, userdata(byte(i), e)...)
	}
	return append(number(0, nftConcat), userdata(1, parts)...)
}

// userdata encodes an attribute of the data that nft stores with a set.
func userdata(attr byte, v []byte) []byte { return append([]byte{attr, byte(len(v))}, v...) }
