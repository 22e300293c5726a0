// SPDX-License-Identifier: Apache-2.0

// Package revstore implements package diffstore. Types of diffstore have the same
// underlying types, so packages of this module can convert their values. This package has
// more features, which package cluster and its readers need:
//
// Every change has a [Revision]. [Snapshot.Since] returns the changes after a revision,
// and [Snapshot.Latest] the latest changes. With [Options.Resumable], a store keeps
// tombstones of deletions for readers that have a revision and no cursor. A [Delta] has
// the old and the new snapshot.
//
// # Several stores
//
// Stores that share one [Revisions] counter have one order of changes. For a consistent
// view of several stores, a program needs its own mutex. The program holds the mutex
// while it writes to the stores, and while it takes a snapshot of each store. A reader
// has one cursor per store, and starts over with all cursors or with none.
package revstore
