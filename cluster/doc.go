// SPDX-License-Identifier: Apache-2.0

// Package cluster holds the state of a cluster's services, endpoint slices and nodes.
// Watchers write the state; feeds and servers read it.
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
// Each change gets the next revision. A reader keeps the revision of its last snapshot (0
// if none), and [State.Changed] wakes the reader. Package feed computes the changes for
// one node.
//
// In addition to the objects, the state has a joined value for each service (see
// [api.ServiceState]). This value contains the service, its slices, and the claims that
// the service has lost to other services. The service and its slices may arrive in any
// order. If a slice changes, only the joined value of its service changes.
package cluster
