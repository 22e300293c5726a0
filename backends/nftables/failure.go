// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"fmt"

	"github.com/kpng-project/kpng/internal/netfilter"
	"golang.org/x/sys/unix"
)

// descriptionOf has two values for each message type: a phrase for the message's effect,
// and the attribute that contains the name of the changed object. For messages about
// elements, see describeElements.
var descriptionOf = map[uint16]struct {
	doing string
	name  uint16
}{
	nftMsg(unix.NFT_MSG_DELTABLE): {"deleting table ", unix.NFTA_TABLE_NAME},
	nftMsg(unix.NFT_MSG_NEWCHAIN): {"making chain ", unix.NFTA_CHAIN_NAME},
	nftMsg(unix.NFT_MSG_DELCHAIN): {"deleting chain ", unix.NFTA_CHAIN_NAME},
	nftMsg(unix.NFT_MSG_NEWRULE):  {"making rules of chain ", unix.NFTA_RULE_CHAIN},
	nftMsg(unix.NFT_MSG_DELRULE):  {"deleting rules of chain ", unix.NFTA_RULE_CHAIN},
}

// describeMessage describes a message for errors, see [netfilter.Conn.Describe].
func describeMessage(msgType uint16, attributes []byte, offset int) string {
	switch msgType {
	case nftMsg(unix.NFT_MSG_NEWSETELEM):
		return "adding " + describeElements(attributes, offset)
	case nftMsg(unix.NFT_MSG_DELSETELEM):
		return "removing " + describeElements(attributes, offset)
	}
	d := descriptionOf[msgType]
	return d.doing + netfilter.String(netfilter.Attribute(attributes, d.name))
}

// describeElements describes the element at offset, or the first element if offset is not
// in the list of elements. The list of elements is the last attribute of the message.
func describeElements(attributes []byte, offset int) string {
	name := netfilter.String(netfilter.Attribute(attributes, unix.NFTA_SET_ELEM_LIST_SET))
	list := netfilter.Attribute(attributes, unix.NFTA_SET_ELEM_LIST_ELEMENTS)
	isElement := offset >= len(attributes)-len(list)
	if isElement {
		list = attributes[min(offset, len(attributes)):]
	}
	m, ok := mapNamed(name)
	item := netfilter.Attribute(list, unix.NFTA_LIST_ELEM)
	if !ok || item == nil {
		return "elements of " + name
	}
	e, _ := decodeElement(m, item, map[string]string{})
	if !isElement {
		return fmt.Sprintf("elements of %s, %s and others", name, e)
	}
	return e.String()
}

func mapNamed(name string) (mapID, bool) {
	for _, m := range allMaps() {
		if m.name() == name {
			return m, true
		}
	}
	return mapID{}, false
}
