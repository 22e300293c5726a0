// SPDX-License-Identifier: Apache-2.0

package kernelspace

import (
	"time"

	"github.com/kpng-project/kpng/internal/hns"
)

// Observer has functions to which Sync and Verify report their work. The functions must
// not block. They may be nil.
type Observer struct {
	// Called reports the name, duration and error of a call to HNS. A name is, for example,
	// "CreateLoadBalancer".
	Called func(call string, took time.Duration, err error)
	// Holds reports the numbers of endpoints and load balancers that the backend has in HNS.
	// Sync and Verify call Holds at their end, unless these numbers are unknown.
	Holds func(endpoints, loadBalancers int)
}

// The type observed is an HNS that reports each call to an observer.
type observed struct {
	hns    hns.HNS
	report func(call string, took time.Duration, err error)
	now    func() time.Time
}

func observe[T any](o *observed, call string, f func() (T, error)) (T, error) {
	begin := o.now()
	v, err := f()
	o.report(call, o.now().Sub(begin), err)
	return v, err
}

func (o *observed) Features() (hns.Features, error) {
	return observe(o, "Features", o.hns.Features)
}

func (o *observed) Network(name string) (*hns.Network, error) {
	return observe(o, "Network", func() (*hns.Network, error) { return o.hns.Network(name) })
}

func (o *observed) Endpoints(network string) ([]hns.Endpoint, error) {
	return observe(o, "Endpoints", func() ([]hns.Endpoint, error) { return o.hns.Endpoints(network) })
}

func (o *observed) LoadBalancers() ([]hns.LoadBalancer, error) {
	return observe(o, "LoadBalancers", o.hns.LoadBalancers)
}

func (o *observed) CreateEndpoint(e hns.Endpoint) (string, error) {
	return observe(o, "CreateEndpoint", func() (string, error) { return o.hns.CreateEndpoint(e) })
}

func (o *observed) DeleteEndpoint(id string) error {
	_, err := observe(o, "DeleteEndpoint", func() (struct{}, error) { return struct{}{}, o.hns.DeleteEndpoint(id) })
	return err
}

func (o *observed) CreateLoadBalancer(lb hns.LoadBalancer) (hns.LoadBalancer, error) {
	return observe(o, "CreateLoadBalancer", func() (hns.LoadBalancer, error) { return o.hns.CreateLoadBalancer(lb) })
}

func (o *observed) UpdateLoadBalancer(lb hns.LoadBalancer) error {
	_, err := observe(o, "UpdateLoadBalancer", func() (struct{}, error) { return struct{}{}, o.hns.UpdateLoadBalancer(lb) })
	return err
}

func (o *observed) DeleteLoadBalancer(id string) error {
	_, err := observe(o, "DeleteLoadBalancer", func() (struct{}, error) { return struct{}{}, o.hns.DeleteLoadBalancer(id) })
	return err
}
