// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"fmt"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
)

// A reader follows a cluster that may be empty at first.
func Example() {
	state := cluster.New(cluster.Options{})
	state.Update(func(tx *cluster.Tx) { tx.ReplaceServices(slices.Values([]*api.Service{})) })
	state.SetSynced()

	var revision uint64 // 0, because the reader has no state yet
	for _, name := range []string{"db", "web"} {
		<-state.Changed(revision)
		snapshot := state.Snapshot()
		fmt.Println("services:", snapshot.States.Len())
		for key := range snapshot.States.All() {
			fmt.Println(" ", key)
		}
		revision = snapshot.Revision

		// Before the next read, a watcher adds a service.
		state.Update(func(tx *cluster.Tx) { tx.SetService(&api.Service{Namespace: "default", Name: name}) })
	}

	// Output:
	// services: 0
	// services: 1
	//   default/db
}
