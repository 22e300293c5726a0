// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/test/internal/apiserver"
	"github.com/kpng-project/kpng/test/internal/cgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
)

const (
	namespace     = "default"
	nodeName      = "node"
	firstNodePort = 10000
)

// shape describes the services of a cluster.
type shape struct {
	services, endpoints int
	// If rich is true, each service has four frontends (cluster IP, node port, external IP,
	// load-balancer IP) and external traffic policy Local.
	rich bool
}

func (s shape) String() string {
	name := fmt.Sprintf("%dx%d", s.services, s.endpoints)
	if s.rich {
		name += "+"
	}
	return name
}

func parseShapes(t testing.TB, list string) []shape {
	t.Helper()
	var all []shape
	for word := range strings.SplitSeq(list, ",") {
		numbers, rich := strings.CutSuffix(word, "+")
		services, endpoints, _ := strings.Cut(numbers, "x")
		s := shape{rich: rich}
		var err, err2 error
		s.services, err = strconv.Atoi(services)
		s.endpoints, err2 = strconv.Atoi(endpoints)
		if err != nil || err2 != nil || s.services < 1 || s.endpoints < 1 {
			t.Fatalf("shape %q does not have the form 1000x10 or 1000x10+", word)
		}
		all = append(all, s)
	}
	return all
}

// cluster is a real API server with one node and with services of one shape.
type cluster struct {
	shape
	server     *apiserver.Server
	client     kubernetes.Interface
	kubeconfig string
	// group is the cgroup of the measured proxy. If ipvs is true, this proxy uses IPVS.
	group *cgroup.Group
	ipvs  bool
	// sockets is the cgroup (version 2) for the programs of kpng-ebpf. It is the cgroup of
	// this process.
	sockets string
	// fresh is the number of endpoint addresses that newPodIP has returned.
	fresh atomic.Int64
}

func newCluster(t testing.TB, s shape) *cluster {
	t.Helper()
	server := apiserver.Start(t, apiserver.Options{Flags: []string{
		fmt.Sprintf("--service-node-port-range=%d-65535", firstNodePort),
		"--service-cluster-ip-range=10.96.0.0/12," + apiserver.ServiceCIDRv6, // room for a million services
	}})
	c := &cluster{shape: s, server: server, client: server.Client(), kubeconfig: apiserver.Kubeconfig(t, server.Config())}
	_, err := c.client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: nodeName},
		Status:     corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: nodeIP.String()}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.fill(t.Context()); err != nil {
		t.Fatalf("fill cluster: %v", err)
	}
	// Restart the API server, so that it learns the node ports that fill has written to
	// etcd.
	server.APIServer.Kill(t)
	server.APIServer.Start(t)
	return c
}

// join moves this process into new cgroups until the test ends.
func (c *cluster) join(t testing.TB) {
	t.Helper()
	c.group, c.sockets = cgroup.New(t), filepath.Dir(netnstest.NewCgroup(t).Dir)
}

// vip returns the cluster IP of a service.
func vip(service int) netip.Addr { return offset(firstVIP, service) }

// externalIP and loadBalancerIP return the addresses of a rich service.
func externalIP(service int) string {
	return offset(netip.MustParseAddr("10.97.0.0"), service).String()
}
func loadBalancerIP(service int) string {
	return offset(netip.MustParseAddr("10.98.0.0"), service).String()
}

// nodePorts returns a rich service's node port and health-check node port.
func nodePorts(service int) (traffic, health int32) {
	traffic = int32(firstNodePort + 2*service)
	return traffic, traffic + 1
}

// offset returns the n-th address after the address a.
func offset(a netip.Addr, n int) netip.Addr {
	b := a.As4()
	for i := 3; n > 0; i-- {
		n += int(b[i])
		b[i] = byte(n)
		n >>= 8
	}
	return netip.AddrFrom4(b)
}

// newPodIP returns an endpoint address that was not used before.
func (c *cluster) newPodIP() string {
	return offset(podCIDR.Addr(), 256+int(c.fresh.Add(1))).String()
}

// name returns the name of a service. The names sort in the order of the services'
// numbers.
func name(service int) string { return fmt.Sprintf("service-%06d", service) }

// fill creates the services and their endpoints. It creates the first service through the
// API, and writes adapted copies of it to etcd.
func (c *cluster) fill(ctx context.Context) error {
	service, err := c.create(ctx)
	if err != nil {
		return err
	}
	slice, err := c.client.DiscoveryV1().EndpointSlices(namespace).Create(ctx, c.slice(0), metav1.CreateOptions{})
	if err != nil {
		return err
	}
	address, err := c.client.NetworkingV1().IPAddresses().Get(ctx, service.Spec.ClusterIP, metav1.GetOptions{})
	if err != nil {
		return err
	}
	return c.server.Store(ctx, c.services-1, func(i int) []runtime.Object { return c.copies(i+1, service, slice, address) })
}

