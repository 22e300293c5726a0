// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/kpng-project/kpng/sink"
	"github.com/vishvananda/netlink"
)

// bridge is the dataplane: it makes the bridge with the agent's own flows, and passes the
// services on to the ovs backend.
type bridge struct {
	sink.Sink
	name, runDir string
	pods         netip.Prefix
}

// Unwrap returns the ovs backend, see [sink.As].
func (b *bridge) Unwrap() sink.Sink { return b.Sink }

// Sync implements [sink.Sink]. A pass begins at the start, and after the connection to the
// switch was lost. At the beginning of a pass, the agent makes its part of the bridge
// again.
func (b *bridge) Sync(ctx context.Context, c *sink.Changes) error {
	if c.First {
		if err := b.make(ctx); err != nil {
			return fmt.Errorf("make bridge %s: %w", b.name, err)
		}
	}
	return b.Sink.Sync(ctx, c)
}

func (b *bridge) gateway() netip.Addr { return b.pods.Masked().Addr().Next() }

// make makes the bridge, if it does not exist, and writes the agent's own flows. The
// bridge's local port is the gateway of the pods.
func (b *bridge) make(ctx context.Context) error {
	err := b.run(ctx, "", "ovs-vsctl", "--timeout=10", "--no-wait", "--db=unix:"+filepath.Join(b.runDir, "db.sock"),
		"--may-exist", "add-br", b.name, "--", "set", "bridge", b.name, "fail_mode=secure",
		fmt.Sprintf("other_config:hwaddr=%q", mac(b.gateway())))
	if err != nil {
		return err
	}
	link, err := netlink.LinkByName(b.name)
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return err
	}
	gateway := &netlink.Addr{IPNet: &net.IPNet{IP: b.gateway().AsSlice(), Mask: net.CIDRMask(b.pods.Bits(), 32)}}
	if err := netlink.AddrReplace(link, gateway); err != nil {
		return fmt.Errorf("add address %s: %w", b.gateway(), err)
	}
	return b.run(ctx, b.flows(), "ovs-ofctl", "--timeout=10", "-OOpenFlow15", "add-flows", "unix:"+filepath.Join(b.runDir, b.name+".mgmt"), "-")
}

// flows returns the agent's own flows. kpng has the tables 100 to 109.
func (b *bridge) flows() string {
	const cookie = "cookie=0x6167656e74," // distinguishes the agent's flows from those of others
	return strings.Join([]string{
		cookie + "table=0,priority=10,arp actions=NORMAL",
		cookie + "table=0,priority=10,ip actions=resubmit(,100)",
		// Packets skip kpng's tables until kpng has written its flows.
		cookie + "table=100,priority=1,ip actions=resubmit(,110)",
		// The destination may have changed, so compute its hardware address. A packet may leave
		// by the port by which it arrived, which needs a change of IN_PORT.
		cookie + "table=110,priority=10,ip,nw_dst=" + b.pods.Masked().String() + " actions=" +
			"load:0x0a58->NXM_OF_ETH_DST[32..47],move:NXM_OF_IP_DST[]->NXM_OF_ETH_DST[0..31],load:0xffff->NXM_OF_IN_PORT[],NORMAL",
		cookie + "table=110,priority=1,ip actions=mod_dl_dst:" + mac(b.gateway()) + ",LOCAL",
	}, "\n")
}

// mac returns the hardware address of the pod with an address: 0a:58 and the address.
func mac(a netip.Addr) string {
	return net.HardwareAddr(append([]byte{0x0a, 0x58}, a.AsSlice()...)).String()
}

// run runs a program of Open vSwitch.
func (b *bridge) run(ctx context.Context, stdin, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin = strings.NewReader(stdin)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, bytes.TrimSpace(out))
	}
	return nil
}
