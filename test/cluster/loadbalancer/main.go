// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command loadbalancer is the load balancer of the test cluster. It gives each Service of
// type LoadBalancer one address for each IP family, and routes the addresses to all
// nodes. With externalTrafficPolicy Local, it routes them only to nodes whose
// health-check node port answers with status 200. All connections of a client go to the
// same node, because session affinity works only within a node. The command runs in the
// network namespace of the control plane, outside of the cluster.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
)

// interval is the time between two checks of all services and nodes.
const interval = time.Second

// finalizer keeps a deleted Service until its load balancer is removed. The name is the
// same as in package k8s.io/cloud-provider/service/helpers.
const finalizer = "service.kubernetes.io/load-balancer-cleanup"

// ranges maps each IP family to the first address of a range. RFC 5737 and RFC 3849
// reserve these ranges for documentation.
var ranges = map[corev1.IPFamily]netip.Addr{
	corev1.IPv4Protocol: netip.MustParseAddr("198.51.100.1"),
	corev1.IPv6Protocol: netip.MustParseAddr("2001:db8:51::1"),
}

// client4 and client6 are the source addresses of connections to load balancers. up.sh
// adds these addresses. They are outside of the nodes' networks. For a client in these
// networks, Kubernetes' tests would assume that the source address was replaced.
var client4, client6 = netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("2001:db8:52::1")

