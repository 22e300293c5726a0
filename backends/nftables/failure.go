// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// failure is what the kernel says of a transaction that it refused: nothing of it
// took effect.
type failure struct {
	errno unix.Errno
	// what says what failed, for people, such as an element.
	what string
}

func (f *failure) Error() string {
	reason := f.errno.Error()
	switch {
	case errors.Is(f.errno, unix.ENFILE):
		reason = "the map is full"
	case errors.Is(f.errno, unix.EPERM):
		reason += " (it takes CAP_NET_ADMIN)"
	}
	if f.what == "" {
		return reason
	}
	return f.what + ": " + reason
}

func (f *failure) Unwrap() error { return f.errno }

// newFailure returns the failure that payload, of a message NLMSG_ERROR, tells of.
// batch holds the messages of the transaction, and seq is which of them failed.
func newFailure(batch []byte, seq uint32, errno unix.Errno, flags uint16, payload []byte) *failure {
	f := &failure{errno: errno}
	for len(batch) > 0 && binary.NativeEndian.Uint32(batch[8:]) != seq {
		batch = batch[binary.NativeEndian.Uint32(batch):]
	}
	if len(batch) == 0 {
		return f
	}
	offset := 0
	if flags&unix.NLM_F_ACK_TLVS != 0 && len(payload) > 20 {
		attributes(payload[20:], func(attr uint16, v []byte) {
			if attr == unix.NLMSGERR_ATTR_OFFS && len(v) >= 4 {
				offset = int(binary.NativeEndian.Uint32(v))
			}
		})
	}
	f.what = describe(batch[:binary.NativeEndian.Uint32(batch)], offset)
	return f
}

// describe says what a message asks for. If it is about elements, that is the one
// which the octet at offset belongs to, or all of them if there is none.
func describe(message []byte, offset int) string {
	const headers = unix.NLMSG_HDRLEN + 4
	if len(message) < headers {
		return ""
	}
	doing := ""
	switch binary.NativeEndian.Uint16(message[4:]) {
	case nftMsg(unix.NFT_MSG_NEWSETELEM):
		doing = "adding "
	case nftMsg(unix.NFT_MSG_DELSETELEM):
		doing = "removing "
	case nftMsg(unix.NFT_MSG_NEWCHAIN), nftMsg(unix.NFT_MSG_NEWRULE):
		doing = "making "
	case nftMsg(unix.NFT_MSG_DELCHAIN), nftMsg(unix.NFT_MSG_DELRULE), nftMsg(unix.NFT_MSG_DELTABLE):
		doing = "deleting "
	default:
		return ""
	}
	switch msgType := binary.NativeEndian.Uint16(message[4:]); msgType {
	case nftMsg(unix.NFT_MSG_NEWSETELEM), nftMsg(unix.NFT_MSG_DELSETELEM):
		return doing + describeElement(message, headers, offset)
	default:
		what := ""
		attributes(message[headers:], func(attr uint16, v []byte) {
			switch attr {
			case unix.NFTA_TABLE_NAME: // of a chain or rule as well
				what = "table " + cString(v)
			case unix.NFTA_RULE_CHAIN:
				if msgType == nftMsg(unix.NFT_MSG_NEWRULE) || msgType == nftMsg(unix.NFT_MSG_DELRULE) {
					what = "rules of chain " + cString(v)
				}
			case unix.NFTA_CHAIN_NAME:
				if msgType == nftMsg(unix.NFT_MSG_NEWCHAIN) || msgType == nftMsg(unix.NFT_MSG_DELCHAIN) {
					what = "chain " + cString(v)
				}
			}
		})
		return doing + what
	}
}

func describeElement(message []byte, headers, offset int) string {
	var name, first, found string
	at := headers
	attributes(message[headers:], func(attr uint16, v []byte) {
		switch attr {
		case unix.NFTA_SET_ELEM_LIST_SET:
			name = cString(v)
		case unix.NFTA_SET_ELEM_LIST_ELEMENTS:
			m, ok := mapNamed(name)
			if !ok {
				return
			}
			begin := at + 4
			attributes(v, func(_ uint16, item []byte) {
				end := begin + 4 + len(item)
				if first == "" || begin <= offset && offset < end {
					e, _ := decodeElement(m, item, map[string]string{})
					if first == "" {
						first = e.String()
					}
					if begin <= offset && offset < end {
						found = e.String()
					}
				}
				begin = (end + 3) &^ 3
			})
		}
		at += (4 + len(v) + 3) &^ 3
	})
	switch {
	case found != "":
		return found
	case first != "":
		return fmt.Sprintf("elements of %s, %s and others", name, first)
	default:
		return "elements of " + name
	}
}

func mapNamed(name string) (mapID, bool) {
	for _, m := range allMaps() {
		if m.name() == name {
			return m, true
		}
	}
	return mapID{}, false
}
