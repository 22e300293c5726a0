// SPDX-License-Identifier: Apache-2.0

// Command start starts the backend nftables, iptables, ipvs or ebpf, and calls its method Sync
// with a service that has session affinity. Then it stops the backend and cleans up. It
// prints the resulting errors, if any.
package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/ebpf"
	"github.com/kpng-project/kpng/backends/iptables"
	"github.com/kpng-project/kpng/backends/ipvs"
	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
)

type backend interface {
	sink.Sink
	sink.Starter
	sink.Stopper
	sink.Cleaner
}

func main() {
	ctx := context.Background()
	b, err := func() (backend, error) {
		switch os.Args[1] {
		case "iptables":
			return iptables.New(iptables.Options{})
		case "ipvs":
			return ipvs.New(ipvs.Options{})
		case "ebpf":
			return newEBPF(ebpf.Options{})
		case "ebpf-host-network-only":
			if err := unix.Mount("bpf", "/sys/fs/bpf", "bpf", 0, "mode=700"); err != nil {
				return nil, err
			}
			return newEBPF(ebpf.Options{HostNetworkOnly: true})
		default:
			return nftables.New(nftables.Options{Options: backends.Options{Sysctls: backends.IgnoreSysctls}})
		}
	}()
	if err != nil {
		panic(err)
	}
	err = b.Start(ctx)
	fmt.Println("start:", err)
	if err == nil {
		view := service()
		one := func(yield func(sink.Change) bool) { yield(sink.Change{Key: view.Key(), New: view, Unsure: true}) }
		fmt.Println("sync:", b.Sync(ctx, &sink.Changes{First: true, Last: true, NodeChanged: true, Services: one}))
	}
	fmt.Println("stop:", b.Stop(ctx))
	fmt.Println("cleanup:", b.Cleanup(ctx))
}

// newEBPF returns a backend that attaches its programs to a new cgroup.
func newEBPF(opts ebpf.Options) (backend, error) {
	opts.Cgroup = "/sys/fs/cgroup/kpng-start"
	if err := os.Mkdir(opts.Cgroup, 0o755); err != nil {
		return nil, err
	}
	return ebpf.New(sink.Func(func(context.Context, *sink.Changes) error { return nil }), opts)
}

// service returns the view of a service with session affinity.
func service() *api.View {
	svc := &api.Service{
		Namespace: "default", Name: "web", Type: api.ClusterIP, IPFamilies: []api.Family{api.IPv4},
		Ports: []api.PortMapping{{Protocol: api.TCP, Port: 80}},
	}
	svc.IPs.ClusterIPs.Add(netip.MustParseAddr("10.96.0.1"))
	svc.AffinitySeconds = 60
	slice := &api.EndpointSlice{
		Namespace: "default", Name: "web", ServiceName: "web", Family: api.IPv4,
		Ports: []api.EndpointPort{{Protocol: api.TCP, Port: 8080}},
		Endpoints: []api.SliceEndpoint{{
			Addr: netip.MustParseAddr("10.1.0.1"), Conditions: api.Conditions{Ready: true, Serving: true},
		}},
	}
	return nodeview.View(&api.ServiceState{Service: svc, Slices: []*api.EndpointSlice{slice}}, &api.Node{Name: "node"})
}
