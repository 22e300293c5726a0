// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"sync"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendoptions"
	"github.com/kpng-project/kpng/internal/kernelnode"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/netns"
	"github.com/kpng-project/kpng/internal/nodeaddrs"
	"github.com/kpng-project/kpng/internal/ownership"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// backend is the dataplane of this package. It serializes the calls of a driver and
// the updates of the node's addresses. It forwards changes to connection tracking. Its
// rulesets read and write the rules.
type backend struct {
	opts  options
	owner ownership.Owner
	tasks kernelnode.Tasks

	stats sync.Mutex // held while counters are read; locked before mu

	mu       sync.Mutex // guards the fields below
	rulesets []*ruleset // one per family
	stale    []*ruleset // rules of an earlier process in the other flavour of iptables
	// known is true if the rulesets agree with the kernel, except for failed services.
	known bool
	node  *api.Node
	// leftovers records whether another pass is needed, see endPass.
	leftovers kernelnode.Leftovers
	// Before the time verifyAt, Verify does not compare rules. After that time, Verify
	// begins with the ruleset of index nextVerified.
	verifyAt     time.Time
	nextVerified int
	// interrupted counts the consecutive Verify calls that were interrupted while they
	// compared the ruleset of index nextVerified.
	interrupted int
	pause       kernelnode.DriftPause
}

var _ backends.Dataplane = (*backend)(nil)

var families = [...]api.Family{api.IPv4, api.IPv6}

// New returns a dataplane. It does not access the kernel. It returns an error if opts are
// invalid.
//
// Start finds the programs of iptables and, if installed, the program ipset. It changes no
// rules. It needs CAP_NET_ADMIN, and for flavour legacy also CAP_NET_RAW.
func New(opts Options) (backends.Dataplane, error) {
	b, err := newBackend(options{public: opts})
	if err != nil {
		return nil, err
	}
	return b, nil
}

func newBackend(opts options) (*backend, error) {
	if err := opts.complete(); err != nil {
		return nil, fmt.Errorf("iptables options: %w", err)
	}
	if opts.lookPath == nil {
		opts.lookPath = exec.LookPath
	}
	if opts.socket == nil {
		opts.socket = unix.Socket
	}
	opts.Observer = backendoptions.Observe(opts.Observer)
	return &backend{opts: opts}, nil
}

// SharedOptions implements [backendoptions.Sharer].
func (b *backend) SharedOptions() (string, *backends.Options) { return "iptables", &b.opts.Options }

// Honours implements [backends.Capable]. The backend does not honour algorithms, because no
// match or target selects one of many endpoints by a hash; docs/operate/iptables.md has
// the details. The sink Conntrack resets connections.
func (b *backend) Honours() nodeview.Parameters {
	return nodeview.Parameters{Weights: true, NodePortSources: true, Resets: kernelnode.Resets(&b.opts.Options)}
}

// Start implements [sink.Starter]. It watches the node's addresses in the background.
func (b *backend) Start(ctx context.Context) error {
	return b.owner.Start(b.own(ctx), func() error { return b.start(ctx) })
}

// own returns a function that takes the ownership of the chains and sets.
func (b *backend) own(ctx context.Context) func() (release func(), err error) {
	return func() (func(), error) {
		return ownership.Objects(ctx, b.opts.NetNS, "iptables chains "+b.opts.prefix())
	}
}

func (b *backend) start(ctx context.Context) error {
	if err := kernelnode.ApplySysctls(ctx, &b.opts.Options); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	log := klog.FromContext(ctx)
	flavour, err := parseFlavour(b.opts.Flavour)
	if err != nil {
		return err
	}
	if flavour == flavourDetected {
		if flavour, err = detectFlavour(ctx, &b.opts); err != nil {
			return err
		}
	}
	ipset := ""
	if !b.opts.WithoutIPSet {
		switch ipset, err = findIPSet(ctx, &b.opts); {
		case errors.Is(err, errNoSets):
			log.Info("Using rules in place of sets", "reason", err.Error())
		case err != nil:
			return err
		}
	}
	if b.rulesets, err = b.newRulesets(flavour, ipset); err != nil {
		return err
	}
	log.Info("Programs of iptables found", "flavour", flavour, "ipset", ipset)
	b.stale = b.inOtherFlavour(ctx, flavour)
	if err := b.tasks.Start(ctx, &b.opts.Options); err != nil {
		return err
	}
	b.tasks.FollowAddresses(b.updateAddresses)
	return nil
}

