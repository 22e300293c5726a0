// SPDX-License-Identifier: Apache-2.0

package program

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"github.com/kpng-project/kpng/internal/sysctl"
	"github.com/vishvananda/netlink"
	"k8s.io/klog/v2"
)

// brokenBridge is a bridge whose pods cannot reach each other through services. Packets
// between ports of the bridge do not pass through netfilter. So netfilter does not
// translate the source of an answer from the endpoint's address to the service's address.
type brokenBridge struct {
	name, sysctl string
}

// bridgeSysctls has a setting for each family. If the setting is 1, packets between ports
// of a bridge pass through netfilter.
var bridgeSysctls = map[int]string{
	netlink.FAMILY_V4: "net.bridge.bridge-nf-call-iptables",
	netlink.FAMILY_V6: "net.bridge.bridge-nf-call-ip6tables",
}

// findBrokenBridges searches the network namespace of the calling thread. It assumes that
// a bridge with an address and at least two veth interfaces is a bridge of pods, and that
// the address is their gateway.
func findBrokenBridges() ([]brokenBridge, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	pods := map[int]int{} // maps the index of a bridge to the number of its pods
	for _, l := range links {
		if l.Type() == "veth" {
			pods[l.Attrs().MasterIndex]++
		}
	}
	var broken []brokenBridge
	for _, l := range links {
		if l.Type() != "bridge" || pods[l.Attrs().Index] < 2 {
			continue
		}
		for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			addrs, err := netlink.AddrList(l, family)
			if err != nil {
				return broken, fmt.Errorf("list addresses of %s: %w", l.Attrs().Name, err)
			}
			if !slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return a.IP.IsGlobalUnicast() }) {
				continue
			}
			// Without the module br_netfilter, the setting does not exist, and value is 0.
			value, err := sysctl.Kernel.Read(bridgeSysctls[family])
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return broken, err
			}
			if value == 0 {
				broken = append(broken, brokenBridge{l.Attrs().Name, bridgeSysctls[family]})
			}
		}
	}
	return broken, nil
}

// followBridges repeats the search for broken bridges until stop is called, because a
// bridge often appears only when the first pods start. It logs each broken bridge once.
func followBridges(ctx context.Context) (stop func()) {
	log := klog.FromContext(ctx)
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		var logged []brokenBridge
		for {
			found, err := findBrokenBridges()
			if err != nil {
				log.V(2).Info("Cannot look for bridges of pods", "reason", err.Error())
			}
			for _, b := range found {
				if !slices.Contains(logged, b) {
					logged = append(logged, b)
					log.Info("Pods of one bridge cannot reach each other through services; load the module br_netfilter and set the sysctl to 1",
						"bridge", b.name, "sysctl", b.sysctl)
				}
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(time.Minute):
			}
		}
	}()
	return func() {
		cancel()
		<-ended
	}
}