// copies returns the objects of service i, which are adapted copies of the
// first service's objects.
func (c *cluster) copies(i int, service *corev1.Service, slice *discoveryv1.EndpointSlice, address *networkingv1.IPAddress) []runtime.Object {
	service, slice, address = service.DeepCopy(), slice.DeepCopy(), address.DeepCopy()
	label := map[string]string{"app": name(i)}
	service.Name, service.UID, service.Labels = name(i), uuid.NewUUID(), label
	service.Spec.Selector = label
	service.Spec.ClusterIP = vip(i).String()
	service.Spec.ClusterIPs = []string{service.Spec.ClusterIP}
	if c.rich {
		service.Spec.ExternalIPs = []string{externalIP(i)}
		service.Status.LoadBalancer.Ingress[0].IP = loadBalancerIP(i)
		service.Spec.Ports[0].NodePort, service.Spec.HealthCheckNodePort = nodePorts(i)
	}
	copied := c.slice(i)
	slice.Name, slice.UID, slice.Labels, slice.Endpoints = copied.Name, uuid.NewUUID(), copied.Labels, copied.Endpoints
	address.Name, address.UID = service.Spec.ClusterIP, uuid.NewUUID()
	address.Spec.ParentRef.Name = service.Name
	return []runtime.Object{address, service, slice}
}

// create creates the first service.
func (c *cluster) create(ctx context.Context) (*corev1.Service, error) {
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name(0), Labels: map[string]string{"app": name(0)}},
		Spec: corev1.ServiceSpec{
			ClusterIP: vip(0).String(),
			Selector:  map[string]string{"app": name(0)},
			Ports:     []corev1.ServicePort{{Name: "http", Port: servicePort}},
		},
	}
	if c.rich {
		service.Spec.Type = corev1.ServiceTypeLoadBalancer
		service.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		service.Spec.ExternalIPs = []string{externalIP(0)}
		service.Spec.Ports[0].NodePort, service.Spec.HealthCheckNodePort = nodePorts(0)
	}
	services := c.client.CoreV1().Services(namespace)
	service, err := services.Create(ctx, service, metav1.CreateOptions{})
	if err != nil || !c.rich {
		return service, err
	}
	service.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: loadBalancerIP(0)}}
	return services.UpdateStatus(ctx, service, metav1.UpdateOptions{})
}

// slice returns a service's EndpointSlice, as the EndpointSlice controller would write
// it.
func (c *cluster) slice(service int) *discoveryv1.EndpointSlice {
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Name: name(service), Labels: map[string]string{
			discoveryv1.LabelServiceName: name(service),
			discoveryv1.LabelManagedBy:   "endpointslice-controller.k8s.io",
			"app":                        name(service),
		}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To[int32](podPort), Protocol: ptr.To(corev1.ProtocolTCP)}},
	}
	for range c.endpoints {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{c.newPodIP()},
			NodeName:   ptr.To(nodeName),
			Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true), Serving: ptr.To(true), Terminating: ptr.To(false)},
		})
	}
	return slice
}

// change replaces the address of endpoint i of a service by the address pod.
func (c *cluster) change(ctx context.Context, service, i int, pod string) error {
	slices := c.client.DiscoveryV1().EndpointSlices(namespace)
	slice, err := slices.Get(ctx, name(service), metav1.GetOptions{})
	if err != nil {
		return err
	}
	slice.Endpoints[i].Addresses = []string{pod}
	_, err = slices.Update(ctx, slice, metav1.UpdateOptions{})
	return err
}

// sightings records when each address was first seen.
type sightings struct {
	mu    sync.Mutex
	times map[netip.Addr]time.Time
}

func newSightings() *sightings { return &sightings{times: make(map[netip.Addr]time.Time)} }

func (s *sightings) saw(a netip.Addr, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, before := s.times[a]; !before {
		s.times[a] = now
	}
}

func (s *sightings) of(a netip.Addr) (time.Time, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t, ok := s.times[a]
	return t, ok
}

// follow watches EndpointSlices until ctx ends, and records when each endpoint address
// first occurs.
func (c *cluster) follow(t testing.TB, ctx context.Context) *sightings {
	t.Helper()
	slices := c.client.DiscoveryV1().EndpointSlices(namespace)
	list, err := slices.List(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		t.Fatal(err)
	}
	watch, err := slices.Watch(ctx, metav1.ListOptions{ResourceVersion: list.ResourceVersion})
	if err != nil {
		t.Fatal(err)
	}
	seen := newSightings()
	go func() {
		defer watch.Stop()
		for event := range watch.ResultChan() {
			now := time.Now()
			slice, ok := event.Object.(*discoveryv1.EndpointSlice)
			if !ok {
				continue
			}
			for _, e := range slice.Endpoints {
				seen.saw(netip.MustParseAddr(e.Addresses[0]), now)
			}
		}
	}()
	return seen
}
