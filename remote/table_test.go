// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/feed"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/transport"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/types"
)

// This file contains a client that works like the clients of the original kpng. This
// client follows only the .proto file, and does not use the generated code.

// bytesCodec sends and receives messages that are already marshalled.
type bytesCodec struct{}

func (bytesCodec) Name() string { return "proto" }

func (bytesCodec) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(*v.(*[]byte))}, nil
}

func (bytesCodec) Unmarshal(data mem.BufferSlice, v any) error {
	*v.(*[]byte) = data.Materialize()
	return nil
}

// field is a field of a marshalled message. The member varint has an integer value. The
// member bytes has any other value.
type field struct {
	number protowire.Number
	varint uint64
	bytes  []byte
}

func parse(t *testing.T, message []byte) []field {
	t.Helper()
	var fields []field
	for len(message) > 0 {
		number, kind, n := protowire.ConsumeTag(message)
		if n < 0 {
			t.Fatalf("%x has no tag", message)
		}
		message = message[n:]
		f := field{number: number}
		switch kind {
		case protowire.VarintType:
			f.varint, n = protowire.ConsumeVarint(message)
		case protowire.BytesType:
			f.bytes, n = protowire.ConsumeBytes(message)
		default:
			t.Fatalf("field %d is of type %d", number, kind)
		}
		if n < 0 {
			t.Fatalf("field %d is truncated: %x", number, message)
		}
		message = message[n:]
		fields = append(fields, f)
	}
	return fields
}

// get returns the first field with the given number.
func get(fields []field, number protowire.Number) field {
	for _, f := range fields {
		if f.number == number {
			return f
		}
	}
	return field{}
}

// Field numbers and set numbers, from the .proto file.
const (
	watchReqNodeName = 1

	opSync, opSet, opDelete, opReset = 1, 2, 3, 4

	refSet, refPath     = 1, 2
	valueRef, valueData = 1, 2

	servicesSet, endpointsSet = 1, 2

	serviceNamespace, serviceName, serviceType, serviceIPs, serviceMapIP, servicePorts = 1, 2, 3, 4, 5, 6
	serviceExternalTrafficToLocal, serviceLabels, serviceAnnotations, serviceIPFilters = 7, 8, 9, 10
	serviceClientIP, serviceInternalTrafficToLocal, serviceHealthCheckNodePort         = 11, 12, 13

	serviceIPsClusterIPs, serviceIPsExternalIPs, serviceIPsHeadless, serviceIPsLoadBalancerIPs = 1, 2, 3, 4

	portName, portProtocol, portPort, portNodePort, portTargetPort, portTargetPortName = 1, 2, 3, 4, 5, 6

	ipFilterTargetIPs, ipFilterSourceRanges = 1, 2
	clientIPTimeoutSeconds                  = 1
	mapKey, mapValue                        = 1, 2

	endpointHostname, endpointIPs, endpointLocal, endpointPortOverrides, endpointScopes = 1, 2, 3, 4, 5

	endpointScopesInternal, endpointScopesExternal = 1, 2
	portNameName, portNamePort                     = 1, 2
	ipSetV4, ipSetV6                               = 1, 2
)

// tableClient stores received values by path, like backends of the original kpng.
type tableClient struct {
	t      *testing.T
	conn   *grpc.ClientConn
	stream grpc.ClientStream
	cancel context.CancelFunc
	node   string

	resets              int
	services, endpoints map[string]string // path → summary
}

func newTableClient(t *testing.T, ctx context.Context, address, node string) *tableClient {
	t.Helper()
	a, err := transport.ParseAddress(address)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := grpc.NewClient(strings.Replace(a.String(), "tcp://", "passthrough:///", 1),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"),
		// The flow-control windows have a fixed size. Otherwise gRPC could enlarge them until
		// all data fits into them.
		grpc.WithStaticStreamWindowSize(64<<10), grpc.WithStaticConnWindowSize(64<<10))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	ctx, cancel := context.WithCancel(ctx)
	t.Cleanup(cancel)
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/localv1.Sets/Watch", grpc.ForceCodecV2(bytesCodec{}))
	if err != nil {
		t.Fatal(err)
	}
	return &tableClient{t: t, conn: conn, stream: stream, cancel: cancel, node: node}
}

