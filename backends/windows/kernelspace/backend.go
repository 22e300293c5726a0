// SPDX-License-Identifier: Apache-2.0

package kernelspace

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/hns"
	"github.com/kpng-project/kpng/internal/journal"
	"github.com/kpng-project/kpng/internal/nodeaddrs"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/internal/ownership"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// The type backend is the dataplane of this package. It programs services as HNS load
// balancers with their endpoints. Only one driver may use it.
type backend struct {
	opts   Options
	owner  ownership.Owner
	hns    *observed
	record *record

	views   map[types.NamespacedName]*api.View
	nodeIPs []netip.Addr
	// The fields plans, unserved and wanted are computed from the fields views and
	// environment. They are current if planned is true.
	plans    map[types.NamespacedName][]policy
	unserved map[types.NamespacedName][]unserved
	wanted   map[frontend]want
	planned  bool
	// checks contains the policies for health checks by frontend, sorted by service. Several
	// services may have the same frontend.
	checks map[frontend][]want
	// refused has the reasons why services keep their last load balancers.
	refused map[types.NamespacedName]error

	environment environment
	// surveyed is true if the features in environment are known.
	surveyed bool
	// holdings is the state of HNS, or nil while this state is unknown.
	holdings *holdings
	// doubtful is true if holdings may differ from HNS because a call failed. Then the retry
	// of a failed service lists the objects of HNS, but a change of another service does not.
	doubtful bool
	// todo contains the frontends that the next Sync or Verify must check.
	todo map[frontend]bool
	// afterPass contains the frontends that must be checked when the pass has ended.
	afterPass map[frontend]bool
	// passing is true while a pass of the driver is in progress. Until the pass ends, the
	// field views contains only the services delivered so far, so the backend prunes
	// nothing.
	passing bool
	// failing contains the services whose last sync failed. The driver decides when to retry
	// them.
	failing map[types.NamespacedName]bool
}

// The type want describes a load balancer that must exist.
type want struct {
	service types.NamespacedName
	policy  *policy
}

var _ backends.Dataplane = (*backend)(nil)

// New returns a dataplane without calling HNS. It returns an error if the options are
// invalid, or if the system is not Windows.
func New(opts Options) (backends.Dataplane, error) {
	if err := opts.complete(); err != nil {
		return nil, err
	}
	service, err := hns.Open()
	if err != nil {
		return nil, err
	}
	b := &backend{
		opts:      opts,
		views:     map[types.NamespacedName]*api.View{},
		plans:     map[types.NamespacedName][]policy{},
		wanted:    map[frontend]want{},
		todo:      map[frontend]bool{},
		afterPass: map[frontend]bool{},
		failing:   map[types.NamespacedName]bool{},
		unserved:  map[types.NamespacedName][]unserved{},
		checks:    map[frontend][]want{},
		refused:   map[types.NamespacedName]error{},
	}
	b.hns = &observed{hns: service, opts: &b.opts, now: time.Now}
	b.environment.dsr, b.environment.maxBalancers = opts.EnableDSR, opts.MaxLoadBalancers
	b.environment.forwardChecks, b.environment.healthzPort = opts.RootEndpoint != "", opts.HealthzPort
	for _, a := range opts.SourceVIPs {
		if a.Is4() {
			b.environment.sourceVIP4 = a
		} else {
			b.environment.sourceVIP6 = a
		}
	}
	return b, nil
}

// Start reads from the state file which load balancers an earlier process created. It
// fails if the file is of another kind, or if HNS lacks a required feature. It does not
// fail if HNS does not run yet. If another process uses the state file, the error wraps
// [sink.ErrOwned].
func (b *backend) Start(ctx context.Context) error {
	return b.owner.Start(b.own(ctx), func() error { return b.start(ctx) })
}

// own returns a function that takes the ownership of the state file. If the file cannot be
// locked for another reason than another owner, the function logs that and succeeds.
func (b *backend) own(ctx context.Context) func() (release func(), err error) {
	return func() (func(), error) {
		release, err := ownership.File(b.opts.StateFile)
		if err != nil && !errors.Is(err, sink.ErrOwned) {
			klog.FromContext(ctx).Error(err, "Continuing without protection against a second process")
			return func() {}, nil
		}
		return release, err
	}
}