// inOtherFlavour returns the rulesets that this instance may have made in the other
// flavour of iptables. If the rules of a family cannot be read, the result contains the
// ruleset of that family.
func (b *backend) inOtherFlavour(ctx context.Context, flavour flavour) (list []*ruleset) {
	other := flavourNFT + flavourLegacy - flavour
	for _, family := range families {
		r, err := newRunner(&b.opts, other, family, "")
		if err != nil {
			if err := b.checkWithoutPrograms(ctx, other, err); err != nil {
				klog.FromContext(ctx).Error(err, "Cannot remove the rules of an earlier process in the other flavour of iptables")
			}
			return list // usually, the node does not have that flavour
		}
		t := &ruleset{renderer: renderer{opts: &b.opts.public, family: family}, run: r}
		has, err := hasTables(ctx, b.opts.NetNS, other, family)
		if has {
			has, err = t.hasChains(ctx)
		}
		if err != nil {
			klog.FromContext(ctx).Error(err, "Cannot read the rules in the other flavour of iptables; removing those of this instance after a pass",
				"family", family, "flavour", other)
		} else if !has {
			continue
		}
		list = append(list, t)
	}
	return list
}

// checkWithoutPrograms is called with the error "missing" if the programs of a flavour
// are not installed. It returns this error if the kernel has chains of the instance in
// flavour nft. In flavour legacy, the names of chains cannot be read without the
// programs. Therefore checkWithoutPrograms only logs the error if the kernel has tables
// of this flavour.
func (b *backend) checkWithoutPrograms(ctx context.Context, flavour flavour, missing error) error {
	for _, family := range families {
		has, err := hasTables(ctx, b.opts.NetNS, flavour, family)
		if has && flavour == flavourLegacy {
			klog.FromContext(ctx).Info("Cannot look for rules of this instance", "family", family, "flavour", flavour, "reason", missing.Error())
			continue
		}
		if has {
			t := &ruleset{renderer: renderer{opts: &b.opts.public, family: family}, run: &runner{flavour: flavour}}
			has, err = t.hasChains(ctx)
		}
		if err != nil {
			return err
		}
		if has {
			return fmt.Errorf("the kernel has %s rules of this instance in flavour %s: %w", family, flavour, missing)
		}
	}
	return nil
}

// removeStale removes the rules in the other flavour. These rules still handle
// connections to services, but nothing updates them.
func (b *backend) removeStale(ctx context.Context) {
	b.stale = slices.DeleteFunc(b.stale, func(t *ruleset) bool {
		log := klog.FromContext(ctx).WithValues("family", t.family, "flavour", t.run.flavour)
		if err := t.remove(ctx); err != nil {
			log.Error(err, "Cannot remove the old rules in the other flavour of iptables; retrying after another pass")
			return false
		}
		log.Info("Removed the old rules in the other flavour of iptables")
		return true
	})
}

// newRulesets returns a ruleset for each family that the kernel has.
func (b *backend) newRulesets(flavour flavour, ipset string) (list []*ruleset, err error) {
	conn, transactions := netfilter.NewConn(b.opts.NetNS), new(uint32)
	for _, family := range families {
		if family == api.IPv6 {
			var statErr error
			if err := netns.Do(b.opts.NetNS, func() { _, statErr = os.Stat("/proc/thread-self/net/if_inet6") }); err != nil {
				return nil, err
			}
			if errors.Is(statErr, fs.ErrNotExist) {
				continue
			}
		}
		run, err := newRunner(&b.opts, flavour, family, ipset)
		if err != nil {
			return nil, err
		}
		run.conn, run.transactions = conn, transactions
		list = append(list, &ruleset{renderer: renderer{opts: &b.opts.public, family: family}, run: run})
	}
	return list, nil
}

func (b *backend) updateAddresses(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.known {
		return nil // a pass must run first; it reads the addresses
	}
	return b.updateEnvironment(ctx)
}

// Stop implements [sink.Stopper]. The rules stay and forward traffic; see Cleanup.
func (b *backend) Stop(ctx context.Context) error {
	defer b.owner.Release()
	err := b.tasks.Stop(ctx)
	b.mu.Lock()
	defer b.mu.Unlock()
	return errors.Join(err, b.closeConns())
}

// closeConns closes the connections of the runners. The next request opens them again.
func (b *backend) closeConns() error {
	var errs []error
	for _, t := range b.rulesets {
		errs = append(errs, t.run.conn.Close())
	}
	return errors.Join(errs...)
}

// Cleanup implements [sink.Cleaner]. It removes the chains and sets of the instance in
// both flavours, and the rules that jump to these chains. The backend need not be
// started. If another process programs the instance, Cleanup changes nothing, and its error
// wraps [sink.ErrOwned].
func (b *backend) Cleanup(ctx context.Context) error {
	return b.owner.During(b.own(ctx), func() error { return b.cleanup(ctx) })
}

