// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"fmt"

	"github.com/kpng-project/kpng/backends/internal/netfilter"
	"golang.org/x/sys/unix"
)

// described are the messages that describe describes, other than those about elements: what
// they do, and the attribute that names what they do it to.
var described = map[uint16]struct {
	doing string
	name  uint16
}{
	nftMsg(unix.NFT_MSG_DELTABLE): {"deleting table ", unix.NFTA_TABLE_NAME},
	nftMsg(unix.NFT_MSG_NEWCHAIN): {"making chain ", unix.NFTA_CHAIN_NAME},
	nftMsg(unix.NFT_MSG_DELCHAIN): {"deleting chain ", unix.NFTA_CHAIN_NAME},
	nftMsg(unix.NFT_MSG_NEWRULE):  {"making rules of chain ", unix.NFTA_RULE_CHAIN},
	nftMsg(unix.NFT_MSG_DELRULE):  {"deleting rules of chain ", unix.NFTA_RULE_CHAIN},
}

// describe describes what a message does, see [netfilter.Conn.Describe].
func describe(msgType uint16, attributes []byte, offset int) string {
	switch msgType {
	case nftMsg(unix.NFT_MSG_NEWSETELEM):
		return "adding " + describeElement(attributes, offset)
	case nftMsg(unix.NFT_MSG_DELSETELEM):
		return "removing " + describeElement(attributes, offset)
	}
	d := described[msgType]
	for attr, v := range netfilter.Attributes(attributes) {
		if attr == d.name {
			return d.doing + netfilter.String(v)
		}
	}
	return d.doing
}

// describeElement names the element at offset, or if there is none there, all of the
// message.
func describeElement(attributes []byte, offset int) string {
	var name, first, found string
	at := 0
	for attr, v := range netfilter.Attributes(attributes) {
		switch attr {
		case unix.NFTA_SET_ELEM_LIST_SET:
			name = netfilter.String(v)
		case unix.NFTA_SET_ELEM_LIST_ELEMENTS:
			m, ok := mapNamed(name)
			if !ok {
				break
			}
			begin := at + 4
			for _, item := range netfilter.Attributes(v) {
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
			}
		}
		at += (4 + len(v) + 3) &^ 3
	}
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