func (c *tableClient) recv() ([]byte, error) {
	defer time.AfterFunc(patience, c.cancel).Stop()
	var message []byte
	err := c.stream.RecvMsg(&message)
	return message, err
}

// next sends a request and applies the operations of the answer.
func (c *tableClient) next() {
	c.t.Helper()
	request := protowire.AppendString(protowire.AppendTag(nil, watchReqNodeName, protowire.BytesType), c.node)
	if err := c.stream.SendMsg(&request); err != nil {
		c.t.Fatal(err)
	}
	last := 0 // phase of the last operation: 1 set services, 2 set endpoints, 3 delete endpoints, 4 delete services
	for {
		message, err := c.recv()
		if err != nil {
			c.t.Fatal(err)
		}
		fields := parse(c.t, message)
		if len(fields) != 1 {
			c.t.Fatalf("an OpItem has the fields %v", fields)
		}
		op := fields[0]
		phase := last
		switch op.number {
		case opSync:
			return
		case opReset:
			c.resets++
			c.services, c.endpoints = map[string]string{}, map[string]string{}
		case opSet:
			value := parse(c.t, op.bytes)
			ref := parse(c.t, get(value, valueRef).bytes)
			path, data := string(get(ref, refPath).bytes), parse(c.t, get(value, valueData).bytes)
			switch get(ref, refSet).varint {
			case servicesSet:
				phase = 1
				c.services[path] = c.service(data)
				if want := string(get(data, serviceNamespace).bytes) + "/" + string(get(data, serviceName).bytes); path != want {
					c.t.Errorf("the service at %s has the name %s", path, want)
				}
			case endpointsSet:
				phase = 2
				scopes := parse(c.t, get(data, endpointScopes).bytes)
				internal, external := get(scopes, endpointScopesInternal).varint, get(scopes, endpointScopesExternal).varint
				if internal+external == 0 {
					c.t.Errorf("endpoint %s gets no traffic, but an old client uses it", path)
				}
				c.endpoints[path] = c.endpoint(data)
				if c.services[c.serviceOf(path)] == "" {
					c.t.Errorf("endpoint %s is set before its service", path)
				}
			default:
				c.t.Errorf("set %d, which was not requested", get(ref, refSet).varint)
			}
		case opDelete:
			ref := parse(c.t, op.bytes)
			path, from := string(get(ref, refPath).bytes), c.services
			phase = 4
			if get(ref, refSet).varint == endpointsSet {
				phase, from = 3, c.endpoints
			}
			if _, ok := from[path]; !ok {
				c.t.Errorf("%s is deleted but does not exist", path)
			}
			delete(from, path)
		default:
			c.t.Errorf("operation %d, which was not requested", op.number)
		}
		if phase < last {
			c.t.Errorf("phase %d follows phase %d", phase, last)
		}
		last = phase
	}
}

func (c *tableClient) serviceOf(path string) string { return path[:strings.LastIndex(path, "/")] }

