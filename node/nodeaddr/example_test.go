// SPDX-License-Identifier: Apache-2.0

package nodeaddr_test

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/kpng-project/kpng/node/nodeaddr"
)

func ExampleOf() {
	addrs, _ := nodeaddr.Of(netip.MustParseAddr("2001:db8::2"), netip.MustParseAddr("192.0.2.1")).Addresses()
	fmt.Println(addrs)
	// Output:
	// [192.0.2.1 2001:db8::2]
}

func ExampleSelection() {
	_, err := nodeaddr.Watch(context.Background(), nodeaddr.Options{Selection: nodeaddr.Selection{"primary", "eth0"}})
	fmt.Println(err)
	// Output:
	// node-port addresses "eth0": not primary, all, localhost or a CIDR
}
