// SPDX-License-Identifier: Apache-2.0

package kernelspace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/hns"
	"github.com/kpng-project/kpng/internal/journal"
	"github.com/kpng-project/kpng/internal/nodeaddrs"
	"github.com/kpng-project/kpng/internal/ownership"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/reconcile"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// backend is the dataplane of this package. It programs services as HNS load
// balancers with their endpoints. Only one driver may use it.
//
// The load balancers are the objects of a Reconciler. The key of an object is the frontend,
// and its value is the policy. The value nil means the load balancer that HNS has listed.
// The state of this load balancer is only in the field holdings. The method equal compares
// a policy with that state.
type backend struct {
	opts       Options
	owner      ownership.Owner
	hns        *observedHNS
	record     *record
	reconciler reconcile.Reconciler
	log        klog.Logger // of the present call

	environment environment
	// surveyed is true if the features in environment are known.
	surveyed bool
	// unserved and unservedBefore are the frontends that were logged in this pass and in the
	// pass before.
	unserved, unservedBefore map[types.NamespacedName][]unservedFrontend

	// holdings is the state of HNS, or nil before the first listing.
	holdings *holdings
	// mac is this node's hardware address, and root is the ID of the node's endpoint, if
	// known.
	mac, root string
	// listed is true if the present call has listed the objects of HNS. A call lists them at
	// most once.
	listed bool
	// doubtful is true if a call of HNS failed since the Reconciler has listed the objects, so
	// that its records may differ from HNS. Then the retry of a failed service lists the
	// objects, but a change of another service does not. distrusted is the value of doubtful
	// before the last listing.
	doubtful, distrusted bool
	// beginning is true if the next listing begins a pass. passing is true until the pass ends.
	beginning, passing bool

	// wanted has the frontends of the present operations.
	// If the last operation of a frontend failed, troubled has its service.
	wanted   map[frontend]bool
	troubled map[frontend]types.NamespacedName
	// void has the frontends without a load balancer: HNS has none of their endpoints.
	void map[frontend]bool
	// lacking has the services with load balancers that the present call has programmed
	// without some endpoints.
	lacking sink.Failed
}

var (
	_ backends.Dataplane = (*backend)(nil)
	_ backends.Capable   = (*backend)(nil)
)

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
		opts:     opts,
		unserved: map[types.NamespacedName][]unservedFrontend{},
		troubled: map[frontend]types.NamespacedName{},
		void:     map[frontend]bool{},
	}
	b.hns = &observedHNS{hns: service, opts: &b.opts, now: time.Now}
	b.environment.dsr, b.environment.maxBalancers = opts.EnableDSR, opts.MaxLoadBalancers
	b.environment.forwardChecks, b.environment.healthzPort = opts.RootEndpoint != "", opts.HealthzPort
	for _, a := range opts.SourceVIPs {
		if a.Is4() {
			b.environment.sourceVIP4 = a
		} else {
			b.environment.sourceVIP6 = a
		}
	}
	// A negative VerifyInterval lets each call of Verify compare. The driver already waits
	// for the interval of the backend's own method VerifyInterval between two calls.
	b.reconciler = reconcile.New(b, reconcile.Options[frontend, *policy]{Equal: b.equal, Drifted: b.reportDrift, VerifyInterval: -1})
	return b, nil
}

// Honours implements [backends.Capable]. HNS has no weights, its hash need not be the same
// on all nodes, and it cannot end connections. HNS has no source ranges either. But the
// backend does not serve node ports with source ranges, so clients outside the ranges
// cannot reach them.
func (b *backend) Honours() nodeview.Parameters {
	return nodeview.Parameters{NodePortSources: true}
}

// Start reads from the state file which load balancers an earlier process created. It
// fails if the file is of another kind, or if HNS lacks a required feature. It does not
// fail if HNS does not run yet. If another process uses the state file, the error wraps
// [sink.ErrOwned].
func (b *backend) Start(ctx context.Context) error {
	return b.owner.Start(b.own(ctx), func() error { return b.start(ctx) })
}

