// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// unsuitable returns the reason why IPVS cannot serve a service as docs/reference/semantics.md
// requires, or "". The reason depends only on the specification of the service, so that
// changes of endpoints never move a service from one dataplane to the other.
func unsuitable(s *api.Service) string {
	switch {
	case s.AllPorts:
		return "a virtual server has one protocol and port, and the service has all"
	case s.AffinitySeconds > 0:
		return "each virtual server has its own session affinity, which lasts longer than the timeout of the service"
	case s.Algorithm != api.Random:
		return "the choice of the scheduler mh depends on the order in which endpoints were added, and the service requests stable hashing"
	case s.ExternalTrafficToLocal:
		return "a virtual server has one list of endpoints, and with the external traffic policy Local the service has two"
	}
	return ""
}

// isUnsuitable reports whether IPVS cannot serve the service of view.
func isUnsuitable(view *api.View) bool {
	return view != nil && view.Service != nil && unsuitable(view.Service) != ""
}

// rest uses the backend nftables for services that IPVS cannot serve. The table exists
// only while there are such services. Calls must not overlap.
type rest struct {
	opts *options
	// dataplane is nil while it is not started. begun is true after the beginning of its first
	// pass. open is true until the end of its pass.
	dataplane   backends.Dataplane
	begun, open bool
	// passing is true during a pass of the backend ipvs.
	passing bool
	// services are the services that the table may have. During a pass, they are the
	// services that the pass has delivered.
	services map[types.NamespacedName]bool
	// stuck are the services that the table has because IPVS has failed to take them.
	stuck map[types.NamespacedName]*api.View
}

// afterIPVS is the priority of the chains that select endpoints. The chains of the backend
// ipvs come first, because they mark connections from addresses that are local only because
// of that backend.
const afterIPVS = -99

// new returns a dataplane that is not started.
func (r *rest) new(addrs nodeaddr.Source) (backends.Dataplane, error) {
	o := nftables.Options{Options: r.opts.Options, DNATPriority: afterIPVS}
	o.Instance, o.NodeAddresses = r.opts.restInstance(), addrs
	// The backend ipvs applies the settings, and passes all changes to connection tracking.
	o.Sysctls = backends.IgnoreSysctls
	o.Conntrack = sink.Func(func(context.Context, *sink.Changes) error { return nil })
	o.Observer = onlyDrift{r.opts.Observer}
	return nftables.New(o)
}

// onlyDrift passes the method Drifted to an observer. The other methods would mix objects of
// two tables.
type onlyDrift struct{ to backends.Observer }

func (o onlyDrift) Wrote(int, error)  {}
func (o onlyDrift) Holds(string, int) {}
func (o onlyDrift) Drifted(now bool)  { o.to.Drifted(now) }

func (r *rest) start(ctx context.Context, addrs nodeaddr.Source) error {
	d, err := r.new(addrs)
	if err == nil {
		err = d.Start(ctx)
	}
	if err != nil {
		return fmt.Errorf("make the table for services that IPVS cannot serve: %w", err)
	}
	r.dataplane, r.begun, r.open = d, false, false
	return nil
}

// stop stops the dataplane. The table stays.
func (r *rest) stop(ctx context.Context) error {
	if r.dataplane == nil {
		return nil
	}
	d := r.dataplane
	r.dataplane = nil
	return d.Stop(ctx)
}

// cleanup deletes the table if there is one.
func (r *rest) cleanup(ctx context.Context) error {
	err := r.stop(ctx)
	d, newErr := r.new(nil)
	if newErr != nil {
		return errors.Join(err, newErr)
	}
	return errors.Join(err, d.Cleanup(ctx))
}

func (r *rest) verify(ctx context.Context) error {
	if r.dataplane == nil {
		return nil
	}
	return r.dataplane.Verify(ctx)
}

// sync programs the services of c that IPVS cannot serve. It calls the function ipvs with
// c, without services that have failed. A service that moves between IPVS and the table
// is added to one before it is removed from the other. So new connections always find the
// service. If it cannot be added, it stays where it is, and fails. The argument addrs is
// for node ports.
func (r *rest) sync(ctx context.Context, c *sink.Changes, addrs nodeaddr.Source, ipvs func(*sink.Changes) error) error {
	if c.First {
		r.begun, r.passing = false, true
		r.services, r.stuck = map[types.NamespacedName]bool{}, map[types.NamespacedName]*api.View{}
	}
	var set, removed []sink.Change
	for ch := range c.Services {
		if old := r.stuck[ch.Key]; old != nil {
			ch.Old = old
		} else if !isUnsuitable(ch.Old) {
			ch.Old = nil
		}
		if isUnsuitable(ch.New) {
			set = append(set, ch)
		} else if ch.New = nil; r.services[ch.Key] {
			removed = append(removed, ch)
		}
	}
	lost, removed := r.lost(c, removed)
	set = append(set, lost...)
	slices.SortFunc(set, func(a, b sink.Change) int { return ordering.Keys(a.Key, b.Key) })
	failed := sink.Failed{}
	if err := r.set(ctx, c, set, addrs, failed); err != nil {
		return err
	}
	others := *c
	others.Services, others.Failing = except(c.Services, failed), failing(c, failed)
	ipvsFailed := sink.Failed{}
	if err := merge(ipvsFailed, ipvs(&others)); err != nil {
		return err
	}
	for _, ch := range set {
		if err := ipvsFailed[ch.Key]; err != nil && ch.New != nil {
			// The table already has the service. If only the service failed, the driver would not
			// know that.
			return startOver(fmt.Errorf("remove service %s from IPVS: %w", ch.Key, err))
		}
	}
	merge(failed, ipvsFailed.Err())
	if err := r.remove(ctx, c, removed, failed); err != nil {
		return err
	}
	if c.Last {
		r.passing = false
	}
	return failed.Err()
}