// service returns a summary of a marshalled Service.
func (c *tableClient) service(data []field) string {
	ips := parse(c.t, get(data, serviceIPs).bytes)
	text := fmt.Sprintf("%s at %s external %s load balancer %s headless %d all %d local %d %d check %d labels %s %s",
		get(data, serviceType).bytes, c.ips(get(ips, serviceIPsClusterIPs)), c.ips(get(ips, serviceIPsExternalIPs)),
		c.ips(get(ips, serviceIPsLoadBalancerIPs)), get(ips, serviceIPsHeadless).varint, get(data, serviceMapIP).varint,
		get(data, serviceExternalTrafficToLocal).varint, get(data, serviceInternalTrafficToLocal).varint,
		get(data, serviceHealthCheckNodePort).varint, c.entries(data, serviceLabels), c.entries(data, serviceAnnotations))
	for port := range c.messages(data, servicePorts) {
		text += fmt.Sprintf(" port %s %d %d %d %d %s", get(port, portName).bytes, get(port, portProtocol).varint, get(port, portPort).varint,
			get(port, portNodePort).varint, get(port, portTargetPort).varint, get(port, portTargetPortName).bytes)
	}
	for filter := range c.messages(data, serviceIPFilters) {
		text += fmt.Sprintf(" filter %s %s", c.ips(get(filter, ipFilterTargetIPs)), texts(filter, ipFilterSourceRanges))
	}
	for affinity := range c.messages(data, serviceClientIP) {
		text += fmt.Sprintf(" affinity %d", get(affinity, clientIPTimeoutSeconds).varint)
	}
	return text
}

// endpoint returns a summary of a marshalled Endpoint.
func (c *tableClient) endpoint(data []field) string {
	scopes := parse(c.t, get(data, endpointScopes).bytes)
	text := fmt.Sprintf("%s at %s local %d internal %d external %d", get(data, endpointHostname).bytes, c.ips(get(data, endpointIPs)),
		get(data, endpointLocal).varint, get(scopes, endpointScopesInternal).varint, get(scopes, endpointScopesExternal).varint)
	for port := range c.messages(data, endpointPortOverrides) {
		text += fmt.Sprintf(" port %s %d", get(port, portNameName).bytes, get(port, portNamePort).varint)
	}
	return text
}

// ips returns a summary of a marshalled IPSet.
func (c *tableClient) ips(set field) string {
	fields := parse(c.t, set.bytes)
	return fmt.Sprint(texts(fields, ipSetV4), texts(fields, ipSetV6))
}

// entries decodes the protobuf map that has the given field number.
func (c *tableClient) entries(data []field, number protowire.Number) map[string]string {
	all := map[string]string{}
	for entry := range c.messages(data, number) {
		all[string(get(entry, mapKey).bytes)] = string(get(entry, mapValue).bytes)
	}
	return all
}

// messages yields the parsed messages in the fields with the given number.
func (c *tableClient) messages(data []field, number protowire.Number) iter.Seq[[]field] {
	return func(yield func([]field) bool) {
		for _, f := range data {
			if f.number == number && !yield(parse(c.t, f.bytes)) {
				return
			}
		}
	}
}

// texts returns the strings in the fields with the given number.
func texts(data []field, number protowire.Number) []string {
	list := []string{}
	for _, f := range data {
		if f.number == number {
			list = append(list, string(f.bytes))
		}
	}
	return list
}

// expectedState returns the services and endpoints that a client should get for the node.
func (w *world) expectedState(node string) (services, endpoints map[string]string) {
	services, endpoints = map[string]string{}, map[string]string{}
	f := feed.New(w.state, node)
	defer f.Close()
	u, _ := f.Next()
	for _, view := range u.After(types.NamespacedName{}) {
		v := view.Get()
		path := v.Key().String()
		services[path] = wantService(v.Service)
		for _, e := range v.Endpoints {
			if e.Scopes.Internal || e.Scopes.External {
				endpoints[path+"/"+e.Key()] = wantEndpoint(&e)
			}
		}
	}
	return services, endpoints
}