// own returns a function that takes the ownership of the state file. If the file cannot be
// locked although no other process owns it, the function logs the error and succeeds.
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
	b.begin(ctx)
	b.passing = b.passing || c.First
	ips := b.addresses(c)
	if c.First {
		b.beginning, b.environment.nodeIPs = true, ips
		b.unservedBefore, b.unserved = b.unserved, map[types.NamespacedName][]unservedFrontend{}
		clear(b.troubled)
	} else if !slices.Equal(ips, b.environment.nodeIPs) {
		return errNodeChanged
	}
	delivered := map[types.NamespacedName]bool{}
	for change := range c.Services {
		delivered[change.Key] = true
		if change.New == nil {
			delete(b.unserved, change.Key)
		}
	}
	failing := len(b.troubled)
	maps.DeleteFunc(b.troubled, func(_ frontend, service types.NamespacedName) bool { return delivered[service] })
	var err error
	if b.doubtful && len(b.troubled) < failing {
		err = b.reconciler.Verify(ctx)
	}
	if err == nil {
		err = b.reconciler.Sync(ctx, c)
	}
	if c.Last {
		b.passing = false
	}
	failed, ok := sink.Acknowledged(err)
	if !ok {
		b.doubtful = true
		b.finish(ctx)
		return startOver(err)
	}
	for key, err := range b.lacking {
		failed.Add(key, err)
	}
	if err := b.finish(ctx); err != nil {
		return startOver(err)
	}
	return failed.Err()
}

// errNodeChanged causes a new pass, which plans all services again.
var errNodeChanged = startOver(errors.New("the addresses of the node changed"))

func startOver(err error) error { return fmt.Errorf("%w (%w)", err, sink.ErrStartOver) }

// Verify implements [sink.Verifier]. It lists the objects of HNS and repairs drift. It
// ignores failed services, because the driver delivers them again. If Verify fails, it
// requests a new pass.
func (b *backend) Verify(ctx context.Context) error {
	b.begin(ctx)
	if b.holdings == nil {
		return nil // nothing is programmed yet
	}
	if !slices.Equal(b.addresses(&sink.Changes{}), b.environment.nodeIPs) {
		return errNodeChanged
	}
	err := b.reconciler.Verify(ctx)
	err = cmp.Or(err, b.lacking.Err(), b.finish(ctx))
	if err == nil || errors.Is(err, context.Canceled) {
		return err
	}
	return startOver(err)
}

// VerifyInterval returns the interval for [sink.Verifier]. HNS may delete load balancers
// without a request and without a notification (kubernetes/kubernetes#110849). Verify lists
// all objects of HNS, so the interval is kube-proxy's default of syncPeriod.
func (b *backend) VerifyInterval() time.Duration { return 30 * time.Second }

// begin prepares the backend for a call of the driver.
func (b *backend) begin(ctx context.Context) {
	b.log, b.listed, b.lacking = klog.FromContext(ctx), false, nil
}

// finish ends a call of the driver. It deletes idle endpoints, unless it is
// unknown which endpoints are idle.
func (b *backend) finish(ctx context.Context) (err error) {
	b.record.dropUnrequested()
	b.logJournalError(b.record.journal.Write())
	if b.holdings == nil {
		return nil
	}
	if !b.doubtful && !b.passing {
		err = b.dropIdle(ctx)
	}
	b.opts.Observer.Holds("endpoints", b.holdings.own)
	b.opts.Observer.Holds("load_balancers", b.record.len())
	return err
}

// addresses returns the present addresses of this node.
func (b *backend) addresses(c *sink.Changes) []netip.Addr {
	if source := b.opts.NodeAddresses; source != nil {
		if c.NodeChanged {
			nodeaddrs.SetNode(source, c.Node)
		}
		ips, _ := source.Addresses()
		return ips
	}
	if !c.NodeChanged || c.Node == nil {
		return b.environment.nodeIPs
	}
	var ips []netip.Addr
	for _, a := range c.Node.Addresses {
		ips = append(ips, a.IP)
	}
	return ips
}

// reportDrift reports drift, except the differences after a failed call.
func (b *backend) reportDrift(now bool) {
	if !now || !b.distrusted {
		b.opts.Observer.Drifted(now)
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

// sortedKeys returns the sorted keys of a map.
func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
