// SPDX-License-Identifier: Apache-2.0

package kernelspace

import (
	"time"

	"github.com/kpng-project/kpng/internal/hns"
)

// observedHNS is an HNS that reports its calls.
type observedHNS struct {
	hns  hns.HNS
	opts *Options
	now  func() time.Time
	// The function called runs after each call. See backend.OnCall.
	called func(call string, took time.Duration, err error)
}

// OnCall makes the backend call f after each call to HNS. The arguments of f are the name
// of the call to HNS, such as "CreateLoadBalancer", its duration and its error. Use OnCall
// before Start. Package app/program finds this method with sink.As, for metrics.
func (b *backend) OnCall(f func(call string, took time.Duration, err error)) { b.hns.called = f }

func observe[T any](o *observedHNS, call string, f func() (T, error)) (T, error) {
	begin := o.now()
	v, err := f()
	if o.called != nil {
		o.called(call, o.now().Sub(begin), err)
	}
	return v, err
}

// change is like the function observe, for calls that change an object of HNS.
func change[T any](o *observedHNS, call string, f func() (T, error)) (T, error) {
	v, err := observe(o, call, f)
	o.opts.Observer.Wrote(1, err)
	return v, err
}

func (o *observedHNS) Features() (hns.Features, error) {
	return observe(o, "Features", o.hns.Features)
}

func (o *observedHNS) Network(name string) (*hns.Network, error) {
	return observe(o, "Network", func() (*hns.Network, error) { return o.hns.Network(name) })
}

func (o *observedHNS) Endpoints(network string) ([]hns.Endpoint, error) {
	return observe(o, "Endpoints", func() ([]hns.Endpoint, error) { return o.hns.Endpoints(network) })
}

func (o *observedHNS) LoadBalancers() ([]hns.LoadBalancer, error) {
	return observe(o, "LoadBalancers", o.hns.LoadBalancers)
}

func (o *observedHNS) CreateEndpoint(e hns.Endpoint) (string, error) {
	return change(o, "CreateEndpoint", func() (string, error) { return o.hns.CreateEndpoint(e) })
}

func (o *observedHNS) DeleteEndpoint(id string) error {
	_, err := change(o, "DeleteEndpoint", func() (struct{}, error) { return struct{}{}, o.hns.DeleteEndpoint(id) })
	return err
}

func (o *observedHNS) CreateLoadBalancer(lb hns.LoadBalancer) (hns.LoadBalancer, error) {
	return change(o, "CreateLoadBalancer", func() (hns.LoadBalancer, error) { return o.hns.CreateLoadBalancer(lb) })
}

func (o *observedHNS) UpdateLoadBalancer(lb hns.LoadBalancer) error {
	_, err := change(o, "UpdateLoadBalancer", func() (struct{}, error) { return struct{}{}, o.hns.UpdateLoadBalancer(lb) })
	return err
}

func (o *observedHNS) DeleteLoadBalancer(id string) error {
	_, err := change(o, "DeleteLoadBalancer", func() (struct{}, error) { return struct{}{}, o.hns.DeleteLoadBalancer(id) })
	return err
}