func (b *backend) cleanup(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	errs := []error{b.closeConns()}
	for _, flavour := range []flavour{flavourNFT, flavourLegacy} {
		if _, err := b.opts.findProgram(programName(flavour, api.IPv4, "save"), "iptables"); err != nil {
			errs = append(errs, b.checkWithoutPrograms(ctx, flavour, err))
			continue
		}
		list, err := b.newRulesets(flavour, "")
		errs = append(errs, err)
		for _, t := range list {
			if has, err := hasTables(ctx, b.opts.NetNS, flavour, t.family); !has {
				errs = append(errs, err)
				continue
			}
			errs = append(errs, t.remove(ctx))
		}
	}
	b.known = false
	if err := errors.Join(errs...); err != nil {
		return err // the remaining rules may use the sets
	}
	ipset, err := findIPSet(ctx, &b.opts)
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return nil
	case errors.Is(err, errNoSets):
		klog.FromContext(ctx).Info("Cannot list sets; removing none", "reason", err.Error())
		return nil
	case err != nil:
		return err
	}
	return (&runner{netNS: b.opts.NetNS, ipset: ipset}).destroySets(ctx, b.opts.isOwn)
}

// Sync implements [sink.Sink]. A service that fails keeps its old rules. The first Sync
// of a pass reads the rules in the kernel.
func (b *backend) Sync(ctx context.Context, c *sink.Changes) error {
	return b.tasks.Sync(ctx, c, b.program(ctx, c))
}

func (b *backend) program(ctx context.Context, c *sink.Changes) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	defer b.recordTransactions(ctx)
	if c.NodeChanged {
		nodeaddrs.SetNode(b.tasks.Addresses, c.Node)
		b.node = c.Node
	}
	if c.First {
		if err := b.beginPass(ctx); err != nil {
			return err
		}
	} else if !b.known {
		return fmt.Errorf("the rules in the kernel are unknown: %w", sink.ErrStartOver)
	} else if err := b.updateEnvironment(ctx); err != nil {
		return err
	}
	var failed sink.Failed
	lists := make([][]service, len(b.rulesets))
	for i, t := range b.rulesets {
		lists[i] = t.render(c.Services, &failed)
	}
	// A large service is programmed after the others, and alone.
	large := make([][]service, len(b.rulesets))
	for i, t := range b.rulesets {
		lists[i], large[i] = t.bySize(lists[i])
		if err := t.apply(ctx, lists[i], &failed); err != nil {
			return err
		}
	}
	for i, t := range b.rulesets {
		for _, s := range large[i] {
			if err := t.apply(ctx, []service{s}, &failed); err != nil {
				return err
			}
		}
	}
	if c.Last {
		failing := map[types.NamespacedName]bool{}
		for _, key := range c.Failing {
			failing[key] = true
		}
		for key := range failed {
			failing[key] = true
		}
		if err := b.endPass(ctx, failing); err != nil {
			return err
		}
	}
	chains := 0
	for _, t := range b.rulesets {
		chains += len(t.chains)
	}
	b.opts.Observer.Holds("chains", chains)
	return failed.Err()
}

// recordTransactions is called after the backend has changed rules. If no other program
// has changed nf_tables since a ruleset was verified, the ruleset still counts as
// verified.
func (b *backend) recordTransactions(ctx context.Context) {
	generation, err := b.rulesets[0].run.generation(ctx)
	if err != nil {
		return // the next Verify reports the error
	}
	for _, t := range b.rulesets {
		if t.verified != 0 && generation-t.verified == *t.run.transactions-t.verifiedAt {
			t.setVerified(generation)
		}
	}
}

func (b *backend) beginPass(ctx context.Context) error {
	b.known = false
	env := b.environment()
	var broken []error
	for _, t := range b.rulesets {
		t.env = env
		if err := t.beginPass(ctx); err != nil {
			return err
		}
		if t.beginErr != nil {
			broken = append(broken, t.beginErr)
		}
	}
	if len(broken) == len(b.rulesets) {
		return errors.Join(broken...)
	}
	b.known, b.nextVerified, b.interrupted = true, 0, 0
	return nil
}

