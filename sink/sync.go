// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math/bits"
	"slices"
	"sync"
	"time"

	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/internal/updates"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// batch is the content of one Sync.
type batch struct {
	Changes
	// The services that Changes.Services yields.
	services []Change
	// True if the batch consists of one isolated service or the refused Node.
	alone bool
}

func (b *batch) isEmpty() bool { return len(b.services) == 0 && !b.NodeChanged && !b.Last }

// search is the state of the search for services that make a Sync fail as a whole.
type search struct {
	// The maximum number of services in a Sync, or 0 while there is no search.
	limit int
	// After this number of failures in a row, the backoff begins to grow.
	patience int
	// The number of failures of isolated services since the last successful Sync.
	aloneFailures int
	// The number of times that the sink returned ErrStartOver since the last complete pass.
	restarts int
}

// step calls Sync once, with the next batch.
func (d *Driver) step(ctx context.Context) {
	d.noteWork(time.Now())
	u, err := d.nextUpdate()
	if err != nil {
		d.sourceFailed(ctx, err)
		return
	}
	d.src.Advance(u)
	b := d.compose(u)
	if b.isEmpty() {
		if d.noted && u.Revision == d.position {
			d.sourceFailed(ctx, errors.New("source signals a change but its update is empty"))
			return
		}
		d.update(func() {
			d.position = u.Revision
			d.recovered()
		})
		return
	}
	if d.noted {
		d.opts.Observer.Queued(d.queuedAt)
	}
	d.opts.Observer.Pending(d.unacknowledged(b.services))
	result, failed, acked := d.sync(ctx, &b)
	switch {
	case acked:
		d.logRecovery(ctx, b.services, failed)
		notDelivered := d.notDelivered(u, &b, failed)
		result.Passed = b.Last
		d.update(func() { d.acknowledged(u, &b, failed, notDelivered) })
		d.dropTaken(b.services, failed)
		d.observeLatency(b.services, failed)
		if _, ok := As[Verifier](d.sink); ok && b.Last && d.verifyInterval > 0 && d.verifyAt.IsZero() {
			d.verifyAt = d.status.LastSync.Add(d.verifyInterval)
		}
	case errors.Is(result.Err, ErrStartOver):
		d.search.restarts++
		d.update(func() {
			d.backOff(result.Err, 0)
			d.begin()
		})
	default:
		d.update(func() {
			d.refused(&b, result.Err)
			d.position = u.Revision
		})
	}
	d.report(ctx, result, failed)
}

// nextUpdate returns the next update of the source. If the source panics, nextUpdate
// returns the panic as an error.
func (d *Driver) nextUpdate() (u *updates.Update, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic in source: %v", r)
		}
	}()
	u, err = d.src.Next()
	if err == nil && u == nil {
		err = errors.New("source signals a change but returns no update")
	}
	return u, err
}

func (d *Driver) sourceFailed(ctx context.Context, err error) {
	err = fmt.Errorf("get update from source: %w", err)
	klog.FromContext(ctx).Error(err, "No update for the sink; retrying")
	d.update(func() { d.backOff(err, 0) })
}

// compose returns the next batch. If a change in the update u is not in the batch, it
// becomes pending, or the pass delivers it later.
func (d *Driver) compose(u *updates.Update) batch {
	voided := d.isVoided(u)
	if u.NodeChanged {
		d.update(func() { d.noteNode(u.Node) })
	}
	var b batch
	b.Revision = u.Revision
	b.First = d.pass != nil && !d.pass.begun
	b.Node, b.NodeChanged = u.Node, b.First || d.node.pending
	if d.node.failures > 0 { // the Node waits for a Sync of its own
		b.Node, b.NodeChanged = d.node.acked, b.First
	}
	d.addChanges(u, &b)
	// After a Sync of an isolated service, or after a Sync that failed as a whole, other
	// services come first.
	othersFirst := b.First || d.wasAlone || d.status.Failures > 0
	switch {
	case !othersFirst && d.addAlone(u, &b):
	case d.search.limit == 1 && b.NodeChanged:
		// Deliver the Node object without services, so that a failure has only one cause.
	case d.largeWaited && d.addLarge(u, &b):
	default:
		if d.pass != nil && !b.First && len(b.services) > 0 && !d.pass.yielded {
			d.pass.yielded = true // deliver changes before the next batch of the pass
		} else {
			d.addDue(u, &b)
		}
		// While other services are due, every second Sync delivers a large service. So every
		// service waits for at most one large service, and each large service gets its turn.
		d.largeWaited = d.pending.dueLarge(time.Now()) != nil
	}
	if b.isEmpty() && !d.addLarge(u, &b) {
		d.addAlone(u, &b)
	}
	d.wasAlone = b.alone
	for i := range b.services {
		if c := &b.services[i]; voided {
			c.Old, c.Unsure = nil, true
		}
	}
	b.partial = d.unacknowledged(b.services) > len(b.services)
	b.Services = d.read(b.services)
	return b
}

