// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kpng-project/kpng/internal/ordering"
)

// WaitSynced returns nil when a pass is complete. In this pass, the sink has acknowledged
// every service, except failing services. If StartOver was called before WaitSynced, the
// pass must have begun after StartOver. A later call of StartOver does not prolong the
// wait.
//
// If ctx or Run ends earlier, WaitSynced returns an error that names the sink and the
// reasons why it is not synced. It may be called at any time, even before Run.
func (d *Driver) WaitSynced(ctx context.Context) error {
	return d.waitUntil(ctx, "a pass", func() bool { return true })
}

// WaitApplied is like WaitSynced, but also waits until the sink has acknowledged every
// change up to the given revision of the source. If a service fails, WaitApplied waits
// until it is acknowledged.
func (d *Driver) WaitApplied(ctx context.Context, revision uint64) error {
	return d.waitUntil(ctx, fmt.Sprintf("revision %d", revision), func() bool { return d.applied() >= revision })
}

// waitUntil waits until all passes that were requested before are complete, and the
// function reached returns true. It calls reached with mu held.
func (d *Driver) waitUntil(ctx context.Context, what string, reached func() bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	passes := d.passes
	var ended error // the cause of ctx
	for d.status.Passes < passes || !reached() {
		if err := cmp.Or(d.end, ended); err != nil {
			return fmt.Errorf("%s: wait for %s: %w%s", d.label(), what, err, d.obstacles())
		}
		if d.moved == nil {
			d.moved = make(chan struct{})
		}
		moved := d.moved
		d.mu.Unlock()
		select {
		case <-moved:
		case <-ctx.Done():
			ended = context.Cause(ctx)
		}
		d.mu.Lock()
	}
	return nil
}

// WaitApplied and WaitSynced return errEnded if Run has returned nil.
var errEnded = errors.New("driver has ended")

// applied returns the last revision that is known to be applied completely. During a
// pass, it is the revision at the end of the last pass.
func (d *Driver) applied() uint64 {
	if !d.isSynced() {
		return d.passed
	}
	return d.present()
}

// present returns the last revision up to which everything is acknowledged. Call it only
// while no pass is in progress.
func (d *Driver) present() uint64 {
	revision := d.pending.applied(d.position)
	if d.node.pending {
		revision = min(revision, d.node.since)
	}
	return revision
}

// maxNamed limits the services that the error of a wait names.
const maxNamed = 5

// obstacles describes, for an error, why the sink is not up to date. The caller holds
// d.mu.
func (d *Driver) obstacles() string {
	var list []string
	add := func(format string, args ...any) { list = append(list, fmt.Sprintf(format, args...)) }
	if d.running.method != "" {
		add("%s has not returned for %v", d.running.method, time.Since(d.running.since).Round(time.Millisecond))
	}
	switch {
	case d.status.Err != nil:
		add("%d failures in a row, the last: %v", d.status.Failures, d.status.Err)
	case d.pass == nil && d.status.Passes == 0:
		add("the source has provided no services yet")
	}
	if d.node.err != nil {
		add("the sink refuses the Node: %v", d.node.err)
	}
	services := slices.SortedFunc(maps.Values(d.pending.byKey), func(a, b *unacked) int {
		return cmp.Or(cmp.Compare(b.failures, a.failures), ordering.Keys(a.key, b.key))
	})
	for _, s := range services[:min(len(services), maxNamed)] {
		if s.err != nil {
			add("service %s: %v", s.key, s.err)
		} else {
			add("service %s is not acknowledged", s.key)
		}
	}
	if more := len(services) - maxNamed; more > 0 {
		add("%d more services", more)
	}
	if d.pass != nil {
		add("a pass has delivered %d services", d.pass.count)
	}
	if len(list) == 0 {
		return ""
	}
	return " (" + strings.Join(list, "; ") + ")"
}
