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
)

// table is the table of an instance, and what is known of it without reading it. It is for
// one goroutine at a time.
//
// A change of services takes this way: syncServices plans the elements of the old and the
// new view into a patch, apply divides the patch into transactions, and commit writes one.
type table struct {
	opts    *Options
	conn    *conn
	planner *planner
	// state is what the kernel has, nil while that is unknown.
	state *state
	// skeleton are the digests of the skeleton's chains, as they were sent.
	skeleton map[string]digest
	// podCIDRs are those of the Node object that the skeleton is for.
	podCIDRs []netip.Prefix
	// replaced is the name of another table of this instance, empty if there is none. The
	// end of a pass deletes it.
	replaced string
	// ahead is what was read since Start for the first pass, nil if nothing was.
	ahead *reading
	// pass is the pass under way, nil if there is none.
	pass *pass
	// drift is what is known of changes that other programs made.
	drift drift
	// leftovers is about what the last pass could not remove.
	leftovers leftovers
	now       func() time.Time
}

func newTable(opts *Options) *table {
	c := newConn(opts.NetNS, opts.tables()[0])
	c.Transacted = opts.Observer.Transacted
	return &table{opts: opts, conn: c, planner: newPlanner(), now: time.Now}
}

// close closes the connection. What the table has is unknown afterwards.
func (t *table) close() error {
	t.state, t.ahead, t.pass = nil, nil, nil
	return t.conn.Close()
}

// sync programs c, with node ports at nodePortAddrs. It returns what Sync of [sink.Sink]
// returns.
func (t *table) sync(ctx context.Context, c *sink.Changes, nodePortAddrs []netip.Addr) error {
	failed, err := t.program(ctx, c, nodePortAddrs)
	if err != nil {
		t.state = nil // as the kernel may have some of c
		return fmt.Errorf("%w (%w)", err, sink.ErrStartOver)
	}
	t.opts.Observer.Holds(t.state.elements())
	return failed.Err()
}

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
			return nil, fmt.Errorf("the node's addresses changed: %w", err)
		}
	}
	if c.Last {
		return failed, t.endPass(ctx, len(failed)+len(c.Failing) > 0)
	}
	return failed, nil
}

// syncServices programs what differs between the views of each service, and in a pass
// what differs from what the table has.
func (t *table) syncServices(ctx context.Context, services iter.Seq[sink.Change]) (failed sink.Failed, err error) {
	p := newPatch()
	for ch := range services {
		p.begin(ch.Key)
		t.planner.plan(ch.Old, p.remove, p.disown)
		t.planner.plan(ch.New, func(e element) {
			if t.pass != nil {
				t.pass.claim(p, &e)
			}
			p.add(e)
		}, p.own)
	}
	if err := t.apply(ctx, p.parts(), &failed); err != nil {
		return nil, err
	}
	if t.pass != nil {
		t.pass.delivered(p, failed)
	}
	return failed, nil
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
