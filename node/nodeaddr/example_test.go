// SPDX-License-Identifier: Apache-2.0

package nodeaddr_test

import (
	"fmt"
	"net/netip"

	"github.com/kpng-project/kpng/node/nodeaddr"
)

// A List notifies its readers when the program sets other addresses.
func ExampleList() {
	list := nodeaddr.Of(netip.MustParseAddr("192.0.2.1"))
	addrs, changed := list.Addresses()
	fmt.Println(addrs)
	list.Set(netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8::2"))
	<-changed
	addrs, _ = list.Addresses()
	fmt.Println(addrs)
	// Output:
	// [192.0.2.1]
	// [192.0.2.2 2001:db8::2]
}

func ExampleParseSelection() {
	selection, err := nodeaddr.ParseSelection([]string{"primary", "10.0.0.0/8"})
	fmt.Println(selection.Primary, selection.CIDRs, err)
	_, err = nodeaddr.ParseSelection([]string{"eth0"})
	fmt.Println(err)
	// Output:
	// true [10.0.0.0/8] <nil>
	// node-port addresses "eth0": not primary, all, localhost or a CIDR
}
