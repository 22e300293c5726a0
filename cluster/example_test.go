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
	cursor := state.NewCursor()
	defer cursor.Close()
	for _, name := range []string{"db", "web"} {
		<-state.Changed(revision)
		snapshot := state.Snapshot()
		delta := cursor.Until(snapshot.States)
		fmt.Println("everything:", delta.Full())
		for change := range delta.Changes() {
			fmt.Println(" ", change.Key, change.Old == nil, change.New == nil)
		}
		cursor.Advance(snapshot.States)
		revision = snapshot.Revision

		// Before the next read, a watcher adds a service.
		state.Update(func(tx *cluster.Tx) { tx.SetService(&api.Service{Namespace: "default", Name: name}) })
	}

	// Output:
	// everything: true
	// everything: false
	//   default/db true false
}
