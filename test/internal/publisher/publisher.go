// SPDX-License-Identifier: Apache-2.0

// Package publisher writes the objects of the conformance kit to an API server.
package publisher

import (
	"context"
	"fmt"

	"github.com/kpng-project/kpng/conformance"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// Publisher writes objects to an API server. It skips an object that has not changed
// since its last write, because no other client changes the object on the server.
type Publisher struct {
	client   kubernetes.Interface
	nodes    map[string]*corev1.Node
	services map[string]*corev1.Service
	slices   map[string]*discoveryv1.EndpointSlice
	// healthChecks is the number of services that got a health-check node port.
	healthChecks int32
}

var _ conformance.Publisher = (*Publisher)(nil)

// New returns a publisher that writes with a client.
func New(client kubernetes.Interface) *Publisher {
	return &Publisher{client, map[string]*corev1.Node{}, map[string]*corev1.Service{}, map[string]*discoveryv1.EndpointSlice{}, 0}
}

func key(o metav1.Object) string { return o.GetNamespace() + "/" + o.GetName() }

// Publish implements [conformance.Publisher].
func (p *Publisher) Publish(ctx context.Context, objects *conformance.Objects) error {
	wanted := map[string]bool{}
	for _, s := range objects.Services {
		wanted[key(s)] = true
	}
	for _, s := range objects.Slices {
		wanted["slice "+key(s)] = true
	}
	for k, s := range p.slices {
		if !wanted["slice "+k] {
			if err := p.client.DiscoveryV1().EndpointSlices(s.Namespace).Delete(ctx, s.Name, metav1.DeleteOptions{}); err != nil {
				return err
			}
			delete(p.slices, k)
		}
	}
	for k, s := range p.services {
		if !wanted[k] {
			if err := p.deleteService(ctx, s); err != nil {
				return err
			}
		}
	}
	for _, n := range objects.Nodes {
		if err := p.node(ctx, n); err != nil {
			return fmt.Errorf("write node %s: %w", n.Name, err)
		}
	}
	for _, s := range objects.Services {
		if err := p.service(ctx, s); err != nil {
			return fmt.Errorf("write service %s: %w", key(s), err)
		}
	}
	for _, s := range objects.Slices {
		if err := p.slice(ctx, s); err != nil {
			return fmt.Errorf("write slice %s: %w", key(s), err)
		}
	}
	return nil
}

func fresh(m *metav1.ObjectMeta) {
	m.UID, m.ResourceVersion, m.CreationTimestamp = "", "", metav1.Time{}
}

func (p *Publisher) node(ctx context.Context, want *corev1.Node) error {
	before, exists := p.nodes[key(want)]
	if exists && equality.Semantic.DeepEqual(before, want) {
		return nil
	}
	n := want.DeepCopy()
	fresh(&n.ObjectMeta)
	nodes := p.client.CoreV1().Nodes()
	if exists {
		now, err := nodes.Get(ctx, n.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		n.ResourceVersion = now.ResourceVersion
		if n, err = nodes.Update(ctx, n, metav1.UpdateOptions{}); err != nil {
			return err
		}
		n.Status = want.Status
		if _, err := nodes.UpdateStatus(ctx, n, metav1.UpdateOptions{}); err != nil {
			return err
		}
	} else if _, err := nodes.Create(ctx, n, metav1.CreateOptions{}); err != nil {
		return err
	}
	p.nodes[key(want)] = want
	return nil
}

// setHealthCheckNodePort sets the health-check node port of a service that needs one. The
// API server would choose a random port, possibly a node port of a later service of the
// kit. The kit uses the lowest node ports.
func (p *Publisher) setHealthCheckNodePort(s *corev1.Service) {
	if s.Spec.Type == corev1.ServiceTypeLoadBalancer && s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal && s.Spec.HealthCheckNodePort == 0 {
		s.Spec.HealthCheckNodePort = 32767 - p.healthChecks
		p.healthChecks++
	}
}

func (p *Publisher) service(ctx context.Context, want *corev1.Service) error {
	before, exists := p.services[key(want)]
	if exists && equality.Semantic.DeepEqual(before, want) {
		return nil
	}
	// If one of these fields differs, the test case has deleted the service and created another
	// one with the same name.
	if exists && (before.UID != want.UID || !before.CreationTimestamp.Equal(&want.CreationTimestamp) ||
		!equality.Semantic.DeepEqual(before.Spec.ClusterIPs, want.Spec.ClusterIPs)) {
		if err := p.deleteService(ctx, before); err != nil {
			return err
		}
		exists = false
	}
	s := want.DeepCopy()
	fresh(&s.ObjectMeta)
	services := p.client.CoreV1().Services(s.Namespace)
	var err error
	if exists {
		now, err := services.Get(ctx, s.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		s.ResourceVersion = now.ResourceVersion
		if now.Spec.HealthCheckNodePort == 0 { // else the API server keeps it
			p.setHealthCheckNodePort(s)
		}
		if s, err = services.Update(ctx, s, metav1.UpdateOptions{}); err != nil {
			return err
		}
	} else {
		if err := p.namespace(ctx, s.Namespace); err != nil {
			return err
		}
		p.setHealthCheckNodePort(s)
		if s, err = services.Create(ctx, s, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	if !equality.Semantic.DeepEqual(s.Status, want.Status) {
		s.Status = want.Status
		if _, err := services.UpdateStatus(ctx, s, metav1.UpdateOptions{}); err != nil {
			return err
		}
	}
	p.services[key(want)] = want
	return nil
}

func (p *Publisher) deleteService(ctx context.Context, s *corev1.Service) error {
	if err := p.client.CoreV1().Services(s.Namespace).Delete(ctx, s.Name, metav1.DeleteOptions{}); err != nil {
		return err
	}
	delete(p.services, key(s))
	return nil
}

func (p *Publisher) namespace(ctx context.Context, name string) error {
	n := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	_, err := p.client.CoreV1().Namespaces().Create(ctx, n, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

func (p *Publisher) slice(ctx context.Context, want *discoveryv1.EndpointSlice) error {
	before, exists := p.slices[key(want)]
	if exists && equality.Semantic.DeepEqual(before, want) {
		return nil
	}
	s := want.DeepCopy()
	fresh(&s.ObjectMeta)
	slices := p.client.DiscoveryV1().EndpointSlices(s.Namespace)
	if exists {
		now, err := slices.Get(ctx, s.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		s.ResourceVersion = now.ResourceVersion
		if _, err := slices.Update(ctx, s, metav1.UpdateOptions{}); err != nil {
			return err
		}
	} else {
		if err := p.namespace(ctx, s.Namespace); err != nil {
			return err
		}
		if _, err := slices.Create(ctx, s, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	p.slices[key(want)] = want
	return nil
}
