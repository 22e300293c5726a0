// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// service is a service to program. If it was deleted, its record is empty.
type service struct {
	key types.NamespacedName
	*record
}

// largeService is the minimum number of rules of a large service. The driver delivers
// services with large objects alone, see [sink.Options]. A service with small objects may
// also have many rules, because each port may need its own list of all endpoints.
const largeService = 2_000

// bySize divides the argument list into the large services, sorted by size, and the other
// services, in the order of the list. The size of a service is the number of its new
// rules or of its rules in the kernel, whichever is larger.
func (t *ruleset) bySize(list []service) (others, large []service) {
	size := func(s service) int {
		if last := t.records[s.key]; last != nil {
			return max(s.rules, last.rules)
		}
		return s.rules
	}
	for _, s := range list {
		if size(s) < largeService {
			others = append(others, s)
		} else {
			large = append(large, s)
		}
	}
	slices.SortStableFunc(large, func(a, b service) int { return cmp.Compare(size(a), size(b)) })
	return others, large
}

// render renders changed services. If the rendering of a service panics, render adds the
// service to the argument failed.
func (t *ruleset) render(changes iter.Seq[sink.Change], failed *sink.Failed) (list []service) {
	for c := range changes {
		failed.Do(c.Key, func() error {
			t.takeElements(c.Key, c.New)
			list = append(list, service{c.Key, t.record(c.New, t.records[c.Key])})
			return nil
		})
	}
	return list
}

// takeElements adds held elements to the old record of a service: the elements with an
// address of this service. Therefore prune keeps these elements if the service fails.
// Elements contain no service name, only an address. If this pass has already programmed
// the service, takeElements adds none.
func (t *ruleset) takeElements(key types.NamespacedName, view *api.View) {
	if t.holding() {
		t.delivered[key] = true
	}
	r := t.records[key]
	if len(t.held) == 0 || view == nil || r != nil && !r.old {
		return
	}
	ips := &view.Service.IPs
	for _, set := range []api.IPSet{ips.ClusterIPs, ips.ExternalIPs, ips.LoadBalancerIPs} {
		for _, a := range set.Family(t.family) {
			for _, e := range t.held[a.String()] {
				if r := t.oldRecord(key); !r.elements[e] {
					r.elements[e] = true
					t.users[e]++
				}
			}
		}
	}
}

// holding reports whether a pass has begun and prune was not called yet. During this
// time, no chain of a service is deleted, because rules of an earlier process may lead
// to that chain.
func (t *ruleset) holding() bool { return t.delivered != nil }

// apply programs services. If the kernel refuses the rules of some services, apply finds
// these services, keeps their old rules and adds the services to the argument failed. It
// returns an error if the cause is not in the rules of a service.
func (t *ruleset) apply(ctx context.Context, list []service, failed *sink.Failed) error {
	if t.beginErr != nil {
		for _, s := range list {
			if !s.isEmpty() {
				failed.Add(s.key, t.beginErr)
			}
		}
		return nil
	}
	if len(list) == 0 {
		return t.commitOld(ctx)
	}
	for _, s := range list {
		if err := t.checkSources(s.record); err != nil {
			failed.Add(s.key, err)
			continue
		}
		t.replace(s.key, s.record, true)
	}
	err := t.commit(ctx)
	if err == nil {
		t.undo = nil
		return nil
	}
	for _, undo := range slices.Backward(t.undo) {
		undo()
	}
	t.undo = nil
	if isGeneral(err) || ctx.Err() != nil {
		return err
	}
	// If the kernel accepts the old rules, the new rules of a service are the cause.
	if oldErr := t.commitOld(ctx); oldErr != nil {
		return errors.Join(err, oldErr)
	}
	if len(list) == 1 {
		failed.Add(list[0].key, err)
		return nil
	}
	if refuses(err, matchRecent) {
		// The kernel or iptables lacks the match for session affinity, so all services with
		// session affinity fail.
		var others []service
		for _, s := range list {
			if s.hasAffinity() {
				failed.Add(s.key, err)
			} else {
				others = append(others, s)
			}
		}
		if len(others) < len(list) {
			return t.apply(ctx, others, failed)
		}
	}
	half := len(list) / 2
	if err := t.apply(ctx, list[:half], failed); err != nil {
		return err
	}
	return t.apply(ctx, list[half:], failed)
}

// commitOld commits rules that the kernel has accepted before. If the kernel refuses
// them, another program has changed the rules in the kernel, and only a new pass can
// repair them.
func (t *ruleset) commitOld(ctx context.Context) error {
	err := t.commit(ctx)
	if err == nil || isGeneral(err) || ctx.Err() != nil {
		return err
	}
	return fmt.Errorf("the kernel refuses rules that it had: %w (%w)", err, sink.ErrStartOver)
}
