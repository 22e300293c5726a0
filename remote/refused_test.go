// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"fmt"
	"net/netip"
	"strconv"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/remote"
	"github.com/kpng-project/kpng/sink/sinktest"
	"k8s.io/apimachinery/pkg/types"
)

// A client refuses a view that is too large, even if the server accepts the service.
func TestClientKeepsLastAcceptedView(t *testing.T) {
	state := cluster.New(cluster.Options{Resumable: true})
	web := func(uid string, ports int) *api.Service {
		s := external("web", 1, 0, ports)
		s.UID = types.UID(uid)
		return s
	}
	endpoints := func(n int) *api.EndpointSlice {
		s := &api.EndpointSlice{Namespace: web("", 0).Namespace, Name: "web-1", ServiceName: "web", Family: api.IPv4}
		for i := range 20 {
			s.Ports = append(s.Ports, api.EndpointPort{Name: fmt.Sprint(i), Protocol: api.TCP, Port: 80})
		}
		for i := range n {
			s.Endpoints = append(s.Endpoints, api.SliceEndpoint{Addr: netip.AddrFrom4([4]byte{172, 16, 0, byte(i)}), Conditions: api.Conditions{Ready: true, Serving: true}})
		}
		return s
	}
	state.Update(func(tx *cluster.Tx) { tx.SetService(web("a", 11)); tx.SetService(marker(0)) })
	state.SetSynced()
	address := socket(t)
	_, stop := serve(t, state, address, quick)
	client, err := remote.NewClient(remote.ClientOptions{
		NodeName: "n", MaxElements: 10,
		DialOptions: remote.Quick(remote.DialOptions{Addresses: []string{address}}),
	})
	if err != nil {
		t.Fatal(err)
	}
	start(t, client.Run)
	rec := sinktest.NewRecorder(t, nil)
	drive(t, client.Source(), rec)

	for i, step := range []struct {
		name  string
		write func(tx *cluster.Tx)
		want  string
	}{
		{"a view that is too large from the beginning", func(tx *cluster.Tx) {}, "absent, refused"},
		{"a small view", func(tx *cluster.Tx) { tx.SetService(web("a", 2)); tx.SetSlice(endpoints(1)) }, "2 ports, 1 endpoints"},
		{"ports too many", func(tx *cluster.Tx) { tx.SetService(web("a", 6)) }, "2 ports, 1 endpoints, refused"},
		{"more endpoints meanwhile", func(tx *cluster.Tx) { tx.SetSlice(endpoints(2)) }, "2 ports, 1 endpoints, refused"},
		{"fewer ports", func(tx *cluster.Tx) { tx.SetService(web("a", 3)) }, "3 ports, 2 endpoints"},
		{"endpoints too many", func(tx *cluster.Tx) { tx.SetSlice(endpoints(5)) }, "3 ports, 2 endpoints, refused"},
		{"a new server has the same view", func(tx *cluster.Tx) {
			stop()
			_, stop = serve(t, state, address, quick)
		}, "3 ports, 2 endpoints, refused"},
		{"a new object of the same name", func(tx *cluster.Tx) { tx.SetService(web("b", 3)) }, "absent, refused"},
		{"fewer endpoints", func(tx *cluster.Tx) { tx.SetSlice(endpoints(1)) }, "3 ports, 1 endpoints"},
		{"a refused service is deleted", func(tx *cluster.Tx) { tx.SetSlice(endpoints(6)) }, "3 ports, 1 endpoints, refused"},
		{"and everything is gone", func(tx *cluster.Tx) { tx.DeleteService(web("b", 3).Key()) }, "absent"},
	} {
		state.Update(func(tx *cluster.Tx) {
			step.write(tx)
			tx.SetService(marker(i + 1))
		})
		if err := rec.Wait(within(t), func([]sinktest.Sync) bool {
			views := rec.Views()
			return len(views) > 0 && views[len(views)-1].Service.Annotations[markerAnnotation] == strconv.Itoa(i+1)
		}); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		got := "absent"
		for _, view := range rec.Views() {
			if view.Service.Name == "web" {
				got = fmt.Sprintf("%d ports, %d endpoints", len(view.Service.Ports), len(view.Endpoints))
			}
		}
		for key := range client.Refused() {
			if key.Name != "web" {
				t.Errorf("%s: %s is refused", step.name, key)
			}
			got += ", refused"
		}
		if diff := cmp.Diff(step.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", step.name, diff)
		}
	}
}

// A scrape of the metrics calls Refused. So the cost of Refused must not depend on the
// number of all services.
func TestCostOfRefusedDependsOnRefusedServicesOnly(t *testing.T) {
	measure := func(services int) func() time.Duration {
		state := cluster.New(cluster.Options{Resumable: true})
		state.Update(func(tx *cluster.Tx) {
			for i := range services {
				tx.SetService(external(fmt.Sprint("web-", i), 1, 0, 1))
			}
			tx.SetService(external("large", 1, 0, 11))
		})
		state.SetSynced()
		address := socket(t)
		serve(t, state, address, quick)
		client, err := remote.NewClient(remote.ClientOptions{NodeName: "n", MaxElements: 10, DialOptions: remote.DialOptions{Addresses: []string{address}}})
		if err != nil {
			t.Fatal(err)
		}
		start(t, client.Run)
		select {
		case <-client.Source().Changed():
		case <-within(t).Done():
			t.Fatal("the client received nothing")
		}
		return func() time.Duration {
			begin := time.Now()
			for range 100 {
				if n := len(client.Refused()); n != 1 {
					t.Fatalf("%d services are refused", n)
				}
			}
			return time.Since(begin)
		}
	}
	few, many := measure(10), measure(2000)
	a, b := time.Hour, time.Hour
	for range 10 {
		a = min(a, few())
	}
	for range 10 {
		if b = min(b, many()); b < 20*a {
			return
		}
	}
	t.Errorf("with 10 services %v, with 2,000 services %v", a, b)
}
