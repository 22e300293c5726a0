// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	coreinformers "k8s.io/client-go/informers/core/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

const (
	// routeProtocol is the protocol field of the agent's routes in the kernel. The agent
	// changes and deletes only routes with this value.
	routeProtocol netlink.RouteProtocol = 142
	// retryAfter is the wait after a failed sync. checkEvery is the longest time between two
	// syncs. Each sync repairs the routes.
	retryAfter, checkEvery = 2 * time.Second, time.Minute
)

// cniConfig has the settings of the CNI configuration file.
type cniConfig struct {
	file, plugin string
	mtu          int
}

func (c cniConfig) check() error {
	if c.plugin != "bridge" && c.plugin != "ptp" {
		return fmt.Errorf("-plugin is %q, want bridge or ptp", c.plugin)
	}
	if c.mtu < 1280 { // the minimum MTU of IPv6 (RFC 8200)
		return fmt.Errorf("-mtu is %d, want at least 1280", c.mtu)
	}
	return nil
}

// content returns the configuration for pods with addresses in cidrs.
func (c cniConfig) content(cidrs []netip.Prefix) ([]byte, error) {
	type object map[string]any
	var ranges [][]object
	var routes []object
	for _, cidr := range cidrs {
		ranges = append(ranges, []object{{"subnet": cidr}})
		routes = append(routes, object{"dst": netip.PrefixFrom(unspecified(cidr.Addr()), 0)})
	}
	pods := object{
		"type": c.plugin,
		"mtu":  c.mtu,
		"ipam": object{"type": "host-local", "dataDir": "/run/kpng-cni", "ranges": ranges, "routes": routes},
	}
	if c.plugin == "bridge" {
		pods["bridge"] = "kpng0"
		pods["isGateway"] = true
		// In this mode, a pod can connect to itself through a service.
		pods["hairpinMode"] = true
	}
	return json.MarshalIndent(object{
		"cniVersion": "0.4.0",
		"name":       "kpng",
		"plugins":    []object{pods, {"type": "portmap", "capabilities": object{"portMappings": true}}},
	}, "", "  ")
}

func unspecified(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// write writes the configuration unless the file already contains it. The container
// runtime may read the file at any time, so write replaces it atomically.
func (c cniConfig) write(cidrs []netip.Prefix) error {
	content, err := c.content(cidrs)
	if err != nil {
		return err
	}
	if old, err := os.ReadFile(c.file); err == nil && string(old) == string(content) {
		return nil
	}
	temp, err := os.CreateTemp(filepath.Dir(c.file), ".kpng-*")
	if err != nil {
		return fmt.Errorf("write the CNI configuration: %w", err)
	}
	defer os.Remove(temp.Name())
	_, err = temp.Write(content)
	err = errors.Join(err, temp.Chmod(0o644), temp.Close())
	if err == nil {
		err = os.Rename(temp.Name(), c.file)
	}
	if err != nil {
		return fmt.Errorf("write the CNI configuration: %w", err)
	}
	return nil
}

// network connects the pods of this node with pods of other nodes. The nodes
// must share a link, because the gateway to a node's pods is that node's internal IP.
type network struct {
	node    string
	cni     cniConfig
	nodes   corelisters.NodeLister
	synced  cache.InformerSynced
	changed chan struct{} // contains a value if a sync is needed
}

func newNetwork(node string, cni cniConfig, nodes coreinformers.NodeInformer) (*network, error) {
	n := &network{node: node, cni: cni, nodes: nodes.Lister(), changed: make(chan struct{}, 1)}
	signal := func() {
		select {
		case n.changed <- struct{}{}:
		default:
		}
	}
	handle, err := nodes.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { signal() },
		UpdateFunc: func(old, new any) { // ignore heartbeats, the most frequent updates
			a, b := old.(*corev1.Node), new.(*corev1.Node)
			if !slices.Equal(a.Spec.PodCIDRs, b.Spec.PodCIDRs) || !slices.Equal(a.Status.Addresses, b.Status.Addresses) {
				signal()
			}
		},
		DeleteFunc: func(any) { signal() },
	})
	if err != nil {
		return nil, fmt.Errorf("follow nodes: %w", err)
	}
	n.synced = handle.HasSynced
	return n, nil
}

func (n *network) run(ctx context.Context) error {
	if !cache.WaitForCacheSync(ctx.Done(), n.synced) {
		return nil
	}
	if n.cni.plugin == "bridge" {
		applySettings(ctx, bridgeSettings) // these settings exist only if the module br_netfilter is loaded
	}
	for {
		wait := checkEvery
		if err := n.sync(ctx); err != nil {
			klog.FromContext(ctx).Error(err, "Cannot connect pods; will retry", "after", retryAfter)
			wait = retryAfter
		}
		select {
		case <-ctx.Done():
			return nil
		case <-n.changed:
		case <-time.After(wait):
		}
	}
}

