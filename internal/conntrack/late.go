// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack

import (
	"context"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
	"k8s.io/klog/v2"
)

// lateReplies identifies replies that may arrive after a pass has deleted the entries of
// their untranslated UDP flows. Such a reply creates an entry in the opposite direction.
// The client's later packets then count as replies of this entry, so the kernel does not
// translate them.
type lateReplies struct {
	family api.Family
	// identities identify the entries that the replies create.
	identities [][]byte
	// at is the time of the next deletion of these entries. wait is the pause before that
	// deletion.
	at   time.Time
	wait time.Duration
}

const (
	// The pause between deletions doubles, from minLateWait to at most maxLateWait. The last
	// deletion is 25 seconds after the pass.
	minLateWait = 100 * time.Millisecond
	maxLateWait = 13 * time.Second
)

// lateDue returns a channel that delivers a value when deleteLate has work. If r.late is
// empty, it returns nil.
func (r *reconciler) lateDue() <-chan time.Time {
	if len(r.late) == 0 {
		return nil
	}
	first := slices.MinFunc(r.late, func(a, b lateReplies) int { return a.at.Compare(b.at) })
	return time.After(time.Until(first.at))
}

// deleteLate deletes the entries of late replies.
func (r *reconciler) deleteLate(ctx context.Context) {
	now := time.Now()
	var remaining []lateReplies
	for _, l := range r.late {
		if !now.Before(l.at) {
			for batch := range slices.Chunk(l.identities, batchSize) {
				if _, err := deleteEntries(ctx, r.writer, l.family, batch); err != nil {
					klog.FromContext(ctx).Error(err, "Cannot delete connections of late replies")
					break
				}
			}
			l.wait *= 2
			l.at = now.Add(l.wait)
		}
		if l.wait <= maxLateWait {
			remaining = append(remaining, l)
		}
	}
	r.late = remaining
}