// endPass removes the rules that no service needs. Services that fail keep their rules in
// both flavours until a later pass. Verify requests a later pass if services or families
// fail, if rules in the other flavour are left, or if a ruleset could not use sets.
func (b *backend) endPass(ctx context.Context, failing map[types.NamespacedName]bool) error {
	for _, t := range b.rulesets {
		if err := t.prune(ctx, failing); err != nil {
			return err
		}
	}
	failed := len(failing) > 0 || slices.ContainsFunc(b.rulesets, func(t *ruleset) bool { return t.beginErr != nil })
	if !failed {
		b.removeStale(ctx)
		b.opts.Observer.Drifted(false)
	}
	lacksSets := slices.ContainsFunc(b.rulesets, func(t *ruleset) bool { return t.run.ipset != "" && !t.withSets })
	b.leftovers.Exist = failed || len(b.stale) > 0 || lacksSets
	b.leftovers.RecordPass(time.Now(), b.leftovers.Exist)
	return nil
}

// environment returns the present properties of the node.
func (b *backend) environment() environment {
	addrs, _ := b.tasks.Addresses.Addresses()
	env := environment{nodePorts: addrs, node: kernelnode.Addrs(b.node), pods: b.opts.ClusterCIDRs}
	if b.node != nil && b.opts.NodePodCIDRs {
		env.pods = slices.Concat(env.pods, b.node.PodCIDRs)
	}
	return env
}

// updateEnvironment renders everything again if the properties of the node have changed.
func (b *backend) updateEnvironment(ctx context.Context) error {
	env := b.environment()
	for _, t := range b.rulesets {
		if err := t.setEnvironment(ctx, env); err != nil {
			b.known = false
			return fmt.Errorf("update the addresses of the node: %w (%w)", err, sink.ErrStartOver)
		}
	}
	return nil
}

// maxInterrupted limits the consecutive Verify calls that may be interrupted while they
// compare the same ruleset. After maxInterrupted such calls, the next Verify ignores its
// context. Therefore all rules are compared even while services constantly change.
const maxInterrupted = 2

// Verify implements [sink.Verifier]. It compares the rules in the kernel with those that
// the backend has written. If they differ, it returns an error that wraps
// [sink.ErrStartOver], and a new pass repairs the rules. If ctx ends while Verify
// compares the rules of a family, the next Verify continues with that family. If the
// rules of one family cannot be read, Verify compares the other family anyway.
func (b *backend) Verify(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	begin := time.Now()
	switch {
	case !b.known:
		return fmt.Errorf("the rules in the kernel are unknown: %w", sink.ErrStartOver)
	case b.leftovers.Due(begin):
		return fmt.Errorf("the last pass left old rules, or could not use sets: %w", sink.ErrStartOver)
	}
	// Without rules, no service works. So Verify finds the loss of rules even during a
	// pause.
	var errs []error
	for _, t := range b.rulesets {
		err := t.checkLoss(ctx)
		if errors.As(err, new(kernelnode.Difference)) {
			return b.drifted(t, begin, err)
		}
		errs = append(errs, err)
	}
	if begin.Before(b.verifyAt) {
		return errors.Join(errs...)
	}
	defer func() { // pause even if a change of services has cancelled the comparison
		if b.known {
			b.verifyAt = time.Now().Add(max(kernelnode.PauseFactor*time.Since(begin), minPause))
		}
	}()
	for ; b.nextVerified < len(b.rulesets); b.nextVerified++ {
		t, verifyCtx := b.rulesets[b.nextVerified], ctx
		if b.interrupted >= maxInterrupted {
			verifyCtx = context.WithoutCancel(ctx)
		}
		err := t.verify(verifyCtx)
		if errors.As(err, new(kernelnode.Difference)) {
			return b.drifted(t, begin, err)
		}
		errs = append(errs, err)
		if err != nil && verifyCtx.Err() != nil {
			b.interrupted++
			return errors.Join(errs...)
		}
		b.interrupted = 0
	}
	b.nextVerified = 0
	return errors.Join(errs...)
}

// drifted returns the error of Verify after it found err, a [kernelnode.Difference] in
// the rules of t. The returned error requests a new pass.
func (b *backend) drifted(t *ruleset, begin time.Time, err error) error {
	b.known = false
	b.opts.Observer.Drifted(true)
	b.verifyAt = b.pause.Found(begin)
	return fmt.Errorf("another program changed %s rules: %w (%w)", t.family, err, sink.ErrStartOver)
}

// minPause is the shortest pause between two comparisons.
const minPause = 5 * time.Second

// VerifyInterval returns one second, see [sink.Verifier]. Each Verify checks that
// the rules still exist. A comparison of all rules follows only after a pause of five
// seconds, or of 50 times the duration of the last comparison.
func (b *backend) VerifyInterval() time.Duration { return time.Second }
