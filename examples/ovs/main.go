// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command ovs-agent is a small network agent that owns a bridge of Open vSwitch. It runs
// kpng with the ovs backend in its process, so that pods at the bridge can use services.
// README.md describes its features and limits.
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

	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/ovs"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/pflag"
	"github.com/vishvananda/netlink"
)

func main() { app.Main(&agent{}) }

// agent is a sink: package app calls its methods. The methods that it does not have are
// those of the backend.
type agent struct {
	backends.Dataplane
	bridge, runDir string
	pods           podCIDR
}

// podCIDR is the value of a flag: the IPv4 network of this node's pods.
type podCIDR struct{ netip.Prefix }

func (p *podCIDR) String() string { return p.Prefix.String() }
func (p *podCIDR) Type() string   { return "CIDR" }

func (p *podCIDR) Set(text string) (err error) {
	p.Prefix, err = netip.ParsePrefix(text)
	if err == nil && (!p.Addr().Is4() || p.Bits() > 30) {
		return fmt.Errorf("%s is not an IPv4 network with room for pods", text)
	}
	return err
}

// Register implements [app.Configurable].
func (a *agent) Register(fs *pflag.FlagSet) {
	a.pods.Prefix = netip.MustParsePrefix("10.244.1.0/24")
	fs.StringVar(&a.bridge, "bridge", "br-int", "make a bridge with this `name`, or use it if it exists")
	fs.Var(&a.pods, "pod-cidr", "the IPv4 network of this node's pods; its first address is the gateway")
	fs.StringVar(&a.runDir, "ovs-rundir", "/var/run/openvswitch", "the `directory` of the sockets of Open vSwitch")
}

// Configure implements [app.Configurable].
func (a *agent) Configure() (err error) {
	a.Dataplane, err = ovs.New(ovs.Options{
		Bridge: a.bridge, RunDir: a.runDir,
		MasqueradeAddresses: []netip.Addr{a.gateway()},
		PodCIDRs:            []netip.Prefix{a.pods.Prefix},
	})
	return err
}

func (a *agent) gateway() netip.Addr { return a.pods.Masked().Addr().Next() }

// Sync implements [sink.Sink]. A pass begins at the start and when the switch was lost. Then
// the agent makes its part of the bridge again.
func (a *agent) Sync(ctx context.Context, c *sink.Changes) error {
	if c.First {
		if err := a.makeBridge(ctx); err != nil {
			return fmt.Errorf("make bridge %s: %w", a.bridge, err)
		}
	}
	return a.Dataplane.Sync(ctx, c)
}

// makeBridge makes the bridge, if it does not exist, and writes the agent's own flows. The
// bridge's local port is the gateway of the pods.
func (a *agent) makeBridge(ctx context.Context) error {
	err := a.run(ctx, "", "ovs-vsctl", "--timeout=10", "--no-wait", "--db=unix:"+filepath.Join(a.runDir, "db.sock"),
		"--may-exist", "add-br", a.bridge, "--", "set", "bridge", a.bridge, "fail_mode=secure",
		fmt.Sprintf("other_config:hwaddr=%q", mac(a.gateway())))
	if err != nil {
		return err
	}
	link, err := netlink.LinkByName(a.bridge)
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return err
	}
	gateway := &netlink.Addr{IPNet: &net.IPNet{IP: a.gateway().AsSlice(), Mask: net.CIDRMask(a.pods.Bits(), 32)}}
	if err := netlink.AddrReplace(link, gateway); err != nil {
		return fmt.Errorf("add address %s: %w", a.gateway(), err)
	}
	return a.run(ctx, a.flows(), "ovs-ofctl", "--timeout=10", "-OOpenFlow15", "add-flows", "unix:"+filepath.Join(a.runDir, a.bridge+".mgmt"), "-")
}

// flows returns the agent's own flows. kpng has the tables 100 to 109.
func (a *agent) flows() string {
	const cookie = "cookie=0x6167656e74," // distinguishes the agent's flows from those of others
	return strings.Join([]string{
		cookie + "table=0,priority=10,arp actions=NORMAL",
		cookie + "table=0,priority=10,ip actions=resubmit(,100)",
		// Packets pass by until kpng has written its flows.
		cookie + "table=100,priority=1,ip actions=resubmit(,110)",
		// The destination may have changed, so compute its hardware address. A packet may leave
		// by the port by which it arrived, which needs a change of IN_PORT.
		cookie + "table=110,priority=10,ip,nw_dst=" + a.pods.Masked().String() + " actions=" +
			"load:0x0a58->NXM_OF_ETH_DST[32..47],move:NXM_OF_IP_DST[]->NXM_OF_ETH_DST[0..31],load:0xffff->NXM_OF_IN_PORT[],NORMAL",
		cookie + "table=110,priority=1,ip actions=mod_dl_dst:" + mac(a.gateway()) + ",LOCAL",
	}, "\n")
}

// mac returns the hardware address of the pod with an address: 0a:58 and the address.
func mac(a netip.Addr) string {
	return net.HardwareAddr(append([]byte{0x0a, 0x58}, a.AsSlice()...)).String()
}

// run runs a program of Open vSwitch.
func (a *agent) run(ctx context.Context, stdin, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin = strings.NewReader(stdin)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, bytes.TrimSpace(out))
	}
	return nil
}
