// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/kernelnode"
	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/internal/shrink"
	"github.com/kpng-project/kpng/internal/sourcelists"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// table programs the table of an instance and records its content. Only one goroutine may
// use it at a time.
//
// A change of services takes several steps. First, planService adds the difference between
// the old and the new view of each service to a patch. Then apply divides the parts of
// the patch into transactions, and commit writes each transaction. To encode messages,
// commit uses writeElements. To send them, it uses netfilter.Conn. Finally, commit
// updates the state.
type table struct {
	opts    *options
	conn    *conn
	reader  reader
	numbers *numbers
	// sources has the lists of source ranges.
	sources *sourcelists.Lists
	// services has the lists of endpoints of each service.
	services     map[types.NamespacedName][]list
	mostServices shrink.Size
	// hashSlots is the number of slots of all lists with stable hashing.
	hashSlots int
	// clientSeed is the seed of the hash of clients.
	clientSeed uint32
	// staleClients is true if the maps of clients may have clients of lists that no longer
	// exist.
	staleClients bool
	// state is the expected content of the table, or nil if the content is unknown.
	state *state
	// skeleton maps the name of each chain of the loaded skeleton to a digest of the chain.
	skeleton map[string]nft.Digest
	// podCIDRs are those pod CIDRs of the Node object that the skeleton contains.
	podCIDRs []netip.Prefix
	// serviceCIDRs are the service CIDRs that setServiceCIDRs has set. They are nil
	// before the first call of setServiceCIDRs.
	serviceCIDRs []netip.Prefix
	// replaced is the name of the table that the current pass replaces, and deletes at its
	// end. It is empty if there is no such table.
	replaced string
	// repeated is true if services failed in a pass that would have replaced a table. The
	// next pass replaces the table even if services fail again.
	repeated bool
	// ahead is the next pass if the table has already been read for it, and otherwise
	// nil.
	ahead *pass
	// pass is the current pass, or nil if there is none.
	pass *pass
	// dumpAll is true if the next pass must read all elements at its beginning, because maps of
	// lists have elements of other programs.
	dumpAll   bool
	drift     drift
	leftovers kernelnode.Leftovers
	// The function beside starts a goroutine that ends when the backend stops.
	beside func(func(context.Context))
	// The function unlocked calls another function without the lock of the table.
	unlocked func(func())
}

func newTable(opts *options) *table {
	c := newConn(opts.NetNS, opts.tables()[0])
	c.Transacted = opts.Observer.Wrote
	if opts.exchange != nil {
		c.Exchange = opts.exchange
	}
	return &table{
		opts: opts, conn: c, reader: reader{conn: newConn(opts.NetNS, "")}, numbers: newNumbers(),
		sources: sourcelists.New(nil), services: map[types.NamespacedName][]list{},
	}
}

// close closes the connections. After that the content of the table is unknown.
func (t *table) close() error {
	t.state, t.ahead, t.pass = nil, nil, nil
	return errors.Join(t.conn.Close(), t.reader.close())
}

// The method sync programs the changes c. It also programs node ports at nodePortAddrs.
// It returns errors as described in [sink.Sink].
func (t *table) sync(ctx context.Context, c *sink.Changes, nodePortAddrs []netip.Addr) error {
	failed, err := t.program(ctx, c, nodePortAddrs)
	if err != nil {
		t.state = nil // unknown, because the kernel may have applied a part of c
		return fmt.Errorf("%w (%w)", err, sink.ErrStartOver)
	}
	if t.pass == nil { // a pass may not have read all elements yet
		t.opts.Observer.Holds("elements", t.state.elements())
	}
	return failed.Err()
}

func (t *table) program(ctx context.Context, c *sink.Changes, nodePortAddrs []netip.Addr) (sink.Failed, error) {
	addrs := kernelnode.Addrs(c.Node)
	switch {
	case c.First:
		t.setPodCIDRs(c.Node)
		if err := t.beginPass(ctx, addrs); err != nil {
			return nil, err
		}
	case t.state == nil:
		return nil, fmt.Errorf("the contents of table inet %s are unknown", t.conn.Table)
	case c.NodeChanged && t.setPodCIDRs(c.Node):
		// A new pass writes the pod CIDRs into the skeleton.
		return nil, errors.New("the pod CIDRs of the Node object changed")
	case c.NodeChanged && !t.sources.SetNodeAddrs(addrs):
		return nil, errors.New("the node's addresses have changed, and source ranges may admit them")
	}
	failed, err := t.syncServices(ctx, c.Services)
	if err != nil {
		return nil, err
	}
	if c.NodeChanged {
		if err := t.syncNodePortAddresses(ctx, nodePortAddrs); err != nil {
			return nil, fmt.Errorf("update the addresses of node ports: %w", err)
		}
	}
	if c.Last {
		return failed, t.endPass(ctx, len(failed)+len(c.Failing) > 0)
	}
	return failed, nil
}

