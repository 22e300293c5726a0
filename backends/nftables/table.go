// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// table is the table of an instance, and what is known of it without reading. One
// goroutine may use it at a time.
//
// A change of services goes this way: syncServices lets the planner emit the elements of
// the old and the new view into a patch. apply divides the parts of the patch into
// transactions. commit writes one transaction: wire.elements encodes the messages, and
// netfilter.Conn sends them. The state notes what the kernel then has.
type table struct {
	opts    *Options
	conn    *conn
	planner *planner
	// state is what the kernel has, nil while that is unknown.
	state *state
	// skeleton has the digest of each skeleton chain, as it was sent.
	skeleton map[string]digest
	// podCIDRs are those of the Node object that the skeleton has.
	podCIDRs []netip.Prefix
	// replaced is the name of another table of this instance, which the end of a pass
	// deletes. It is empty if there is none.
	replaced string
	// ahead is what was read after Start for the first pass, nil if nothing was.
	ahead *pass
	// pass is the current pass, nil if there is none.
	pass      *pass
	drift     drift
	leftovers leftovers
	now       func() time.Time
}

func newTable(opts *Options) *table {
	c := newConn(opts.NetNS, opts.tables()[0])
	c.Transacted = opts.Observer.Transacted
	return &table{opts: opts, conn: c, planner: newPlanner(), now: time.Now}
}

// close closes the connection. The contents of the table are unknown afterwards.
func (t *table) close() error {
	t.state, t.ahead, t.pass = nil, nil, nil
	return t.conn.Close()
}

// sync programs c, with node ports at nodePortAddrs. It returns what Sync of [sink.Sink]
// returns.
func (t *table) sync(ctx context.Context, c *sink.Changes, nodePortAddrs []netip.Addr) error {
	failed, err := t.program(ctx, c, nodePortAddrs)
	if err != nil {
		t.state = nil // the kernel may have a part of c
		return fmt.Errorf("%w (%w)", err, sink.ErrStartOver)
	}
	t.opts.Observer.Holds(t.state.elements())
	return failed.Err()
}

// errPodCIDRs causes the pass that writes new pod CIDRs into the skeleton.
var errPodCIDRs = errors.New("the pod CIDRs of the Node object changed")

func (t *table) program(ctx context.Context, c *sink.Changes, nodePortAddrs []netip.Addr) (sink.Failed, error) {
	addrs := nodeAddrs(c.Node)
	switch {
	case c.First:
		t.setPodCIDRs(c.Node)
		if err := t.beginPass(ctx, addrs); err != nil {
			return nil, err
		}
	case t.state == nil:
		return nil, fmt.Errorf("the contents of table inet %s are unknown", t.conn.table)
	case c.NodeChanged && t.setPodCIDRs(c.Node):
		return nil, errPodCIDRs
	case c.NodeChanged && t.planner.admitsNode && !slices.Equal(addrs, t.planner.nodeAddrs):
		return nil, errors.New("the node's addresses changed, which source ranges admit")
	case c.NodeChanged:
		t.planner.nodeAddrs = addrs
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

// syncServices programs the differences between the views of each service. In a pass it
// programs what differs from the table.
func (t *table) syncServices(ctx context.Context, services iter.Seq[sink.Change]) (failed sink.Failed, err error) {
	p := newPatch()
	for ch := range services {
		p.begin(ch.Key)
		t.planner.plan(ch.Old, p.remove, p.removeObject)
		t.planner.plan(ch.New, func(e element) {
			if t.pass != nil {
				t.pass.claim(p, &e)
			}
			p.add(e)
		}, p.addObject)
	}
	if err := t.apply(ctx, p.parts(), &failed); err != nil {
		return nil, err
	}
	if t.pass != nil {
		t.pass.delivered(p, failed)
	}
	return failed, nil
}

// syncNodePortAddresses makes addrs, except loopback addresses, the addresses of node
// ports. It reads the sets, which are short, and writes what differs.
func (t *table) syncNodePortAddresses(ctx context.Context, addrs []netip.Addr) error {
	p := newPatch()
	p.begin(types.NamespacedName{})
	for _, family := range families {
		s, err := readSnapshot(ctx, t.conn, mapID{kind: nodePortAddresses, family: family})
		if err != nil {
			return err
		}
		for e := range s.all() {
			p.remove(e)
		}
	}
	for _, a := range addrs {
		if !a.IsLoopback() {
			p.add(addressElement(nodePortAddresses, a))
		}
	}
	var failed sink.Failed
	if err := t.apply(ctx, p.parts(), &failed); err != nil {
		return err
	}
	return errors.Join(failed.Unwrap()...)
}

// nodeAddrs returns the addresses of the Node object.
func nodeAddrs(n *api.Node) []netip.Addr {
	var addrs []netip.Addr
	if n != nil {
		for _, a := range n.Addresses {
			addrs = append(addrs, a.IP)
		}
	}
	return addrs
}

// setPodCIDRs sets the pod CIDRs of the node if the options use them, and reports whether
// they changed.
func (t *table) setPodCIDRs(node *api.Node) (changed bool) {
	var cidrs []netip.Prefix
	if t.opts.NodePodCIDRs && node != nil {
		cidrs = node.PodCIDRs
	}
	changed = !slices.Equal(cidrs, t.podCIDRs)
	t.podCIDRs = cidrs
	return changed
}

// skeletonChains returns the chains of the skeleton, with the pod CIDRs of the node.
func (t *table) skeletonChains() []chain {
	opts := *t.opts
	opts.ClusterCIDRs = slices.Concat(opts.ClusterCIDRs, t.podCIDRs)
	return opts.skeletonChains()
}
