// SPDX-License-Identifier: Apache-2.0

// Package revstore implements package diffstore. Both packages have types with the same
// underlying types, so packages of this module can convert the values. Package revstore
// has more features. Package cluster and its readers need these features:
//
// Every change has a [Revision]. [Snapshot.Since] returns the changes after a revision,
// and [Snapshot.Latest] the latest changes. With [Options.Resumable], a store keeps
// tombstones of deletions for readers that have a revision instead of a cursor. A [Delta]
// has the old and the new snapshot.
//
// # Several stores
//
// Stores that share one [Revisions] counter have one order of changes. For a consistent
// view of several stores, a program needs its own mutex. The program holds the mutex
// while it writes to the stores, and while it takes a snapshot of each store. A reader
// has one cursor per store. If it has to start over with one cursor, it starts over with
// all cursors.
package revstore
