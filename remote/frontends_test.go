// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// setsClient starts a server of the state and returns a client of this server. The client
// is generated code with the default options of gRPC.
func setsClient(t *testing.T, state *cluster.State) localv1.SetsClient {
	t.Helper()
	l := listen(t, "127.0.0.1:0")
	serveOn(t, state, l, quick)
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return localv1.NewSetsClient(conn)
}

// A client that requests frontends receives them in place of services.
func TestFrontendsReplaceServices(t *testing.T) {
	state := cluster.New(cluster.Options{Resumable: true})
	service := *hinted
	service.Type, service.ExternalTrafficToLocal = api.LoadBalancer, true
	service.AffinitySeconds = 60
	service.IPs.LoadBalancerIPs = api.NewIPSet(netip.MustParseAddr("203.0.113.1"))
	service.SourceRanges = []api.SourceRanges{{
		TargetIPs: service.IPs.LoadBalancerIPs, Prefixes: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")},
	}}
	update(state, func(to apitest.Writer) {
		to.SetNode(&api.Node{Name: "in-a", Labels: map[string]string{"topology.kubernetes.io/zone": "a"}})
		to.SetService(&service)
		to.SetSlice(hintedSlice)
	})
	state.SetSynced()
	client := setsClient(t, state)

	// The function answer sends a request and returns the answer's operations and token.
	answer := func(stream grpc.BidiStreamingClient[localv1.WatchReq, localv1.OpItem], req *localv1.WatchReq) (ops []string, token []byte) {
		t.Helper()
		req.NodeName, req.Frontends = "in-a", true
		if err := stream.Send(req); err != nil {
			t.Fatal(err)
		}
		for {
			item, err := stream.Recv()
			if err != nil {
				t.Fatal(err)
			}
			switch op := item.Op.(type) {
			case *localv1.OpItem_Reset_:
				ops = append(ops, "reset")
			case *localv1.OpItem_Sync:
				return ops, item.Resume
			case *localv1.OpItem_Delete:
				ops = append(ops, fmt.Sprintf("delete %s %s", op.Delete.Set, op.Delete.Path))
			case *localv1.OpItem_Set:
				var value localv1.ServiceFrontends
				if err := proto.Unmarshal(op.Set.Bytes, &value); err != nil {
					t.Fatal(err)
				}
				ops = append(ops, fmt.Sprintf("set %s %s %s", op.Set.Ref.Set, op.Set.Ref.Path, frontendsText(t, &value)))
			default:
				t.Fatalf("operation %T", op)
			}
		}
	}
	watch := func() grpc.BidiStreamingClient[localv1.WatchReq, localv1.OpItem] {
		stream, err := client.Watch(within(t))
		if err != nil {
			t.Fatal(err)
		}
		return stream
	}

	here, drop := `{"Verdict":"Forward"}`, `{"Verdict":"Drop"}`
	text := func(external, keep string) string {
		return `set FrontendsSet plain/hinted {"Frontends":[` +
			`{"AffinitySeconds":60,"Elsewhere":` + here + `,"Family":"IPv4","IP":"10.0.0.1",` + keep + `"Kind":"ClusterIP",` +
			`"Masquerade":"MasqueradeIfConfigured","Node":` + here + `,"Port":80,"Protocol":"TCP"},` +
			`{"AffinitySeconds":60,"Elsewhere":` + external + `,"Family":"IPv4","IP":"203.0.113.1",` + keep + `"Kind":"LoadBalancerIP",` +
			`"Masquerade":"MasqueradeNode","Node":` + here + `,"Port":80,"Protocol":"TCP","Restricted":true}],`
	}
	const sources = `"Name":"hinted","Namespace":"plain","Sources":[{"OwnSources":["203.0.113.1"],"SourceRanges":["192.0.2.0/24"]}]}`
	stream := watch()
	got, _ := answer(stream, &localv1.WatchReq{Resumption: &localv1.WatchReq_Resume{}})
	want := []string{"reset", text(here, `"Keep":2,`) + // existing flows to an endpoint with a hint for another zone
		`"Lists":[{"Targets":[{"IP":"172.16.0.1","Local":true,"NodeName":"in-a","Port":80}]},{"Targets":[{"IP":"172.16.0.2","NodeName":"in-b","Port":80}]}],` + sources}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("first answer (-want +got):\n%s", diff)
	}

	moved := *hintedSlice
	moved.Endpoints = hintedSlice.Endpoints[1:]
	update(state, func(to apitest.Writer) { to.SetSlice(&moved) })
	got, token := answer(stream, &localv1.WatchReq{})
	want = []string{text(drop, "") + `"Lists":[{"Targets":[{"IP":"172.16.0.2","NodeName":"in-b","Port":80}]}],` + sources}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("after a change (-want +got):\n%s", diff)
	}

	update(state, func(to apitest.Writer) { to.DeleteService(service.Key()) })
	want = []string{"delete FrontendsSet plain/hinted"}
	if got, _ := answer(stream, &localv1.WatchReq{}); !cmp.Equal(want, got) {
		t.Errorf("after the service is deleted: %q, want %q", got, want)
	}
	if got, _ := answer(watch(), &localv1.WatchReq{Resumption: &localv1.WatchReq_Resume{Resume: token}}); !cmp.Equal(want, got) {
		t.Errorf("resumed before the service was deleted: %q, want %q", got, want)
	}
}

// frontendsText returns m as JSON without the random white space of protojson.
func frontendsText(t *testing.T, m *localv1.ServiceFrontends) string {
	t.Helper()
	text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	var value any
	if err := json.Unmarshal(text, &value); err != nil {
		t.Fatal(err)
	}
	if text, err = json.Marshal(value); err != nil {
		t.Fatal(err)
	}
	return string(text)
}
