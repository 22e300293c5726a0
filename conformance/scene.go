// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/conformance/internal/world"
	corev1 "k8s.io/api/core/v1"
)

// scene is the state of a running case. Its methods create services, publish them,
// connect clients and check the results. A failed check ends the case.
type scene struct {
	*kit
	ctx    context.Context
	family api.Family
	// protocols are the protocols of the services' ports and of the checks.
	protocols []api.Protocol
	services  []*service
	// nodeObjects are the published nodes. If nil, the kit publishes its default nodes.
	nodeObjects []*corev1.Node

	// node is the node under test, and node2 is the other node. Cases use each of them as a
	// client, or as an endpoint in the host network. The pods a, b and c are on the node
	// under test, and d and e are on node2.
	node, node2, a, b, c, d, e person
	// outside is the client outside the cluster.
	outside person

	number int
	err    error
	undo   []func() error
}

// person is a host of the world, as a client or as an endpoint. The field source is the
// source address of its connections. If source is zero, the kernel chooses the address.
type person struct {
	*world.Host
	source netip.Addr
}

func (p person) String() string {
	if p.source.IsValid() {
		return fmt.Sprintf("%s (%s)", p.Name, p.source)
	}
	return p.Name
}

// withAddress returns a copy of p that connects from p's address with index i.
func (s *scene) withAddress(p person, i int) person {
	p.source = p.Addrs.Family(s.family)[i]
	return p
}

func newScene(ctx context.Context, k *kit, family api.Family) *scene {
	s := &scene{kit: k, ctx: ctx, family: family, protocols: []api.Protocol{api.TCP, api.UDP}}
	if _, lacks := k.opts.Unsupported[UDP]; lacks {
		s.protocols = s.protocols[:1]
	}
	w := k.world
	s.node, s.node2, s.outside = person{Host: w.Node}, person{Host: w.Node2}, person{Host: w.Client}
	s.a, s.b, s.c = person{Host: w.Local[0]}, person{Host: w.Local[1]}, person{Host: w.Local[2]}
	s.d, s.e = person{Host: w.Remote[0]}, person{Host: w.Remote[1]}
	k.scenes++
	s.number = k.scenes
	return s
}

// failf ends the case with an error.
func (s *scene) failf(format string, args ...any) {
	s.err = fmt.Errorf(format, args...)
	runtime.Goexit()
}

func (s *scene) must(err error) {
	if err != nil {
		s.failf("%w", err)
	}
}

// unavailable ends the case because the kernel lacks a feature.
func (s *scene) unavailable(what string) { s.must(unavailableError{what}) }

// addCleanup registers a function to call at the end of the case. The function registered
// last is called first.
func (s *scene) addCleanup(f func() error) { s.undo = append(s.undo, f) }

// cleanUp calls the registered functions and removes the objects of the case.
func (s *scene) cleanUp() {
	if s.kit.output = ""; s.err != nil && s.process != nil {
		s.kit.output = lastLines(s.process.Output())
	}
	for _, f := range slices.Backward(s.undo) {
		if err := f(); err != nil && s.err == nil {
			s.err = err
		}
	}
	err := s.kit.publish(s.ctx, &Objects{})
	// After a failed case, kill the proxy and remove its rules, so that the next case does
	// not fail too.
	if s.err != nil {
		err = errors.Join(err, s.kill(), s.subject.Cleanup(s.ctx, s.site))
	}
	if s.process == nil {
		err = errors.Join(err, s.start(s.ctx, s.site))
	}
	if s.err == nil {
		s.err = err
	}
}

// publish publishes the scene's services and waits until they are programmed.
func (s *scene) publish() {
	s.publishNow()
	s.must(s.awaitProgrammed(s.ctx))
}

// publishNow publishes the scene's services and does not wait until they are programmed.
func (s *scene) publishNow() {
	objects := &Objects{}
	for _, node := range s.nodeObjects {
		objects.Nodes = append(objects.Nodes, node.DeepCopy())
	}
	for _, svc := range s.services {
		service, endpoints := svc.objects()
		objects.Services = append(objects.Services, service)
		objects.Slices = append(objects.Slices, endpoints...)
	}
	s.must(s.kit.publish(s.ctx, objects))
}

// remove removes a service and its EndpointSlices from the scene.
func (s *scene) remove(svc *service) {
	s.services = slices.DeleteFunc(s.services, func(o *service) bool { return o == svc })
}

// allocate returns a number that is unique in a run.
func (k *kit) allocate() int {
	k.allocations++
	return k.allocations
}

// clusterIP returns an unused address, so that connection tracking and affinity of
// earlier cases have no effect. The methods externalIP and nodePort also return unused
// values.
func (s *scene) clusterIP(family api.Family) netip.Addr {
	return number(world.ServiceCIDRs[family], 0x100+s.allocate())
}

func (s *scene) externalIP(family api.Family) netip.Addr {
	return number(world.ExternalCIDRs[family], 0x100+s.allocate())
}

func (s *scene) nodePort() int32 { return int32(30000 + s.allocate()) }
