// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"testing"

	"github.com/kpng-project/kpng/test/internal/apiserver"
	"github.com/kpng-project/kpng/watcher"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
)

// tenant is a test's part of an API server: a namespace, and a node with the same name.
// The node need not exist.
type tenant struct {
	t      testing.TB
	client kubernetes.Interface
	name   string
}

func newTenant(t testing.TB, server *apiserver.Server) *tenant {
	t.Helper()
	name := server.Namespace(t)
	t.Cleanup(func() {
		err := server.Client().CoreV1().Nodes().Delete(context.WithoutCancel(t.Context()), name, metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) && server.APIServer.Running() {
			t.Error(err)
		}
	})
	return &tenant{t, server.Client(), name}
}

// through returns a copy of the tenant that uses another API server.
func (n *tenant) through(server *apiserver.Server) *tenant {
	return &tenant{n.t, server.Client(), n.name}
}

// object is a Service, an EndpointSlice or a Node.
type object interface {
	metav1.Object
	runtime.Object
}

// put creates or updates objects.
func (n *tenant) put(objects ...object) {
	n.t.Helper()
	for _, o := range objects {
		if err := n.tryPut(o); err != nil {
			n.t.Fatalf("put %T %s: %v", o, o.GetName(), err)
		}
	}
}

func (n *tenant) tryPut(o object) error {
	n.setKind(o)
	body, err := json.Marshal(o)
	if err != nil {
		return err
	}
	request := n.at(o, func(c rest.Interface) *rest.Request { return c.Patch(types.ApplyPatchType) })
	return request.Param("fieldManager", "test").Param("force", "true").Body(body).Do(n.t.Context()).Error()
}

func (n *tenant) create(o object) error {
	var err error
	switch o := o.(type) {
	case *corev1.Service:
		_, err = n.client.CoreV1().Services(n.name).Create(n.t.Context(), o, metav1.CreateOptions{})
	case *discoveryv1.EndpointSlice:
		_, err = n.client.DiscoveryV1().EndpointSlices(n.name).Create(n.t.Context(), o, metav1.CreateOptions{})
	}
	return err
}

// setKind sets the kind and the API version of an object.
func (n *tenant) setKind(o object) {
	n.t.Helper()
	kinds, _, err := scheme.Scheme.ObjectKinds(o)
	if err != nil {
		n.t.Fatal(err)
	}
	o.GetObjectKind().SetGroupVersionKind(kinds[0])
}

// remove deletes objects.
func (n *tenant) remove(objects ...object) {
	n.t.Helper()
	for _, o := range objects {
		if err := n.tryRemove(o); err != nil {
			n.t.Fatalf("delete %T %s: %v", o, o.GetName(), err)
		}
	}
}

func (n *tenant) tryRemove(o object) error {
	return n.at(o, rest.Interface.Delete).Do(n.t.Context()).Error()
}

// at returns a request with the given verb for the API path of the object o.
func (n *tenant) at(o object, verb func(rest.Interface) *rest.Request) *rest.Request {
	switch o.(type) {
	case *corev1.Service:
		return verb(n.client.CoreV1().RESTClient()).Namespace(n.name).Resource("services").Name(o.GetName())
	case *discoveryv1.EndpointSlice:
		return verb(n.client.DiscoveryV1().RESTClient()).Namespace(n.name).Resource("endpointslices").Name(o.GetName())
	case *corev1.Node:
		return verb(n.client.CoreV1().RESTClient()).Resource("nodes").Name(o.GetName())
	}
	panic(fmt.Sprintf("unexpected %T", o))
}

// service returns the service from the API server.
func (n *tenant) service(name string) *corev1.Service {
	n.t.Helper()
	s, err := n.client.CoreV1().Services(n.name).Get(n.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		n.t.Fatal(err)
	}
	return s
}

// node returns the tenant's node. If zone is not empty, the node is in this zone.
func (n *tenant) node(zone string) *corev1.Node {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.name}}
	if zone != "" {
		node.Labels = map[string]string{corev1.LabelTopologyZone: zone}
	}
	return node
}

// newService returns a service with a selector. If proxy is not empty, it is the
// service's proxy name.
func newService(name, proxy string, ports ...corev1.ServicePort) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: proxyLabel(proxy)},
		Spec:       corev1.ServiceSpec{Selector: map[string]string{"app": name}, Ports: ports},
	}
}

// newSlice returns an EndpointSlice of a service, with the labels that the EndpointSlice
// controller would set.
func newSlice(name string, of *corev1.Service, ports []discoveryv1.EndpointPort, endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name, Labels: proxyLabel(of.Labels[watcher.LabelServiceProxyName])},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       ports,
		Endpoints:   endpoints,
	}
	s.Labels[discoveryv1.LabelServiceName] = of.Name
	if len(endpoints) > 0 && netip.MustParseAddr(endpoints[0].Addresses[0]).Is6() {
		s.AddressType = discoveryv1.AddressTypeIPv6
	}
	return s
}

func proxyLabel(proxy string) map[string]string {
	if proxy == "" {
		return map[string]string{}
	}
	return map[string]string{watcher.LabelServiceProxyName: proxy}
}

// newEndpoint returns a ready endpoint. If node is not empty, the endpoint is on this
// node.
func newEndpoint(addr, node string) discoveryv1.Endpoint {
	e := discoveryv1.Endpoint{Addresses: []string{addr}, Conditions: conditions(true, true, false)}
	if node != "" {
		e.NodeName = &node
	}
	return e
}

func conditions(ready, serving, terminating bool) discoveryv1.EndpointConditions {
	return discoveryv1.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating}
}

// servicePort returns a port of a service. The target port is a number or a name.
func servicePort(name string, port int32, target any) corev1.ServicePort {
	p := corev1.ServicePort{Name: name, Port: port}
	switch t := target.(type) {
	case int:
		p.TargetPort = intstr.FromInt(t)
	case string:
		p.TargetPort = intstr.FromString(t)
	}
	return p
}

// slicePorts returns the port list of an EndpointSlice that has one port.
func slicePorts(name string, port int32) []discoveryv1.EndpointPort {
	return []discoveryv1.EndpointPort{{Name: &name, Port: &port}}
}
