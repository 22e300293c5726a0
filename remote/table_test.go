// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/api/apitest"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/feed"
	"github.com/kpng-project/kpng/remote/transport"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

// A client of the first kpng, written from the table of docs/wire.md alone. It
// knows nothing of our generated code.

// bytesCodec sends and receives messages as bytes.
type bytesCodec struct{}

func (bytesCodec) Name() string { return "proto" }

func (bytesCodec) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(*v.(*[]byte))}, nil
}

func (bytesCodec) Unmarshal(data mem.BufferSlice, v any) error {
	*v.(*[]byte) = data.Materialize()
	return nil
}

// field is a field of a message: of type varint or bytes, as the number says.
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
			t.Fatalf("no tag in %x", message)
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
			t.Fatalf("field %d is cut short: %x", number, message)
		}
		message = message[n:]
		fields = append(fields, f)
	}
	return fields
}

// get returns the first field of a number.
func get(fields []field, number protowire.Number) field {
	for _, f := range fields {
		if f.number == number {
			return f
		}
	}
	return field{}
}

// The numbers of the table.
const (
	watchReqNodeName = 1

	opSync, opSet, opDelete, opReset = 1, 2, 3, 4

	refSet, refPath     = 1, 2
	valueRef, valueData = 1, 2

	servicesSet, endpointsSet = 1, 2

	serviceNamespace, serviceName, serviceIPs      = 1, 2, 4
	serviceIPsClusterIPs                           = 1
	endpointIPs, endpointLocal, endpointScopes     = 2, 3, 5
	endpointScopesInternal, endpointScopesExternal = 1, 2
	ipSetV4, ipSetV6                               = 1, 2
)

// tableClient holds what it was told by path, as old backends do.
type tableClient struct {
	t      *testing.T
	conn   *grpc.ClientConn
	stream grpc.ClientStream
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
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/localv1.Sets/Watch", grpc.ForceCodecV2(bytesCodec{}))
	if err != nil {
		t.Fatal(err)
	}
	return &tableClient{t: t, conn: conn, stream: stream, node: node}
}

// next asks for the next operations and applies them, to the Sync.
func (c *tableClient) next() {
	c.t.Helper()
	request := protowire.AppendString(protowire.AppendTag(nil, watchReqNodeName, protowire.BytesType), c.node)
	if err := c.stream.SendMsg(&request); err != nil {
		c.t.Fatal(err)
	}
	last := 0 // of the phases: services set, endpoints set, endpoints deleted, services deleted
	for {
		var message []byte
		if err := c.stream.RecvMsg(&message); err != nil {
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
				c.services[path] = c.summary(get(parse(c.t, get(data, serviceIPs).bytes), serviceIPsClusterIPs))
				if want := string(get(data, serviceNamespace).bytes) + "/" + string(get(data, serviceName).bytes); path != want {
					c.t.Errorf("the service at %s says it is %s", path, want)
				}
			case endpointsSet:
				phase = 2
				scopes := parse(c.t, get(data, endpointScopes).bytes)
				internal, external := get(scopes, endpointScopesInternal).varint, get(scopes, endpointScopesExternal).varint
				if internal+external == 0 {
					c.t.Errorf("endpoint %s takes no traffic, and an old client balances to it", path)
				}
				c.endpoints[path] = fmt.Sprint(c.summary(get(data, endpointIPs)), get(data, endpointLocal).varint, internal, external)
				if c.services[c.serviceOf(path)] == "" {
					c.t.Errorf("endpoint %s comes before its service", path)
				}
			default:
				c.t.Errorf("set %d, which was not asked for", get(ref, refSet).varint)
			}
		case opDelete:
			ref := parse(c.t, op.bytes)
			path, from := string(get(ref, refPath).bytes), c.services
			phase = 4
			if get(ref, refSet).varint == endpointsSet {
				phase, from = 3, c.endpoints
			}
			if _, ok := from[path]; !ok {
				c.t.Errorf("%s is deleted and was not there", path)
			}
			delete(from, path)
		default:
			c.t.Errorf("operation %d, which was not asked for", op.number)
		}
		if phase < last {
			c.t.Errorf("phase %d comes after phase %d", phase, last)
		}
		last = phase
	}
}

func (c *tableClient) serviceOf(path string) string { return path[:strings.LastIndex(path, "/")] }

func (c *tableClient) summary(ips field) string {
	fields := parse(c.t, ips.bytes)
	return fmt.Sprintf("%s,%s", get(fields, ipSetV4).bytes, get(fields, ipSetV6).bytes)
}

// want returns what the client should have by now.
func (w *world) want(node string) (services, endpoints map[string]string) {
	services, endpoints = map[string]string{}, map[string]string{}
	f := feed.New(w.state, node)
	defer f.Close()
	u, _ := f.Next()
	for c := range u.Services {
		path := c.Key.String()
		ips := c.New.Service.IPs.ClusterIPs
		v4, v6 := "", ""
		if len(ips.V4) > 0 {
			v4 = ips.V4[0].String()
		}
		if len(ips.V6) > 0 {
			v6 = ips.V6[0].String()
		}
		services[path] = v4 + "," + v6
		for _, e := range c.New.Endpoints {
			if !e.Scopes.Internal && !e.Scopes.External {
				continue
			}
			ip := "," + e.Addr().String()
			if e.Addr().Is4() {
				ip = e.Addr().String() + ","
			}
			number := func(b bool) int { return map[bool]int{true: 1}[b] }
			endpoints[path+"/"+e.Key()] = fmt.Sprint(ip, number(e.Local), number(e.Scopes.Internal), number(e.Scopes.External))
		}
	}
	return services, endpoints
}

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

func TestAClientOfTheFirstKpngFollows(t *testing.T) {
	ctx := within(t)
	w := newWorld(2, 6, 60)
	l := listen(t, "127.0.0.1:0")
	serveOn(t, w.state, l, quick)
	node := apitest.NodeName(2)
	c := newTableClient(t, ctx, "tcp://"+l.Addr().String(), node)
	c.next()
	for range 200 {
		services, endpoints := w.want(node)
		if diff := append(diffMaps(c.services, services), diffMaps(c.endpoints, endpoints)...); len(diff) > 0 {
			t.Fatalf("at step %d:\n%s", w.step, strings.Join(diff, "\n"))
		}
		w.state.Update(func(tx *cluster.Tx) {
			for range 3 {
				w.Change(writer{tx})
			}
			w.step++
			tx.SetService(0, marker(w.step))
		})
		c.next()
	}
	if c.resets != 1 {
		t.Errorf("%d resets, want 1", c.resets)
	}
}

func TestAClientThatLagsStartsOver(t *testing.T) {
	w := newWorld(8, 3, 5)
	l := listen(t, "127.0.0.1:0")
	serveOn(t, w.state, l, quick)
	c := newTableClient(t, within(t), "tcp://"+l.Addr().String(), "node-1")
	c.next()
	for range 10_100 {
		w.mark()
	}
	c.next()
	services, endpoints := w.want("node-1")
	if diff := append(diffMaps(c.services, services), diffMaps(c.endpoints, endpoints)...); len(diff) > 0 {
		t.Error(strings.Join(diff, "\n"))
	}
	if c.resets != 2 {
		t.Errorf("%d resets, want 2", c.resets)
	}
}