// syncServices programs the difference between the old and the new view of each service.
// During a pass, it programs the difference between the table and the new views.
func (t *table) syncServices(ctx context.Context, services iter.Seq[sink.Change]) (failed sink.Failed, err error) {
	p := newPatch()
	lists := map[types.NamespacedName][]list{}
	var sources []*sourcelists.Change
	for ch := range services {
		p.beginPart(ch.Key)
		change := t.sources.Begin(ch.Key, ch.Old, ch.New)
		sources = append(sources, change)
		next, err := t.planService(ctx, p, &ch, change)
		if t.pass != nil && t.pass.err != nil {
			return nil, t.pass.err
		}
		if err != nil {
			p.fail(err)
		}
		lists[ch.Key] = next
		t.hashSlots += hashSlotsOf(next) - hashSlotsOf(t.services[ch.Key])
	}
	if err := t.writeLists(ctx, &failed); err != nil {
		return nil, err
	}
	if err := t.apply(ctx, withoutFailed(p.parts(&failed), &failed), &failed); err != nil {
		return nil, err
	}
	for _, change := range sources {
		_, hasFailed := failed[change.Service]
		change.End(hasFailed)
	}
	for key, next := range lists {
		_, hasFailed := failed[key]
		t.settle(key, next, hasFailed)
	}
	t.shrink()
	if t.pass != nil {
		t.pass.recordFailed(p, failed)
		t.pass.forgetClaimed()
	}
	return failed, t.reapLists(ctx, maxUnused)
}

// shrink releases the memory of removed services.
func (t *table) shrink() {
	t.services = shrink.Map(t.services, &t.mostServices)
	t.numbers.used = shrink.Map(t.numbers.used, &t.numbers.most)
	t.state.wanted = shrink.Map(t.state.wanted, &t.state.most)
}

// syncNodePortAddresses programs node ports at addrs, except at loopback addresses. It
// reads the sets of addresses, which are small, and writes the differences.
func (t *table) syncNodePortAddresses(ctx context.Context, addrs []netip.Addr) error {
	p := newPatch()
	p.beginPart(types.NamespacedName{})
	for _, family := range nft.Families {
		s, err := readSnapshot(ctx, t.conn, mapID{kind: kindNodePortAddresses, family: family}, nil)
		if err != nil {
			return err
		}
		for e := range s.all() {
			p.remove(e)
		}
	}
	for _, a := range addrs {
		if !a.IsLoopback() {
			p.add(addressElement(kindNodePortAddresses, a))
		}
	}
	var failed sink.Failed
	if err := t.apply(ctx, p.parts(&failed), &failed); err != nil {
		return err
	}
	return errors.Join(failed.Unwrap()...)
}

// setPodCIDRs stores the pod CIDRs of the node if the options use them. It reports
// whether they changed.
func (t *table) setPodCIDRs(node *api.Node) (changed bool) {
	var cidrs []netip.Prefix
	if t.opts.NodePodCIDRs && node != nil {
		cidrs = node.PodCIDRs
	}
	changed = !slices.Equal(cidrs, t.podCIDRs)
	t.podCIDRs = cidrs
	return changed
}

// setServiceCIDRs replaces the service CIDRs that Options.FollowServiceCIDRs provides. It
// writes one chain, in one transaction. If this fails, the next pass loads the skeleton
// with the CIDRs.
func (t *table) setServiceCIDRs(ctx context.Context, cidrs []netip.Prefix) error {
	t.serviceCIDRs = cidrs
	chain := nft.Chain{Name: serviceCIDRsChain, Rules: t.options().serviceCIDRRules()}
	if t.skeleton == nil || t.skeleton[chain.Name] == chain.Digest() {
		return nil // if there is no skeleton yet, the first pass writes the CIDRs
	}
	err := t.conn.Transact(ctx, func(w *nft.Writer) {
		w.FlushChain(chain.Name)
		w.AddRules(chain.Name, chain.Rules)
	})
	if err != nil {
		t.state, t.ahead = nil, nil
		return fmt.Errorf("write chain %s of table inet %s: %w", chain.Name, t.conn.Table, err)
	}
	t.skeleton[chain.Name] = chain.Digest()
	if t.state != nil {
		t.state.rules[chain.Name] = chain.Digest()
	}
	return nil
}

// outermost returns, in sorted order, the valid CIDRs that are not inside another CIDR. The
// result is not nil.
func outermost(cidrs []netip.Prefix) []netip.Prefix {
	cidrs = slices.Clone(cidrs)
	for i, c := range cidrs {
		cidrs[i] = c.Masked()
	}
	slices.SortFunc(cidrs, func(a, b netip.Prefix) int { // a CIDR comes before those that it contains
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
	out := make([]netip.Prefix, 0, len(cidrs))
	for _, c := range cidrs {
		if n := len(out); c.IsValid() && (n == 0 || !out[n-1].Overlaps(c)) {
			out = append(out, c)
		}
	}
	return out
}

// options returns the options with the CIDRs that are followed.
func (t *table) options() *Options {
	opts := t.opts.public
	opts.ClusterCIDRs = slices.Concat(opts.ClusterCIDRs, t.podCIDRs)
	opts.ServiceCIDRs = slices.Concat(opts.ServiceCIDRs, t.serviceCIDRs)
	return &opts
}

// skeletonChains returns the chains of the skeleton, including rules for the CIDRs that are
// followed.
func (t *table) skeletonChains() nft.Chains { return t.options().skeletonChains(t.clientSeed) }