// Stop implements [sink.Stopper]. HNS continues to forward traffic; see Cleanup.
func (b *backend) Stop(context.Context) error {
	b.owner.Release()
	return nil
}

func (b *backend) start(ctx context.Context) error {
	r, err := readRecord(b.opts.StateFile)
	switch {
	case errors.Is(err, journal.ErrForeign):
		return err
	case err != nil:
		// Continue without the state file, because proxying matters more. At worst, load
		// balancers of deleted services remain.
		klog.FromContext(ctx).Error(err, "Load balancers of services that were deleted meanwhile will be left behind")
		r = newRecord(journal.New(b.opts.StateFile, journalKind))
	}
	b.record = r
	if b.opts.EnableDSR {
		if features, err := b.hns.Features(); err == nil {
			return b.checkFeatures(features)
		}
	}
	return nil
}

// checkFeatures returns an error if HNS lacks a feature that the options require.
func (b *backend) checkFeatures(f hns.Features) error {
	if b.opts.EnableDSR && !f.DSR {
		return fmt.Errorf("direct server return (Options.EnableDSR): %w", hns.ErrNotSupported)
	}
	return nil
}

// Sync implements [sink.Sink]. It lists the objects of HNS when a pass begins and when it
// retries a service after a failure. It lists them once more if the last list lacks the
// endpoint of a pod on this node. Sync reports the failed services in a [*sink.Failed].
// Each error contains the frontend and the error of HNS. If HNS does not run or the network
// does not exist, all services fail, and Sync requests a new pass. The driver retries until
// HNS is back.
func (b *backend) Sync(ctx context.Context, c *sink.Changes) error {
	if c.First {
		clear(b.views)
		clear(b.failing)
		clear(b.refused)
		b.holdings, b.planned = nil, false
	}
	b.passing = (b.passing || c.First) && !c.Last
	delivered := b.learn(ctx, c)
	for key := range delivered {
		if b.doubtful && b.failing[key] {
			b.holdings = nil
		}
	}
	p := &pass{backend: b, ctx: ctx, log: klog.FromContext(ctx), delivered: delivered}
	err := p.run()
	if _, ok := sink.Acknowledged(err); !ok {
		return fmt.Errorf("%w: %w", err, sink.ErrStartOver)
	}
	return err
}

// Verify implements [sink.Verifier]. It lists the objects of HNS and repairs drift. It
// ignores failed services, because the driver delivers them again. If Verify fails, the
// state of HNS is unknown, and Verify requests a new pass.
func (b *backend) Verify(ctx context.Context) error {
	if b.holdings == nil {
		return nil // nothing is programmed yet, or the next Sync lists the objects anyway
	}
	b.holdings = nil
	b.readAddresses()
	b.hns.repairing = b.planned && !b.doubtful && !b.passing
	defer func() { b.hns.repairing = false }()
	p := &pass{backend: b, ctx: ctx, log: klog.FromContext(ctx), delivered: map[types.NamespacedName]bool{}}
	err := p.run()
	if err == nil || errors.Is(err, context.Canceled) {
		return err
	}
	return fmt.Errorf("%w: %w", err, sink.ErrStartOver)
}

// VerifyInterval returns the interval for [sink.Verifier]. HNS may delete load balancers
// without a request and without a notification (kubernetes/kubernetes#110849). Verify lists
// all objects of HNS, so the interval is kube-proxy's default of syncPeriod.
func (b *backend) VerifyInterval() time.Duration { return 30 * time.Second }

// learn updates b.views and b.plans from c, and returns the keys of the services in c.
func (b *backend) learn(ctx context.Context, c *sink.Changes) map[types.NamespacedName]bool {
	delivered := map[types.NamespacedName]bool{}
	for change := range c.Services {
		delivered[change.Key] = true
		if change.New == nil {
			delete(b.views, change.Key)
		} else {
			b.views[change.Key] = change.New
		}
	}
	if source := b.opts.NodeAddresses; source != nil {
		if c.NodeChanged {
			nodeaddrs.SetNode(source, c.Node)
		}
		b.readAddresses()
	} else if c.NodeChanged && c.Node != nil {
		var ips []netip.Addr
		for _, a := range c.Node.Addresses {
			ips = append(ips, a.IP)
		}
		b.setAddresses(ips)
	}
	if b.planned {
		b.replan(ctx, maps.Keys(delivered))
	}
	return delivered
}

