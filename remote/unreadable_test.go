// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"github.com/kpng-project/kpng/remote"
	"github.com/kpng-project/kpng/sink/sinktest"
	"google.golang.org/grpc"
	"k8s.io/klog/v2"
)

// scripted is a server that sends the elements of the field answers, one for each
// request. After the last element, it sends nothing.
type scripted struct {
	localv1.UnimplementedSetsServer
	answers [][]*localv1.OpItem
}

func (s scripted) Watch(stream grpc.BidiStreamingServer[localv1.WatchReq, localv1.OpItem]) error {
	for _, answer := range s.answers {
		if _, err := stream.Recv(); err != nil {
			return err
		}
		for _, item := range answer {
			if err := stream.Send(item); err != nil {
				return err
			}
		}
	}
	<-stream.Context().Done()
	return nil
}

func resetItem() *localv1.OpItem {
	return &localv1.OpItem{Op: &localv1.OpItem_Reset_{Reset_: &localv1.EmptyOp{}}}
}

func syncItem() *localv1.OpItem {
	return &localv1.OpItem{Op: &localv1.OpItem_Sync{Sync: &localv1.EmptyOp{}}}
}

func setItem(set localv1.Set, path string, value []byte) *localv1.OpItem {
	return &localv1.OpItem{Op: &localv1.OpItem_Set{Set: &localv1.Value{Ref: &localv1.Ref{Set: set, Path: path}, Bytes: value}}}
}

