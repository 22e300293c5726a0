// SPDX-License-Identifier: Apache-2.0

// Package cluster holds the state of a cluster's services, endpoint slices and nodes.
// Watchers write it; feeds and servers read it.
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
// One counter numbers all changes. A reader has a cursor and the revision of its
// snapshot, 0 for none. [State.Changed] wakes it, and it reads only the changes.
//
// In addition to the objects, the state has a joined value for each service (see
// [api.ServiceState]). It contains the service, its slices, and the frontends that
// another service owns. The order of arrival does not matter. If one of these changes,
// only the joined value of this service changes.
package cluster