// isVoided begins a pass if u is lost and no pass is in progress. It reports whether the
// acknowledgements of the pass in progress are void. They are void if another pass has to
// follow: the source has lost changes of delivered services, or StartOver was called.
//
// The pass in progress continues. So every pass ends, even if the source keeps losing
// changes.
func (d *Driver) isVoided(u *updates.Update) (voided bool) {
	d.update(func() {
		switch {
		case !u.Lost:
		case d.pass == nil:
			d.begin()
		default:
			d.requestPass()
		}
		voided = d.passes > d.status.Passes+1
	})
	return voided
}

// addChanges adds u's changes to b. Changes of pending services, and changes that have to
// wait, become pending instead.
func (d *Driver) addChanges(u *updates.Update, b *batch) {
	changes := make([]Change, len(u.Changes))
	for i, c := range u.Changes {
		changes[i] = Change{Key: c.Key, Old: c.Old, New: c.New, TriggerTime: c.TriggerTime}
	}
	if d.pass != nil {
		changes = d.pass.admit(changes, d.opts.BatchSize)
	}
	d.holdLarge(u.Large)
	var wait []Change
	for _, c := range changes {
		if d.search.limit > 0 || d.pending.byKey[c.Key] != nil {
			wait = append(wait, c)
		} else {
			b.services = append(b.services, c)
		}
	}
	d.hold(wait)
}

// addAlone puts the refused Node or one isolated service alone into b, if one of them is
// due.
func (d *Driver) addAlone(u *updates.Update, b *batch) bool {
	now := time.Now()
	node, s := d.node.failures > 0 && !d.node.retryAt.After(now), d.pending.dueAlone(now)
	if !node && s == nil {
		return false
	}
	d.hold(b.services)
	if node {
		b.Node, b.NodeChanged, b.services = u.Node, true, nil
	} else {
		b.services = []Change{s.changeTo(u.View(s.key))}
	}
	b.alone = true
	return true
}

// addLarge puts one large service alone into b, if one is due.
func (d *Driver) addLarge(u *updates.Update, b *batch) bool {
	d.largeWaited = false
	s := d.pending.dueLarge(time.Now())
	if s == nil {
		return false
	}
	c, err := s.computed(u)
	switch {
	case err != nil:
		d.update(func() { d.fail(d.unacked(c, failing), err, draw()) })
		return false
	case !c.Unsure && c.Old.Equal(c.New):
		d.update(func() { d.pending.remove(s.key) })
		return false
	}
	d.hold(b.services)
	b.services = []Change{c}
	return true
}

// addDue adds the due pending services and the next services of the pass to b.
func (d *Driver) addDue(u *updates.Update, b *batch) {
	changes, size, most := len(b.services), 0, d.search.limit
	for i := range b.services {
		size += b.services[i].size()
	}
	room := max(d.opts.BatchSize-size, d.opts.BatchSize/2, 1)

	// waiting is the number of pending services that are not in b and have not failed
	// individually.
	waiting := d.pending.count[queued] + d.pending.count[suspect]
	var void []types.NamespacedName
	full := false // only queued services are added
	d.pending.due(time.Now(), func(s *unacked) bool {
		if full && s.reason != queued {
			return true
		}
		c, added := s.changeTo(u.View(s.key)), len(b.services)-changes
		switch {
		case !c.Unsure && c.Old.Equal(c.New):
			void = append(void, s.key)
		case added > 0 && c.size() > room && s.reason != queued:
			full = true
			return true
		default:
			room -= c.size()
			b.services = append(b.services, c)
			added++
		}
		if s.reason != failing {
			waiting--
		}
		return most == 0 || added < most
	})
	d.update(func() {
		for _, key := range void {
			d.pending.remove(key)
		}
	})

	if d.pass != nil {
		d.pass.yielded = false
		var more bool
		if d.pending.count[suspect] > 0 {
			more = d.pass.hasNext(u) // during the search, add no services of the pass
		} else {
			b.services, more = d.pass.appendNext(u, most, room, b.services)
		}
		if !more && len(d.pass.large) > 0 {
			d.holdLarge(d.pass.takeLarge())
			more = true
		}
		b.Last = !more && waiting == d.pending.acknowledgedLarge() && most != 1
	}
	slices.SortFunc(b.services, func(a, b Change) int { return ordering.Keys(a.Key, b.Key) })
	if b.Last {
		b.Failing = d.pending.unsure(b.services)
	}
}