// If an answer has an unreadable object, the client must use the readable objects of the
// answer.
func TestUnreadableObjectIsIgnored(t *testing.T) {
	service := func(name, ip string) *localv1.Service {
		return &localv1.Service{Namespace: "ns", Name: name, IPs: &localv1.ServiceIPs{ClusterIPs: &localv1.IPSet{V4: []string{ip}}}}
	}
	setService := func(name, ip string) *localv1.OpItem {
		return setItem(localv1.Set_ServicesSet, "ns/"+name, localv1.Marshal(service(name, ip)))
	}
	endpoint := func(ips ...string) *localv1.Endpoint { return &localv1.Endpoint{IPs: &localv1.IPSet{V4: ips}} }
	setEndpoint := func(path string, ips ...string) *localv1.OpItem {
		return setItem(localv1.Set_EndpointsSet, "ns/"+path, localv1.Marshal(endpoint(ips...)))
	}
	setNode := func(ip string) *localv1.OpItem {
		return setItem(localv1.Set_NodesSet, "n", localv1.Marshal(&localv1.Node{Name: "n", Addresses: []*localv1.NodeAddress{{IP: ip}}}))
	}
	replace := func(s *localv1.Service, endpoints ...*localv1.Endpoint) *localv1.OpItem {
		whole := &localv1.WholeService{Service: s}
		for i, e := range endpoints {
			whole.Endpoints = append(whole.Endpoints, &localv1.KeyedEndpoint{Key: string(rune('a' + i)), Endpoint: e})
		}
		return &localv1.OpItem{Op: &localv1.OpItem_Replace{Replace: whole}}
	}
	first := []*localv1.OpItem{
		resetItem(), setNode("192.168.0.1"), setService("one", "10.0.0.1"), setService("two", "10.0.0.2"),
		setEndpoint("one/a", "172.16.0.1"), setEndpoint("one/b", "172.16.0.2"), syncItem(),
	}
	const before = "node [192.168.0.1]; ns/one 10.0.0.1: 172.16.0.1 172.16.0.2; ns/two 10.0.0.2:"
	done := setService("zzz", "10.9.9.9")
	for _, test := range []struct {
		name    string
		second  []*localv1.OpItem
		want    string // the client's state, except the service zzz
		reports []string
	}{
		{"an endpoint with two addresses", []*localv1.OpItem{setEndpoint("one/a", "10.1.0.1", "10.1.0.2"), setEndpoint("two/a", "172.16.0.3")},
			before + " 172.16.0.3", []string{"endpoint ns/one/a: endpoint has 2 addresses"}},
		{"an endpoint that is not a message", []*localv1.OpItem{setItem(localv1.Set_EndpointsSet, "ns/one/a", []byte{0xff})},
			before, []string{"endpoint ns/one/a: proto"}},
		{"a path that is not an endpoint's", []*localv1.OpItem{setEndpoint("one", "172.16.0.9")}, before, []string{"is not the path of an endpoint"}},
		{"a service with a bad address", []*localv1.OpItem{setService("one", "x"), setService("two", "10.0.0.22")},
			"node [192.168.0.1]; ns/one 10.0.0.1: 172.16.0.1 172.16.0.2; ns/two 10.0.0.22:", []string{"service ns/one: ParseAddr"}},
		{"a node with a bad address", []*localv1.OpItem{setNode("x")}, before, []string{"node n: node n: ParseAddr"}},
		{"a whole service with a bad endpoint", []*localv1.OpItem{replace(service("one", "10.0.0.11"), endpoint("172.16.0.1"), endpoint())},
			"node [192.168.0.1]; ns/one 10.0.0.11: 172.16.0.1; ns/two 10.0.0.2:", []string{"service ns/one: endpoint b: endpoint has 0 addresses"}},
		{"a whole service with a bad address", []*localv1.OpItem{replace(service("one", "x"), endpoint("172.16.0.5"))},
			"node [192.168.0.1]; ns/one 10.0.0.1: 172.16.0.5; ns/two 10.0.0.2:", []string{"service ns/one"}},
		{"the client keeps its state after a reset", []*localv1.OpItem{resetItem(), setNode("x"), replace(service("one", "x"), endpoint("172.16.0.5"))},
			"node [192.168.0.1]; ns/one 10.0.0.1: 172.16.0.5", []string{"node n", "service ns/one"}},
		{"a bad service that the client does not have", []*localv1.OpItem{setService("new", "x"), setEndpoint("new/a", "172.16.0.9")},
			before, []string{"service ns/new", "service ns/new: received endpoints without the service"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			address := socket(t)
			l := listen(t, address)
			server := grpc.NewServer()
			localv1.RegisterSetsServer(server, scripted{answers: [][]*localv1.OpItem{first, append(slices.Clone(test.second), done, syncItem())}})
			go server.Serve(l)
			t.Cleanup(server.Stop)

			reports := make(chan string, 100)
			client, stop := followLogging(t, "n", address, reports)
			rec := sinktest.NewRecorder(t, nil)
			drive(t, client.Source(), rec)
			if err := rec.Wait(within(t), func([]sinktest.Sync) bool {
				views := rec.Views()
				return len(views) > 0 && views[len(views)-1].Service.Name == "zzz"
			}); err != nil {
				t.Fatal(err)
			}
			stop()
			got := "node"
			for _, a := range client.Views().Node.Addresses {
				got += " [" + a.IP.String() + "]"
			}
			for _, v := range rec.Views()[:len(rec.Views())-1] {
				got += "; " + v.Key().String() + " " + v.Service.IPs.ClusterIPs.Family(api.IPv4)[0].String() + ":"
				for _, e := range v.Endpoints {
					got += " " + e.Addr.String()
				}
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
			close(reports)
			for _, want := range test.reports {
				if got := <-reports; !strings.Contains(got, want) {
					t.Errorf("reported %s, want %q", got, want)
				}
			}
			for more := range reports {
				t.Errorf("reported %s", more)
			}
		})
	}
}

// followLogging is like follow, but also sends the client's log lines about unreadable
// objects to the channel reports.
func followLogging(t *testing.T, node, address string, reports chan<- string) (client *remote.Client, stop func()) {
	t.Helper()
	client, err := remote.NewClient(remote.ClientOptions{
		NodeName: node, DialOptions: remote.Quick(remote.DialOptions{Addresses: []string{address}}),
	})
	if err != nil {
		t.Fatal(err)
	}
	log := funcr.New(func(_, line string) {
		if strings.Contains(line, "Ignored an unreadable object") {
			reports <- line
		}
	}, funcr.Options{})
	return client, start(t, func(ctx context.Context) error { return client.Run(klog.NewContext(ctx, log)) })
}

// The API server would reject these objects, but another source may contain them.
func TestInvalidObjectDoesNotStopOthers(t *testing.T) {
	addr := netip.MustParseAddr
	state := cluster.New(cluster.Options{Resumable: true})
	state.Update(func(tx *cluster.Tx) {
		tx.SetNode(&api.Node{Name: "n", Addresses: []api.NodeAddress{{Type: "InternalIP"}, {Type: "InternalIP", IP: addr("192.168.0.1")}}})
		tx.SetService(plain("good", 80))
		badRange := plain("bad-range", 80)
		badRange.SourceRanges = []api.SourceRanges{{TargetIPs: badRange.IPs.ClusterIPs, Prefixes: make([]netip.Prefix, 1)}}
		tx.SetService(badRange)
		named := plain("named", 80)
		named.IPs.ClusterIPs = api.NewIPSet(addr("10.0.0.1"))
		named.Ports[0].Name = "\xff"
		tx.SetService(named)
		tx.SetSlice(&api.EndpointSlice{
			Namespace: named.Namespace, Name: "sl", ServiceName: "named", Family: api.IPv4,
			Ports: []api.EndpointPort{{Name: "\xff", Protocol: api.TCP, Port: 8080}},
			Endpoints: []api.SliceEndpoint{
				{Addr: addr("172.16.0.1"), Conditions: api.Conditions{Ready: true, Serving: true}},
				{Conditions: api.Conditions{Ready: true, Serving: true}},
			},
		})
	})
	state.SetSynced()
	address := socket(t)
	serve(t, state, address, quick)
	reports := make(chan string, 100)
	client, stop := followLogging(t, "n", address, reports)
	rec := sinktest.NewRecorder(t, nil)
	drive(t, client.Source(), rec)
	if err := rec.Wait(within(t), atLeast(1)); err != nil {
		t.Fatal(err)
	}
	got := ""
	for _, v := range rec.Views() {
		got += v.Service.Name + " " + v.Service.Ports[0].Name
		for _, e := range v.Endpoints {
			got += " " + e.Addr.String()
		}
		got += ";"
	}
	if want := "good ;named \uFFFD 172.16.0.1;"; got != want {
		t.Errorf("client has %q, want %q", got, want)
	}
	if node := client.Views().Node; node == nil || len(node.Addresses) != 1 {
		t.Errorf("node %+v", node)
	}
	stop()
	close(reports)
	if got, want := <-reports, "service plain/bad-range"; !strings.Contains(got, want) {
		t.Errorf("reported %s, want %q", got, want)
	}
	for more := range reports {
		t.Errorf("reported %s", more)
	}
}