// readAddresses sets the node's addresses to those of Options.NodeAddresses, if it is set.
func (b *backend) readAddresses() {
	if source := b.opts.NodeAddresses; source != nil {
		ips, _ := source.Addresses()
		b.setAddresses(ips)
	}
}

// setAddresses sets the node's addresses. If they change, all services are planned again.
func (b *backend) setAddresses(ips []netip.Addr) {
	if !slices.Equal(ips, b.nodeIPs) {
		b.nodeIPs, b.planned = ips, false
	}
}

// survey reads the state of HNS, and adds all wanted or recorded frontends to todo. If
// the network has changed, survey clears b.planned, so that all services are planned
// again.
func (b *backend) survey(ctx context.Context) error {
	b.holdings = nil
	if !b.surveyed {
		features, err := b.hns.Features()
		if err != nil {
			return fmt.Errorf("read features of HNS: %w", err)
		}
		if err := b.checkFeatures(features); err != nil {
			return err
		}
		b.environment.features, b.surveyed = features, true
		klog.FromContext(ctx).V(1).Info("HNS runs", "features", features)
	}
	network, err := b.hns.Network(b.opts.Network)
	if err != nil {
		return fmt.Errorf("find HNS network %q: %w", b.opts.Network, err)
	}
	if network.Overlay {
		if !b.environment.features.RemoteSubnet {
			return fmt.Errorf("HNS network %q is an overlay network: remote subnets are %w", b.opts.Network, hns.ErrNotSupported)
		}
		if !b.environment.sourceVIP4.IsValid() {
			return fmt.Errorf("HNS network %q is an overlay network, which needs a source VIP of IPv4", b.opts.Network)
		}
	}
	endpoints, err := b.hns.Endpoints(network.ID)
	if err != nil {
		return fmt.Errorf("list endpoints of HNS network %q: %w", b.opts.Network, err)
	}
	balancers, err := b.hns.LoadBalancers()
	if err != nil {
		return fmt.Errorf("list load balancers of HNS: %w", err)
	}
	if old := b.environment.network; old != nil && old.ID != network.ID {
		klog.FromContext(ctx).Info("HNS network was recreated", "network", b.opts.Network, "id", network.ID)
	}
	if !reflect.DeepEqual(b.environment.network, network) {
		b.environment.network, b.environment.tunnels, b.planned = network, newTunnels(network), false
	}
	b.holdings, b.doubtful = newHoldings(b.opts.Instance, endpoints, balancers), false
	b.record.confirm(b.holdings)
	for f := range b.wanted {
		b.todo[f] = true
	}
	for _, m := range b.record.made {
		b.todo[m.Frontend] = true
	}
	return nil
}

// replan plans services again and adds the affected frontends to todo. A service with too
// many frontends keeps its plan.
func (b *backend) replan(ctx context.Context, keys func(yield func(types.NamespacedName) bool)) {
	type next struct {
		key      types.NamespacedName
		policies []policy
	}
	var again []next
	var shared []frontend
	for key := range keys {
		n := next{key: key}
		delete(b.refused, key)
		if view := b.views[key]; view == nil {
			delete(b.unserved, key)
		} else {
			policies, lacking, err := plan(view, &b.environment)
			if err != nil {
				b.refused[key] = err
				continue
			}
			b.logLacking(ctx, key, lacking)
			n.policies = policies
		}
		for i := range b.plans[key] {
			p := &b.plans[key][i]
			b.todo[p.frontend] = true
			if p.toRoot {
				b.dropCheck(key, p.frontend)
				shared = append(shared, p.frontend)
			}
			if b.wanted[p.frontend].service == key {
				delete(b.wanted, p.frontend)
			}
		}
		delete(b.plans, key)
		again = append(again, n)
	}
	slices.SortFunc(again, func(a, b next) int { return ordering.Keys(a.key, b.key) })
	for _, n := range again {
		if n.policies == nil {
			continue
		}
		b.plans[n.key] = n.policies
		for i := range n.policies {
			w := want{n.key, &n.policies[i]}
			b.todo[w.policy.frontend] = true
			b.wanted[w.policy.frontend] = w // the old entry may belong to another service, which is about to lose the frontend
			if w.policy.toRoot {
				list := b.checks[w.policy.frontend]
				b.checks[w.policy.frontend] = slices.Insert(list, positionOf(list, n.key), w)
			}
		}
	}
	for _, f := range shared {
		b.inherit(f)
	}
}