// lost divides the argument removed into two lists: services that lose an address and
// port to another service of c, and all other services. The first result also has the
// stuck services that lose an address and port. The table removes these services before
// the other service gets the address and port.
func (r *rest) lost(c *sink.Changes, removed []sink.Change) (lost, others []sink.Change) {
	if len(removed)+len(r.stuck) == 0 {
		return nil, nil
	}
	claims, addrs := map[api.Claim]types.NamespacedName{}, map[netip.Addr]types.NamespacedName{}
	delivered := map[types.NamespacedName]bool{}
	for ch := range c.Services {
		delivered[ch.Key] = true
		for f := range nodeview.Frontends(ch.New) {
			claims[f.Claim()], addrs[f.Addr] = ch.Key, ch.Key
		}
	}
	loses := func(ch *sink.Change) bool {
		for f := range nodeview.Frontends(ch.Old) {
			owner, taken := claims[f.Claim()]
			if whole, ok := claims[api.Claim{IP: f.Addr}]; ok && f.Addr.IsValid() {
				owner, taken = whole, true
			} else if f.Port == 0 {
				owner, taken = addrs[f.Addr]
			}
			if taken && owner != ch.Key {
				return true
			}
		}
		return false
	}
	all := removed
	for key, old := range r.stuck {
		if !delivered[key] {
			all = append(all, sink.Change{Key: key, Old: old})
		}
	}
	for i, ch := range all {
		if loses(&ch) {
			lost = append(lost, ch)
		} else if i < len(removed) {
			others = append(others, ch)
		}
	}
	return lost, others
}

// set programs changes of services that IPVS cannot serve. It adds failing services to
// the argument failed.
func (r *rest) set(ctx context.Context, c *sink.Changes, changes []sink.Change, addrs nodeaddr.Source, failed sink.Failed) error {
	for _, ch := range changes {
		if ch.New != nil {
			r.services[ch.Key] = true
		}
	}
	if r.dataplane == nil {
		if len(changes) == 0 {
			return nil
		}
		if err := r.start(ctx, addrs); err != nil {
			for _, ch := range changes {
				failed.Add(ch.Key, err)
			}
			return nil
		}
	}
	part := *c
	part.First, part.Last, part.Failing, part.Services = !r.begun, false, nil, slices.Values(changes)
	part.NodeChanged = c.NodeChanged || part.First
	if len(changes) == 0 && !part.NodeChanged {
		return nil
	}
	if err := merge(failed, r.dataplane.Sync(ctx, &part)); err != nil {
		return err
	}
	r.begun, r.open = true, r.open || part.First
	for _, ch := range changes {
		if failed[ch.Key] == nil {
			delete(r.stuck, ch.Key)
			if ch.New == nil {
				delete(r.services, ch.Key)
			}
		}
	}
	return nil
}

// remove removes services that are now in IPVS or deleted, except the services in the
// argument failed. It ends the pass of the table, and deletes the table if no service
// needs it.
func (r *rest) remove(ctx context.Context, c *sink.Changes, changes []sink.Change, failed sink.Failed) error {
	part := *c
	part.First, part.NodeChanged = false, false
	part.Last = c.Last || r.open && !r.passing
	part.Services, part.Failing = except(slices.Values(changes), failed), nil
	if part.Last {
		part.Failing = failing(c, failed)
	}
	if r.dataplane != nil && (len(changes) > 0 || part.Last) {
		if err := merge(failed, r.dataplane.Sync(ctx, &part)); err != nil {
			return err
		}
		r.open = r.open && !part.Last
	}
	for _, ch := range changes {
		if failed[ch.Key] == nil {
			delete(r.services, ch.Key)
			delete(r.stuck, ch.Key)
		} else if ch.Old != nil {
			r.stuck[ch.Key] = ch.Old
		}
	}
	if len(r.services) > 0 || r.passing && !c.Last || r.dataplane == nil && !c.Last {
		return nil
	}
	// At the end of a pass, there may be a table of an earlier process.
	if err := r.cleanup(ctx); !errors.Is(err, sink.ErrOwned) {
		return err
	}
	return nil
}

// merge adds the failed services that err names to the argument failed. If err does not
// name services, merge returns err.
func merge(failed sink.Failed, err error) error {
	some, ok := sink.Acknowledged(err)
	if !ok {
		return err
	}
	for key, err := range some {
		failed.Add(key, errors.Join(failed[key], err))
	}
	return nil
}

// except yields the changes of services that have not failed.
func except(changes iter.Seq[sink.Change], failed sink.Failed) iter.Seq[sink.Change] {
	failed = maps.Clone(failed)
	return func(yield func(sink.Change) bool) {
		for ch := range changes {
			if failed[ch.Key] == nil && !yield(ch) {
				return
			}
		}
	}
}

// failing returns the field Failing for a dataplane that does not get the services that
// have failed.
func failing(c *sink.Changes, failed sink.Failed) []types.NamespacedName {
	if !c.Last || len(failed) == 0 {
		return c.Failing
	}
	return slices.Compact(slices.SortedFunc(slices.Values(slices.AppendSeq(slices.Clone(c.Failing), maps.Keys(failed))), ordering.Keys))
}