// read returns an iterator over services. Each service that the sink reads counts as
// progress.
func (d *Driver) read(services []Change) iter.Seq[Change] {
	hopeful := d.hopeful()
	return func(yield func(Change) bool) {
		for _, c := range services {
			if hopeful {
				d.progressed()
			}
			if !yield(c) {
				return
			}
		}
	}
}

// sync calls the sink's Sync. If acked is true, the sink has acknowledged b, except the
// services in failed.
func (d *Driver) sync(ctx context.Context, b *batch) (result SyncResult, failed Failed, acked bool) {
	hopeful := d.hopeful()
	begin := time.Now()
	d.update(func() {
		d.status.SyncingSince = begin
		if d.pass != nil && d.pass.start.IsZero() {
			d.pass.start, d.pass.revision = begin, b.Revision
			d.passAt = begin.Add(minPassInterval)
		}
	})
	err := d.call(ctx, "Sync", func(ctx context.Context) error { return d.sink.Sync(ctx, &b.Changes) })
	end := time.Now()
	d.update(func() { d.status.SyncingSince = time.Time{} })
	d.notBefore = end
	if d.pass == nil || b.Last {
		d.notBefore = end.Add(d.pause(b, end.Sub(begin)))
	}
	failed, acked = Acknowledged(err)
	failed = briefFailed(failed)
	if acked {
		err = failed.Err()
	}
	err = brief(err)
	if acked || hopeful {
		d.progressed()
	}
	result = SyncResult{Services: len(b.services), Duration: end.Sub(begin), Err: err}
	if d.pass != nil {
		result.PassStart = d.pass.start
	}
	return result, failed, acked
}

const (
	// maxGather limits the time in which changes are gathered.
	maxGather = 20 * time.Millisecond
	// gatherSyncs is the number of Syncs after which the driver gathers changes: the last
	// Sync with several changes at the same time, and the Syncs that follow it.
	gatherSyncs = 16
)

// pause returns the time from the end of a Sync to the start of the next one. Without
// Options.MinInterval, there is no pause while changes are so rare that only one change
// waits at a time.
func (d *Driver) pause(b *batch, took time.Duration) time.Duration {
	if d.opts.MinInterval > 0 {
		return d.opts.MinInterval
	}
	d.gather--
	if d.pass == nil && (len(b.services) > 1 || isClosed(d.src.Changed())) {
		d.gather = gatherSyncs
	}
	if d.gather = max(d.gather, 0); d.gather == 0 || d.immediate {
		return 0
	}
	return min(took, maxGather)
}

// hopeful reports whether a service that the sink reads counts as progress. After many
// failures in a row, such a read does not count, because the sink does not work at all.
func (d *Driver) hopeful() bool {
	return d.status.Failures <= d.search.patience
}

func (d *Driver) progressed() { d.progress.Store(int64(time.Since(d.created))) }

// The method acknowledged records that the sink acknowledged b, except failed services.
func (d *Driver) acknowledged(u *updates.Update, b *batch, failed Failed, notDelivered []Change) {
	drawn := draw()
	for _, changes := range [...][]Change{b.services, notDelivered} {
		for _, c := range changes {
			if err, ok := failed[c.Key]; ok {
				d.fail(d.unacked(c, failing), err, drawn)
			}
		}
	}
	for _, c := range b.services {
		if _, ok := failed[c.Key]; ok {
			continue
		}
		d.pending.remove(c.Key)
		if d.pass != nil {
			delete(d.pass.failedBefore, c.Key)
			d.pass.count++
		}
	}
	d.position = u.Revision
	d.status.LastSync = time.Now()
	if d.status.Failures > 0 {
		d.node.retryAt = d.status.LastSync // retry now: the dataplane may have been the cause
	}
	if b.NodeChanged {
		d.ackedNode(b.Node, u.Node)
	}
	d.recovered()
	d.search.aloneFailures, d.pending.aloneAt = 0, time.Time{}
	if len(b.services) > 0 {
		d.search.limit *= 2
	}
	if d.pending.count[suspect] == 0 {
		d.search.limit = 0
	}
	d.status.Syncs++
	switch {
	case b.Last:
		d.status.Passes++
		d.status.LastPass = d.status.LastSync
		d.search.restarts = 0
		d.endPass()
	case d.pass != nil:
		d.pass.begun = true
	}
}

