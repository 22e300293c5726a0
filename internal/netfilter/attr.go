// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfilter

import (
	"encoding/binary"
	"iter"
	"strings"

	"github.com/kpng-project/kpng/api"
	"golang.org/x/sys/unix"
)

const (
	// attrHeader is the length of an attribute's header.
	attrHeader = 4
	// attrType is the bit mask of an attribute's type. The other bits are flags.
	attrType = 0x3fff
)

// Attributes yields the type, without flags, and the data of each attribute of b. The
// data shares the memory of b. Attributes stops where b is malformed.
func Attributes(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= attrHeader {
			n := int(binary.NativeEndian.Uint16(b))
			if n < attrHeader || n > len(b) {
				return
			}
			if !yield(binary.NativeEndian.Uint16(b[2:])&attrType, b[attrHeader:n]) {
				return
			}
			b = b[min((n+3)&^3, len(b)):]
		}
	}
}

// Attribute returns the data of the first attribute of type attr in b. If there is no
// such attribute, it returns nil.
func Attribute(b []byte, attr uint16) []byte {
	for t, v := range Attributes(b) {
		if t == attr {
			return v
		}
	}
	return nil
}

// Uint32 decodes an attribute that is a number in network byte order. It returns 0 if the
// attribute does not have four octets.
func Uint32(b []byte) uint32 {
	if len(b) != 4 {
		return 0
	}
	return binary.BigEndian.Uint32(b)
}

// String decodes an attribute that is a string. It omits the zero octet at the end.
func String(b []byte) string {
	s, _, _ := strings.Cut(string(b), "\x00")
	return s
}

// Family returns the kernel's number of a family, such as NFPROTO_IPV4.
func Family(family api.Family) byte {
	if family == api.IPv6 {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}
