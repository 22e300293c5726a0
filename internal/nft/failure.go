// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nft

import (
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
	MessageType(unix.NFT_MSG_DELTABLE): {"deleting table ", unix.NFTA_TABLE_NAME},
	MessageType(unix.NFT_MSG_NEWCHAIN): {"making chain ", unix.NFTA_CHAIN_NAME},
	MessageType(unix.NFT_MSG_DELCHAIN): {"deleting chain ", unix.NFTA_CHAIN_NAME},
	MessageType(unix.NFT_MSG_NEWRULE):  {"making rules of chain ", unix.NFTA_RULE_CHAIN},
	MessageType(unix.NFT_MSG_DELRULE):  {"deleting rules of chain ", unix.NFTA_RULE_CHAIN},
}

// describeMessage describes a message for errors, see [netfilter.Conn.Describe].
func describeMessage(msgType uint16, attributes []byte, offset int, element func(set string, item []byte) string) string {
	switch msgType {
	case MessageType(unix.NFT_MSG_NEWSETELEM):
		return "adding " + describeElements(attributes, offset, element)
	case MessageType(unix.NFT_MSG_DELSETELEM):
		return "removing " + describeElements(attributes, offset, element)
	}
	d := descriptionOf[msgType]
	return d.doing + netfilter.String(netfilter.Attribute(attributes, d.name))
}

// describeElements describes the element at offset, or the first element if offset is not
// in the list of elements. The list of elements is the last attribute of the message.
func describeElements(attributes []byte, offset int, element func(set string, item []byte) string) string {
	set := netfilter.String(netfilter.Attribute(attributes, unix.NFTA_SET_ELEM_LIST_SET))
	list := netfilter.Attribute(attributes, unix.NFTA_SET_ELEM_LIST_ELEMENTS)
	isElement := offset >= len(attributes)-len(list)
	if isElement {
		list = attributes[min(offset, len(attributes)):]
	}
	item := netfilter.Attribute(list, unix.NFTA_LIST_ELEM)
	if item == nil {
		return "elements of " + set
	}
	text := element(set, item)
	switch {
	case text == "":
		return "elements of " + set
	case !isElement:
		return "elements of " + set + ", " + text + " and others"
	}
	return text
}