func main() {
	kubeconfig := flag.String("kubeconfig", "", "the configuration of the connection to the API server")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *kubeconfig); err != nil {
		fmt.Fprintln(os.Stderr, "loadbalancer:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, kubeconfig string) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	b := &balancer{client: client, routes: map[netip.Addr][]netip.Addr{}}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		if err := b.sync(ctx); err != nil && ctx.Err() == nil {
			klog.ErrorS(err, "Cannot set up all load balancers")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

type balancer struct {
	client kubernetes.Interface
	// routes maps each load-balancer address to the addresses of the nodes that receive its
	// traffic.
	routes map[netip.Addr][]netip.Addr
}

// sync adds, changes and removes the addresses and routes of all load balancers.
func (b *balancer) sync(ctx context.Context) error {
	services, err := b.client.CoreV1().Services("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	nodes, err := b.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	var errs []error
	used := map[netip.Addr]bool{}
	for i := range services.Items {
		for _, addr := range ingress(&services.Items[i]) {
			used[addr] = true
		}
	}
	want := map[netip.Addr][]netip.Addr{}
	for i := range services.Items {
		svc := &services.Items[i]
		if svc.Spec.Type != corev1.ServiceTypeLoadBalancer || svc.Spec.LoadBalancerClass != nil || svc.DeletionTimestamp != nil {
			errs = append(errs, b.release(ctx, svc))
			continue
		}
		if len(ingress(svc)) == 0 {
			if svc, err = b.allocate(ctx, svc, used); err != nil {
				errs = append(errs, err)
				continue
			}
		}
		for _, addr := range ingress(svc) {
			want[addr] = targets(ctx, svc, nodes.Items, addr.Is4())
		}
	}
	for addr := range maps.Keys(b.routes) {
		if _, ok := want[addr]; !ok {
			errs = append(errs, b.route(addr, nil))
		}
	}
	for addr, via := range want {
		if !slices.Equal(via, b.routes[addr]) {
			errs = append(errs, b.route(addr, via))
		}
	}
	return errors.Join(errs...)
}

// ingress returns the addresses of a service's load balancer.
func ingress(svc *corev1.Service) []netip.Addr {
	var all []netip.Addr
	for _, in := range svc.Status.LoadBalancer.Ingress {
		if addr, err := netip.ParseAddr(in.IP); err == nil {
			all = append(all, addr)
		}
	}
	return all
}

// allocate writes unused addresses into a service's status.
func (b *balancer) allocate(ctx context.Context, svc *corev1.Service, used map[netip.Addr]bool) (*corev1.Service, error) {
	var err error
	if !slices.Contains(svc.Finalizers, finalizer) {
		svc.Finalizers = append(svc.Finalizers, finalizer)
		if svc, err = b.client.CoreV1().Services(svc.Namespace).Update(ctx, svc, metav1.UpdateOptions{}); err != nil {
			return nil, err
		}
	}
	for _, family := range svc.Spec.IPFamilies {
		addr := ranges[family]
		for used[addr] {
			addr = addr.Next()
		}
		used[addr] = true
		svc.Status.LoadBalancer.Ingress = append(svc.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: addr.String()})
	}
	return b.client.CoreV1().Services(svc.Namespace).UpdateStatus(ctx, svc, metav1.UpdateOptions{})
}

// release removes the addresses and the finalizer that the method allocate wrote to a
// service.
func (b *balancer) release(ctx context.Context, svc *corev1.Service) error {
	var err error
	if len(ingress(svc)) > 0 && svc.Spec.LoadBalancerClass == nil {
		svc.Status.LoadBalancer = corev1.LoadBalancerStatus{}
		if svc, err = b.client.CoreV1().Services(svc.Namespace).UpdateStatus(ctx, svc, metav1.UpdateOptions{}); err != nil {
			return err
		}
	}
	if i := slices.Index(svc.Finalizers, finalizer); i >= 0 {
		svc.Finalizers = slices.Delete(svc.Finalizers, i, i+1)
		_, err = b.client.CoreV1().Services(svc.Namespace).Update(ctx, svc, metav1.UpdateOptions{})
	}
	return err
}

// targets returns the addresses of the nodes that receive a service's traffic. A service
// with session affinity gets one node, because the kernel selects a node per connection.
func targets(ctx context.Context, svc *corev1.Service, nodes []corev1.Node, is4 bool) []netip.Addr {
	var mu sync.Mutex
	var all []netip.Addr
	var checks sync.WaitGroup
	for _, node := range nodes {
		for _, address := range node.Status.Addresses {
			addr, err := netip.ParseAddr(address.Address)
			if err != nil || address.Type != corev1.NodeInternalIP || addr.Is4() != is4 {
				continue
			}
			checks.Go(func() {
				if port := svc.Spec.HealthCheckNodePort; port == 0 || healthy(ctx, addr, port) {
					mu.Lock()
					all = append(all, addr)
					mu.Unlock()
				}
			})
			break
		}
	}
	checks.Wait()
	slices.SortFunc(all, netip.Addr.Compare)
	if svc.Spec.SessionAffinity == corev1.ServiceAffinityClientIP && len(all) > 1 {
		all = all[:1]
	}
	return all
}

// healthy reports whether a node's health-check node port answers with status 200.
func healthy(ctx context.Context, node netip.Addr, port int32) bool {
	ctx, cancel := context.WithTimeout(ctx, interval)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort(node.String(), strconv.Itoa(int(port))), nil)
	if err != nil {
		return false
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return false
	}
	answer.Body.Close()
	return answer.StatusCode == http.StatusOK
}

// route routes an address to nodes. If there are no nodes, it removes the address's
// route.
func (b *balancer) route(addr netip.Addr, via []netip.Addr) error {
	client := client4
	if addr.Is6() {
		client = client6
	}
	r := &netlink.Route{
		Dst: &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())},
		Src: client.AsSlice(),
	}
	for _, node := range via {
		reached, err := netlink.RouteGet(node.AsSlice())
		if err != nil || len(reached) == 0 {
			return fmt.Errorf("no route to node %v: %w", node, err)
		}
		r.MultiPath = append(r.MultiPath, &netlink.NexthopInfo{Gw: node.AsSlice(), LinkIndex: reached[0].LinkIndex})
	}
	var err error
	if len(via) == 0 {
		err = netlink.RouteDel(r)
	} else {
		err = netlink.RouteReplace(r)
	}
	if err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("route %v to %v: %w", addr, via, err)
	}
	klog.InfoS("Route", "address", addr, "nodes", via)
	b.routes[addr] = via
	if len(via) == 0 {
		delete(b.routes, addr)
	}
	return nil
}
