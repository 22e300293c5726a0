// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// followAddresses keeps the addresses at which node ports are served up to date,
// until ctx ends.
func (b *Backend) followAddresses(ctx context.Context) {
	for {
		_, changed := b.nodeAddresses.Addresses()
		var again <-chan time.Time
		if err := b.updateNodePortAddresses(ctx); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Node ports are not served at the present addresses", "table", b.table.conn.table)
			again = time.After(time.Second)
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-again:
		}
	}
}

func (b *Backend) updateNodePortAddresses(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.table.state == nil {
		return nil // a pass is due, which does it
	}
	addrs, _ := b.nodeAddresses.Addresses()
	return b.table.syncNodePortAddresses(ctx, addrs)
}

// syncNodePortAddresses makes node ports be served at addrs. It reads the sets, which are
// short, and writes what differs.
func (t *table) syncNodePortAddresses(ctx context.Context, addrs []netip.Addr) error {
	p := newPatch()
	p.begin(types.NamespacedName{})
	for _, family := range []api.Family{api.IPv4, api.IPv6} {
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
			p.add(addressElement(mapID{kind: nodePortAddresses}, a))
		}
	}
	var failed sink.Failed
	if err := t.apply(ctx, p.parts(), &failed); err != nil {
		return err
	}
	return errors.Join(failed.Unwrap()...)
}
