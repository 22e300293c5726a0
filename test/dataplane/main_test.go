// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
)

var (
	shapes   = flag.String("shapes", "1000x10,5000x10,10000x10,30000x10", "`list` of clusters: services x endpoints; + means four frontends and policy Local")
	proxies  = flag.String("proxies", "kpng,kube-proxy", "`list` of the proxies to measure: also kpng-ebpf, kpng-iptables, kube-proxy-iptables and, where the kernel has IPVS, kpng-ipvs, kube-proxy-ipvs")
	changes  = flag.Int("changes", 200, "`number` of endpoint changes, ten per second, for each latency")
	profile  = flag.String("profile", "", "the `file` for a CPU profile of the first four seconds of kpng, with its default sync interval")
	kpngPath = flag.String("kpng", "", "measure this `program` instead of building kpng")
	connects = flag.Int("connects", 10_000, "`number` of connections that are timed")
)

// inside is the name of an environment variable. Only the process in the new network
// namespace has this variable.
const inside = "KPNG_DATAPLANE_INSIDE"

func TestMain(m *testing.M) {
	flag.Parse()
	if os.Getenv(inside) == "" {
		os.Exit(moveInside())
	}
	if err := prepare(); err != nil {
		fmt.Fprintln(os.Stderr, "prepare network namespace:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// moveInside runs this program again in new network and mount namespaces and returns its
// exit code.
func moveInside() int {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		return exit.ExitCode()
	case err != nil:
		fmt.Fprintln(os.Stderr, "enter a new network namespace (needs root):", err)
		return 1
	}
	return 0
}

var (
	nodeIP = netip.MustParseAddr("192.168.99.1")
	// podCIDR has the pod addresses. A local route for this prefix lets this node accept
	// connections.
	podCIDR = netip.MustParsePrefix("10.128.0.0/9")
	// firstVIP is the cluster IP of the first service.
	firstVIP = netip.MustParseAddr("10.96.1.0")
)

const (
	servicePort = 80
	podPort     = 8080
)

// bpffs is the mount point of a BPF file system for the proxy kpng-ebpf, in this mount
// namespace.
const bpffs = "/mnt"

// prepare makes this namespace a node on which all pods run. Traffic to addresses outside
// the node leaves through an interface behind which no host exists.
func prepare() error {
	if err := errors.Join(
		syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""),
		syscall.Mount("bpf", bpffs, "bpf", 0, "mode=700"),
	); err != nil {
		return fmt.Errorf("mount a BPF file system: %w", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return err
	}
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "nowhere"}
	if err := netlink.LinkAdd(veth); err != nil {
		return err
	}
	nowhere, err := netlink.LinkByName("nowhere")
	if err != nil {
		return err
	}
	for _, link := range []netlink.Link{veth, nowhere} {
		if err := netlink.LinkSetUp(link); err != nil {
			return err
		}
	}
	address := &netlink.Addr{IPNet: &net.IPNet{IP: nodeIP.AsSlice(), Mask: net.CIDRMask(24, 32)}}
	if err := netlink.AddrAdd(veth, address); err != nil {
		return err
	}
	gateway := nodeIP.Next().AsSlice()
	neighbour := &netlink.Neigh{
		LinkIndex: veth.Attrs().Index, IP: gateway, State: netlink.NUD_PERMANENT,
		HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 1},
	}
	if err := netlink.NeighSet(neighbour); err != nil {
		return err
	}
	if err := netlink.RouteAdd(&netlink.Route{LinkIndex: veth.Attrs().Index, Gw: gateway}); err != nil {
		return err
	}
	pods := &net.IPNet{IP: podCIDR.Addr().AsSlice(), Mask: net.CIDRMask(podCIDR.Bits(), 32)}
	return netlink.RouteAdd(&netlink.Route{
		LinkIndex: lo.Attrs().Index, Dst: pods, Type: syscall.RTN_LOCAL, Table: syscall.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST,
	})
}
