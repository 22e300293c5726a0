// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"context"
	"fmt"
	"log"
	"net"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/remote"
	"github.com/kpng-project/kpng/sink"
)

// The example runs a server and the sink of one node. Usually, these run in two
// processes, and a watcher fills the server's state.
func Example() {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	state := cluster.New(cluster.Options{Resumable: true})
	state.Update(func(tx *cluster.Tx) {
		tx.SetNode(&api.Node{Name: "node-1"})
		tx.SetService(&api.Service{
			Namespace: "default", Name: "web", Type: api.ClusterIP,
			IPs:        api.ServiceIPs{ClusterIPs: api.NewIPSet(netip.MustParseAddr("10.96.0.1"))},
			IPFamilies: []api.Family{api.IPv4},
			Ports:      []api.PortMapping{{Protocol: api.TCP, Port: 80}},
		})
	})
	state.SetSynced()

	server, err := remote.NewServer(state, remote.ServerOptions{})
	if err != nil {
		log.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0") // remote.Listen also works
	if err != nil {
		log.Fatal(err)
	}
	served := make(chan error)
	go func() { served <- server.Serve(ctx, listener) }()

	client, err := remote.NewClient(remote.ClientOptions{
		NodeName:    "node-1",
		DialOptions: remote.DialOptions{Addresses: []string{listener.Addr().String()}},
	})
	if err != nil {
		log.Fatal(err)
	}
	following := make(chan error)
	go func() { following <- client.Run(ctx) }()
	program := sink.FullState(func(_ context.Context, services []*api.View) error {
		for _, s := range services {
			fmt.Println("program", s.Key(), "at", s.Service.IPs.ClusterIPs)
		}
		return nil
	})
	source := client.Source()
	defer source.Close()
	if err := sink.Run(ctx, source, program, sink.Options{Once: true}); err != nil {
		log.Fatal(err)
	}

	stop()
	fmt.Println("client:", <-following)
	fmt.Println("server:", <-served)
	// Output:
	// program default/web at [10.96.0.1]
	// client: context canceled
	// server: <nil>
}