// dropTaken drops the old views whose claims the sink has acknowledged for other
// services. It takes time in proportion to the claims, so it does not hold d.mu while
// it searches.
func (d *Driver) dropTaken(acked []Change, failed Failed) {
	if len(d.pending.byKey) == 0 {
		d.pending.claims = newOldClaims() // release the old views
		return
	}
	for i := range acked {
		if _, ok := failed[acked[i].Key]; ok {
			continue
		}
		for _, s := range d.pending.takenBy(&acked[i]) {
			d.update(func() { d.pending.put(s) })
		}
	}
}

// endPass ends a pass, and begins another one if it is needed.
func (d *Driver) endPass() {
	pass := d.pass
	d.pass = nil
	d.passed = d.present()
	if !d.isSynced() {
		// The source may have lost changes during the pass. But each service was delivered
		// in its state at the beginning of the pass, or in a later state.
		d.passed = min(d.passed, pass.revision)
		d.notBefore = time.Time{}
		d.begin()
	}
}

// notDelivered returns a change for each service that is in the map failed but not in b.
func (d *Driver) notDelivered(u *updates.Update, b *batch, failed Failed) []Change {
	var changes []Change
	for key := range failed {
		if hasService(b.services, key) {
			continue
		}
		c := Change{Key: key, Unsure: true}
		if d.pass == nil || d.pass.delivered(key) {
			c.Old = u.View(key)
		} else {
			d.pass.takeAhead(key)
		}
		changes = append(changes, c)
	}
	return changes
}

// The method refused records that the sink acknowledged nothing of b because of err. The
// driver delivers the same batch once more, and then halves of it, until one service is
// left. If a Sync of this service fails too, the service is the cause.
func (d *Driver) refused(b *batch, err error) {
	n := len(b.services)
	if b.NodeChanged {
		d.node.unsure = true
	}
	if b.alone {
		if n == 0 {
			d.refusedNode(err)
		} else {
			d.fail(d.unacked(b.services[0], isolated), err, draw())
		}
		// While no Sync succeeds, each failure of an isolated service makes all isolated
		// services wait longer, because the dataplane itself may be the cause.
		d.search.aloneFailures++
		d.pending.aloneAt = time.Now().Add(d.backoff.wait(d.search.aloneFailures, draw()))
		if d.status.Failures == 0 {
			d.recovered()
		}
		return
	}
	repeated := d.status.Failures > 0 || d.search.limit > 0
	culprit := n == 1 && repeated && !b.Last && !b.NodeChanged
	for _, c := range b.services {
		if culprit {
			d.fail(d.unacked(c, isolated), err, draw())
			continue
		}
		s := d.unacked(c, suspect)
		s.retryAt = time.Now()
		d.pending.put(s)
	}
	if repeated {
		d.search.limit = max(n/2, 1)
	}
	if d.pending.count[suspect] == 0 {
		d.search.limit = 0
	}
	if n == 0 && d.node.pending && d.node.failures == 0 {
		d.refusedNode(err)
	}
	d.backOff(err, 2*bits.Len(uint(n)/2))
}

// hold adds the services of changes to d.pending. The driver delivers them later.
func (d *Driver) hold(changes []Change) {
	if len(changes) == 0 {
		return
	}
	now := time.Now()
	d.update(func() {
		for _, c := range changes {
			d.putQueued(d.unacked(c, queued), now)
		}
	})
}

// putQueued adds a changed service to d.pending. Its delivery is due. If the service waits
// already, it keeps its place.
func (d *Driver) putQueued(s *unacked, now time.Time) {
	if s.retryAt.IsZero() || s.retryAt.After(now) {
		s.retryAt = now
	}
	d.pending.put(s)
}