func wantService(s *api.Service) string {
	text := fmt.Sprintf("%s at %s external %s load balancer %s headless %d all %d local %d %d check %d labels %s %s",
		s.Type, wantIPs(s.IPs.ClusterIPs), wantIPs(s.IPs.ExternalIPs), wantIPs(s.IPs.LoadBalancerIPs), number(s.IPs.Headless), number(s.AllPorts),
		number(s.ExternalTrafficToLocal), number(s.InternalTrafficToLocal), s.HealthCheckNodePort, s.Labels, s.Annotations)
	for _, p := range s.Ports {
		text += fmt.Sprintf(" port %s %d %d %d %d %s", p.Name, p.Protocol, p.Port, p.NodePort, p.TargetPort, p.TargetPortName)
	}
	for _, f := range s.SourceRanges {
		text += fmt.Sprintf(" filter %s %s", wantIPs(f.TargetIPs), f.Prefixes)
	}
	if s.AffinitySeconds != 0 {
		text += fmt.Sprintf(" affinity %d", s.AffinitySeconds)
	}
	return text
}

func wantEndpoint(e *api.Endpoint) string {
	text := fmt.Sprintf("%s at %s local %d internal %d external %d", e.Hostname, wantIPs(api.NewIPSet(e.Addr)), number(e.Local),
		number(e.Scopes.Internal), number(e.Scopes.External))
	for _, p := range e.PortOverrides {
		text += fmt.Sprintf(" port %s %d", p.Name, p.Port)
	}
	return text
}

func wantIPs(s api.IPSet) string { return fmt.Sprint(s.Family(api.IPv4), s.Family(api.IPv6)) }

func number(b bool) int { return map[bool]int{true: 1}[b] }

func diffMaps(got, want map[string]string) []string {
	var lines []string
	for _, key := range slices.Sorted(maps.Keys(got)) {
		if w, ok := want[key]; !ok || w != got[key] {
			lines = append(lines, fmt.Sprintf("%s: got %q, want %q", key, got[key], cmp.Or(w, "nothing")))
		}
	}
	for _, key := range slices.Sorted(maps.Keys(want)) {
		if _, ok := got[key]; !ok {
			lines = append(lines, fmt.Sprintf("%s: got nothing, want %q", key, want[key]))
		}
	}
	return lines
}

func TestClientOfOriginalKpngFollows(t *testing.T) {
	w := newWorld(2, 6, 60)
	l := listen(t, "127.0.0.1:0")
	serveOn(t, w.state, l, quick)
	node := apitest.NodeName(2)
	c := newTableClient(t, t.Context(), "tcp://"+l.Addr().String(), node)
	c.next()
	for range 200 {
		services, endpoints := w.expectedState(node)
		if diff := append(diffMaps(c.services, services), diffMaps(c.endpoints, endpoints)...); len(diff) > 0 {
			t.Fatalf("at step %d:\n%s", w.step, strings.Join(diff, "\n"))
		}
		w.state.Update(func(tx *cluster.Tx) {
			for range 3 {
				w.Change(writer{tx})
			}
			w.step++
			tx.SetService(marker(w.step))
		})
		c.next()
	}
	if c.resets != 1 {
		t.Errorf("%d resets, want 1", c.resets)
	}
}

func TestLaggingClientStartsOver(t *testing.T) {
	w := newWorld(8, 3, 5)
	l := listen(t, "127.0.0.1:0")
	serveOn(t, w.state, l, quick)
	c := newTableClient(t, t.Context(), "tcp://"+l.Addr().String(), "node-1")
	c.next()
	for range 10_100 {
		w.mark()
	}
	services, endpoints := w.expectedState("node-1")
	// The server may still be sending the last changes. Wait until another client has
	// received them.
	for other := newTableClient(t, t.Context(), "tcp://"+l.Addr().String(), "node-1"); len(diffMaps(other.services, services)) > 0; {
		other.next()
	}
	c.next()
	if diff := append(diffMaps(c.services, services), diffMaps(c.endpoints, endpoints)...); len(diff) > 0 {
		t.Error(strings.Join(diff, "\n"))
	}
	if c.resets != 2 {
		t.Errorf("%d resets, want 2", c.resets)
	}
}

func unmarshal(t *testing.T, b []byte, m proto.Message) {
	t.Helper()
	if err := proto.Unmarshal(b, m); err != nil {
		t.Fatal(err)
	}
}
