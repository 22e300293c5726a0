// SPDX-License-Identifier: Apache-2.0

package diffstore

import "sync/atomic"

// Revision numbers a change. Later changes have higher revisions; 0 comes before the first change.
type Revision uint64

// Revisions hands out revisions, each once, in ascending order. The zero value is ready for use. Stores that share a Revisions
// (see [Options]) never record two changes under one revision.
type Revisions struct {
	last atomic.Uint64
}

// Last returns the revision handed out last, 0 if there was none.
func (r *Revisions) Last() Revision {
	return Revision(r.last.Load())
}

func (r *Revisions) next() Revision {
	return Revision(r.last.Add(1))
}
