// SPDX-License-Identifier: Apache-2.0

// Package cluster holds what is known of a cluster's services, endpoint slices
// and nodes. Watchers write it, feeds and servers read it.
//
//	state := cluster.New(cluster.Options{})
//	state.Update(func(tx *cluster.Tx) {
//		tx.ReplaceServices(services)
//		tx.ReplaceSlices(slices)
//	})
//	state.SetSynced()
//
//	<-state.Changed(0)
//	snapshot := state.Snapshot() // and from now on wait for Changed(snapshot.Revision)
//
// One counter numbers all changes. A reader holds a cursor and the revision of the snapshot it
// has, 0 for none. [State.Changed] wakes it, and it reads no more than what changed.
//
// Beside the objects, the state keeps for each service a joined value: the
// service, its slices whatever order they came in, and the frontends that another
// service holds (see [api.ServiceState]). A change of any of these is a
// change of the joined value, and of no other service's.
package cluster