// holdLarge adds large services to d.pending, except those that the pass has yet to
// deliver. If Old is missing during a pass, the sink may have any view.
func (d *Driver) holdLarge(changes []updates.LargeChange) {
	if len(changes) == 0 {
		return
	}
	now := time.Now()
	d.update(func() {
		for _, c := range changes {
			if d.pass != nil && !d.pass.delivered(c.Key) {
				continue
			}
			none := c.Old.Compute == nil
			s := d.unacked(Change{Key: c.Key, Unsure: none && d.pass != nil, TriggerTime: c.TriggerTime}, queued)
			if d.pending.byKey[c.Key] == nil && !none {
				s.old = updates.View{Size: c.Old.Size, Compute: sync.OnceValue(c.Old.Compute)}
			}
			s.large = true
			d.putQueued(s, now)
		}
	})
}

// unacked returns a copy of the record of c's service in d.pending, or a new record. If why
// is queued, the record of a small failing service becomes queued, and other records keep
// their reason.
func (d *Driver) unacked(c Change, why reason) *unacked {
	s := unacked{key: c.Key, old: updates.ViewOf(c.Old), unsure: c.Unsure, since: d.position}
	if before := d.pending.byKey[c.Key]; before != nil {
		s = *before
	} else {
		if c.Unsure {
			s.since = 0
		}
		if d.pass != nil {
			if failed := d.pass.failedBefore[c.Key]; failed != nil {
				s.failures, s.err = failed.failures, failed.err
			}
		}
	}
	switch {
	case why != queued:
		s.reason, s.unsure = why, true
	case s.reason == failing && !s.large:
		s.reason = queued
	}
	s.large = s.large || isLarge(&c)
	s.trigger = earlier(s.trigger, c.TriggerTime)
	return &s
}

// fail records that the service s failed with err, and schedules its retry.
func (d *Driver) fail(s *unacked, err error, drawn float64) {
	s.failures++
	s.err = err
	s.retryAt = time.Now().Add(d.backoff.wait(s.failures, drawn))
	d.pending.put(s)
}

// The method recovered records that the sink works again, so no Sync waits for a backoff.
func (d *Driver) recovered() {
	d.status.WaitingSince = time.Time{}
	d.status.Err, d.status.Failures, d.status.NextAttempt = nil, 0, time.Time{}
}

// backOff records that nothing was acknowledged because of err, and delays the next Sync.
// The first of several failures in a row sets the patience: the number of failures after
// which the delay grows.
func (d *Driver) backOff(err error, patience int) {
	if d.status.Failures == 0 {
		d.search.patience = patience
	}
	d.status.Failures++
	wait := d.backoff.wait(max(d.status.Failures-d.search.patience, d.search.restarts), draw())
	d.notBefore = later(d.notBefore, time.Now().Add(wait))
	d.status.Err, d.status.NextAttempt = err, d.notBefore
}

// minPassInterval is the minimum time from the start of one pass to the start of the next.
const minPassInterval = 100 * time.Millisecond

// begin begins a pass. If a pass is in progress, the new one replaces it. Isolated
// services stay pending. The pass delivers all other services.
func (d *Driver) begin() {
	before := map[types.NamespacedName]*unacked{}
	if d.pass != nil {
		before = d.pass.failedBefore
	}
	d.preparing = nil
	d.notBefore = later(d.notBefore, d.passAt)
	d.pass = &delivery{
		ahead: map[types.NamespacedName]struct{}{}, large: map[types.NamespacedName]struct{}{}, failedBefore: before,
	}
	old := d.pending
	d.pending = newPending()
	for key, s := range old.byKey {
		switch {
		case s.reason == isolated:
			kept := *s
			kept.old, kept.unsure, kept.since = updates.View{}, true, 0
			d.pending.put(&kept)
			d.pass.ahead[key] = struct{}{}
		case s.failures > 0:
			before[key] = s
		}
	}
	d.search.limit = 0
	d.requestPass()
}

// unacknowledged returns the number of services that are pending or in changes.
func (d *Driver) unacknowledged(changes []Change) int {
	n := len(d.pending.byKey)
	for i := range changes {
		if d.pending.byKey[changes[i].Key] == nil {
			n++
		}
	}
	return n
}

// hasService reports whether a service is in changes, which must be sorted by key.
func hasService(changes []Change, key types.NamespacedName) bool {
	_, ok := slices.BinarySearchFunc(changes, key, func(c Change, key types.NamespacedName) int {
		return ordering.Keys(c.Key, key)
	})
	return ok
}