// sync writes the CNI configuration and corrects the routes to other nodes.
func (n *network) sync(ctx context.Context) error {
	nodes, err := n.nodes.List(labels.Everything())
	if err != nil {
		return err
	}
	wanted := map[netip.Prefix]netip.Addr{} // destination to gateway
	var own []netip.Prefix
	for _, node := range nodes {
		cidrs, err := podCIDRs(node)
		if err != nil { // continue with the other nodes
			klog.FromContext(ctx).Error(err, "Node left out", "node", node.Name)
			continue
		}
		if node.Name == n.node {
			own = cidrs
			continue
		}
		for _, cidr := range cidrs {
			if gateway, ok := internalIP(node, cidr.Addr().Is4()); ok {
				wanted[cidr] = gateway
			}
		}
	}
	err = syncRoutes(wanted)
	if len(own) == 0 {
		return errors.Join(err, fmt.Errorf("node %s has no pod CIDRs; the controller manager needs --allocate-node-cidrs", n.node))
	}
	return errors.Join(err, n.cni.write(own))
}

func podCIDRs(node *corev1.Node) ([]netip.Prefix, error) {
	var cidrs []netip.Prefix
	for _, s := range node.Spec.PodCIDRs {
		cidr, err := netip.ParsePrefix(s)
		if err != nil {
			return nil, fmt.Errorf("parse spec.podCIDRs: %w", err)
		}
		cidrs = append(cidrs, cidr.Masked())
	}
	return cidrs, nil
}

// internalIP returns the first internal IPv4 or IPv6 address of a node.
func internalIP(node *corev1.Node, ipv4 bool) (netip.Addr, bool) {
	for _, a := range node.Status.Addresses {
		addr, err := netip.ParseAddr(a.Address)
		if err == nil && a.Type == corev1.NodeInternalIP && addr.Is4() == ipv4 {
			return addr, true
		}
	}
	return netip.Addr{}, false
}

// syncRoutes adds missing routes, and deletes all other routes with the protocol number
// routeProtocol. The map wanted has the gateway of each destination. If one route fails,
// syncRoutes continues with the next route.
func syncRoutes(wanted map[netip.Prefix]netip.Addr) error {
	filter := &netlink.Route{Protocol: routeProtocol, Table: unix.RT_TABLE_MAIN}
	installed, err := netlink.RouteListFiltered(netlink.FAMILY_ALL, filter, netlink.RT_FILTER_PROTOCOL|netlink.RT_FILTER_TABLE)
	if err != nil {
		return fmt.Errorf("list routes: %w", err)
	}
	var errs []error
	missing := maps.Clone(wanted)
	for _, route := range installed {
		dst, _ := netip.ParsePrefix(route.Dst.String())
		if gateway, ok := wanted[dst]; ok && gateway.String() == route.Gw.String() {
			delete(missing, dst)
			continue
		}
		if err := netlink.RouteDel(&route); err != nil {
			errs = append(errs, fmt.Errorf("delete the route to %s: %w", route.Dst, err))
		}
	}
	for dst, gateway := range missing {
		mask := net.CIDRMask(dst.Bits(), dst.Addr().BitLen())
		route := &netlink.Route{Dst: &net.IPNet{IP: dst.Addr().AsSlice(), Mask: mask}, Gw: gateway.AsSlice(), Protocol: routeProtocol}
		if err := netlink.RouteReplace(route); err != nil {
			errs = append(errs, fmt.Errorf("route %s to node address %s: %w", dst, gateway, err))
		}
	}
	return errors.Join(errs...)
}

// bridgeSettings make the kernel pass bridged packets to nftables. Without these
// settings, a client on the same bridge as the endpoint gets replies from the endpoint's
// address instead of the service's address, and the connection fails.
var bridgeSettings = map[string]string{
	"net/bridge/bridge-nf-call-iptables":  "1",
	"net/bridge/bridge-nf-call-ip6tables": "1",
}

// applySettings sets sysctls to the wanted values. If it cannot set a sysctl, for example
// in a container, it logs the wanted value. An administrator can then set the sysctl on
// the node.
func applySettings(ctx context.Context, settings map[string]string) {
	for name, wanted := range settings {
		file := filepath.Join("/proc/sys", name)
		value, err := os.ReadFile(file)
		if err == nil && strings.TrimSpace(string(value)) != wanted {
			err = os.WriteFile(file, []byte(wanted), 0)
		}
		if err != nil {
			klog.FromContext(ctx).Error(err, "Cannot change a kernel setting; set it on the node", "sysctl", name, "wanted", wanted)
		}
	}
}
