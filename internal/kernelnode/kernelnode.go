// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package kernelnode has code that the backends for the Linux kernel share: checks of
// options, the tasks beside the dataplane, and the pauses between repairs.
package kernelnode

import (
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"regexp"

	"github.com/kpng-project/kpng/api"
)

// DefaultMark is the default of the option MasqueradeMark of the backends.
const DefaultMark = 0x2000

const kubeProxyMark = 0x4000

var podInterface = regexp.MustCompile(`^[A-Za-z0-9_.@:-]{1,15}$|^[A-Za-z0-9_.@:-]{1,14}\*$`)

// CheckMasquerading checks options for masquerading. If outsiders is true, connections
// from outside the pod network are masqueraded. If podsKnown is true, the options define
// the pod network.
func CheckMasquerading(mark uint32, podInterfaces []string, outsiders, podsKnown bool) error {
	var errs []error
	if bits.OnesCount32(mark) != 1 {
		errs = append(errs, fmt.Errorf("masquerade mark %#x is not a single bit", mark))
	}
	if mark == kubeProxyMark {
		errs = append(errs, fmt.Errorf("masquerade mark %#x is kube-proxy's", mark))
	}
	for _, name := range podInterfaces {
		if !podInterface.MatchString(name) {
			errs = append(errs, fmt.Errorf("%q is not an interface name", name))
		}
	}
	if outsiders && !podsKnown {
		errs = append(errs, errors.New("masquerading outsiders needs cluster CIDRs or pod interfaces"))
	}
	return errors.Join(errs...)
}

// Addrs returns the addresses of a Node object, or none if it is nil.
func Addrs(n *api.Node) []netip.Addr {
	var addrs []netip.Addr
	if n != nil {
		for _, a := range n.Addresses {
			addrs = append(addrs, a.IP)
		}
	}
	return addrs
}