// positionOf returns the position of a service in a sorted list.
func positionOf(list []want, service types.NamespacedName) int {
	at, _ := slices.BinarySearchFunc(list, service, func(w want, key types.NamespacedName) int { return ordering.Keys(w.service, key) })
	return at
}

// dropCheck removes the policy of a service for a health-check frontend.
func (b *backend) dropCheck(service types.NamespacedName, f frontend) {
	list := b.checks[f]
	at := positionOf(list, service)
	if list = slices.Delete(list, at, at+1); len(list) == 0 {
		delete(b.checks, f)
	} else {
		b.checks[f] = list
	}
}

// inherit assigns the health-check frontend f to another service that has the same
// frontend. Two services have the same health-check frontend if they share a
// load-balancer address.
func (b *backend) inherit(f frontend) {
	if _, wanted := b.wanted[f]; !wanted && len(b.checks[f]) > 0 {
		b.wanted[f] = b.checks[f][0]
	}
}

func (b *backend) replanAll(ctx context.Context) {
	b.environment.nodeIPs = b.nodeIPs
	keys := maps.Clone(b.views)
	for key := range b.plans {
		keys[key] = b.views[key]
	}
	b.replan(ctx, maps.Keys(keys))
	b.planned = true
}

// logLacking logs once which frontends of a service are not served or only partly served.
func (b *backend) logLacking(ctx context.Context, service types.NamespacedName, lacking []unserved) {
	if slices.Equal(lacking, b.unserved[service]) {
		return
	}
	log := klog.FromContext(ctx).WithValues("service", service)
	for _, u := range lacking {
		if u.degraded {
			log.Info("Frontend not fully supported", "frontend", u.key.String(), "reason", u.reason)
		} else {
			log.Info("Frontend not supported", "frontend", u.key.String(), "reason", u.reason)
		}
	}
	if len(lacking) == 0 {
		delete(b.unserved, service)
	} else {
		b.unserved[service] = lacking
	}
}

// Cleanup implements [sink.Cleaner]. It removes all objects that backends with this instance
// and state file created. If the file cannot be read, Cleanup removes nothing, because it
// cannot identify the load balancers of these backends. If another process uses the state
// file, Cleanup changes nothing, and its error wraps [sink.ErrOwned].
func (b *backend) Cleanup(ctx context.Context) error {
	return b.owner.During(b.own(ctx), b.cleanup)
}

func (b *backend) cleanup() error {
	r, err := readRecord(b.opts.StateFile)
	if err != nil {
		return err
	}
	balancers, err := b.hns.LoadBalancers()
	if err != nil {
		return fmt.Errorf("list load balancers of HNS: %w", err)
	}
	var endpoints []hns.Endpoint
	network, err := b.hns.Network(b.opts.Network)
	if err == nil {
		endpoints, err = b.hns.Endpoints(network.ID)
	}
	if err != nil && !errors.Is(err, hns.ErrNotFound) {
		return fmt.Errorf("list endpoints of HNS network %q: %w", b.opts.Network, err)
	}
	h := newHoldings(b.opts.Instance, endpoints, balancers)
	r.confirm(h)
	var errs []error
	for _, id := range sortedKeys(r.made) {
		if err := b.hns.DeleteLoadBalancer(id); err != nil && !errors.Is(err, hns.ErrNotFound) {
			errs = append(errs, fmt.Errorf("delete load balancer %s, %s: %w", id, r.made[id].Frontend, err))
			continue
		}
		h.removeBalancer(id)
	}
	for _, e := range endpoints {
		if !h.idle[e.ID] && e.Name != sourceVIPName(b.opts.Instance) {
			continue
		}
		if err := b.hns.DeleteEndpoint(e.ID); err != nil && !errors.Is(err, hns.ErrNotFound) {
			errs = append(errs, fmt.Errorf("delete endpoint %s, %v: %w", e.ID, e.Addrs, err))
		}
	}
	if len(errs) == 0 {
		errs = append(errs, r.journal.Remove())
	}
	return errors.Join(errs...)
}

// sourceVIPName returns the name of the HNS endpoint for the source VIP.
func sourceVIPName(backend string) string { return backend + "-source-vip" }
