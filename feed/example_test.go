// SPDX-License-Identifier: Apache-2.0

package feed_test

import (
	"context"
	"fmt"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/feed"
	"github.com/kpng-project/kpng/sink"
)

// A feed delivers a node's view of the cluster's state to a sink.
func Example() {
	state := cluster.New(cluster.Options{})
	state.Update(func(tx *cluster.Tx) { // a watcher does this in a real program
		tx.SetService(service("web"))
		tx.SetSlice(slice("web-1", "web", "a", "b"))
		tx.SetNode(node("node-a", "a"))
	})
	state.SetSynced()

	f := feed.New(state, "node-a")
	defer f.Close()
	show := sink.FullState(func(_ context.Context, services []*api.View) error {
		for _, s := range services {
			for _, e := range s.Endpoints {
				fmt.Println(s.Key(), e.Addr, "local:", e.Local)
			}
		}
		return nil
	})
	if err := sink.Run(context.Background(), f, show, sink.Options{Once: true}); err != nil {
		fmt.Println(err)
	}
	// Output:
	// ns/web 172.16.0.1 local: true
}
