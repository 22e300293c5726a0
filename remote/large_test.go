// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"google.golang.org/protobuf/proto"
)

// external returns a service with external IPs and ports. A smaller argument age means
// an older service.
func external(name string, age, ips, ports int) *api.Service {
	s := plain(name, 0)
	s.Created = time.Unix(int64(age), 0)
	s.IPs.ClusterIPs = api.NewIPSet(netip.AddrFrom4([4]byte{10, 0, 0, byte(age)}))
	s.Ports = nil
	s.IPs.ExternalIPs = apitest.IPs("192.168.0.0", ips)
	for i := range ports {
		s.Ports = append(s.Ports, api.PortMapping{Name: fmt.Sprint(i), Protocol: api.TCP, Port: int32(i + 1), TargetPort: 80})
	}
	return s
}

// Clients with the default limit of gRPC, 4 MB for a message, receive all services that
// fit into a message, even if other users create larger objects.
func TestNoObjectStopsAStream(t *testing.T) {
	const ips, ports = 600, 50
	winner, loser := external(strings.Repeat("w", 63), 1, ips, ports), external("loser", 2, ips+1, ports)
	winner.Namespace = strings.Repeat("w", 63)
	many := external("many-frontends", 3, 0, 50)
	many.IPs.ExternalIPs = apitest.IPs("172.30.0.0", 400)
	for i := range many.Ports {
		many.Ports[i].Name = fmt.Sprintf("%0200d", i)
	}
	ranges := external("ranges", 4, 0, 50)
	ranges.Type, ranges.IPs.LoadBalancerIPs = api.LoadBalancer, api.NewIPSet(netip.MustParseAddr("203.0.113.1"))
	list := api.SourceRanges{TargetIPs: ranges.IPs.LoadBalancerIPs}
	for i := range 10_000 {
		list.Prefixes = append(list.Prefixes, netip.PrefixFrom(netip.AddrFrom4([4]byte{20, byte(i >> 8), byte(i), 0}), 24))
	}
	ranges.SourceRanges = []api.SourceRanges{list}
	large := external("large", 5, 0, 1)
	large.Annotations = map[string]string{"text": strings.Repeat("x", 5<<20)}
	last := external("small", 6, 0, 1)

	state := cluster.New(cluster.Options{Resumable: true})
	state.Update(func(tx *cluster.Tx) {
		for _, s := range []*api.Service{winner, loser, many, ranges, large, last} {
			tx.SetService(s)
		}
	})
	state.SetSynced()
	client := setsClient(t, state)
	for _, test := range []struct {
		name string
		req  *localv1.WatchReq
		want []string
	}{
		{"services", &localv1.WatchReq{}, []string{"loser: 2 IPs, 0 lost", "many-frontends: 401 IPs, 0 lost", "ranges: 1 IPs, 0 lost", "small: 1 IPs, 0 lost", winner.Name + ": 601 IPs, 0 lost"}},
		{"whole services", &localv1.WatchReq{Resumption: &localv1.WatchReq_Resume{}}, []string{"loser: 2 IPs, 0 lost", "many-frontends: 401 IPs, 0 lost", "ranges: 1 IPs, 0 lost", "small: 1 IPs, 0 lost", winner.Name + ": 601 IPs, 0 lost"}},
		{"frontends", &localv1.WatchReq{Frontends: true}, []string{"large: 1 frontends", "loser: 100 frontends", "ranges: 100 frontends", "small: 1 frontends", winner.Name + ": 30050 frontends"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			stream, err := client.Watch(within(t))
			if err != nil {
				t.Fatal(err)
			}
			if err := stream.Send(test.req); err != nil {
				t.Fatal(err)
			}
			var got []string
			addService := func(s *localv1.Service) {
				got = append(got, fmt.Sprintf("%s: %d IPs, %d lost", s.Name, len(s.IPs.ClusterIPs.V4)+len(s.IPs.GetExternalIPs().GetV4()), len(s.Lost)))
			}
			for {
				item, err := stream.Recv()
				if err != nil {
					t.Fatal(err)
				}
				switch op := item.Op.(type) {
				case *localv1.OpItem_Replace:
					addService(op.Replace.Service)
				case *localv1.OpItem_Set:
					var s localv1.Service
					var f localv1.ServiceFrontends
					if op.Set.Ref.Set == localv1.Set_FrontendsSet {
						if err := proto.Unmarshal(op.Set.Bytes, &f); err != nil {
							t.Fatal(err)
						}
						got = append(got, fmt.Sprintf("%s: %d frontends", f.Name, len(f.Frontends)))
					} else if err := proto.Unmarshal(op.Set.Bytes, &s); err != nil {
						t.Fatal(err)
					} else {
						addService(&s)
					}
				case *localv1.OpItem_Sync:
					slices.Sort(got)
					if diff := cmp.Diff(test.want, got); diff != "" {
						t.Errorf("-want +got:\n%s", diff)
					}
					return
				}
			}
		})
	}
}
