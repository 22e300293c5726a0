// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"context"
	"errors"
	"net/netip"
	"sync"

	"github.com/cilium/ebpf"
	"k8s.io/klog/v2"
)

// Values of the map node_ips.
const (
	everywhere uint32 = iota
	nodeOnly
)

// find returns the frontend at an address and port, and the list of the frontend. Like the
// programs, it also finds node ports. If there is no such frontend, the error is
// [ebpf.ErrKeyNotExist].
func find(frontends, nodeIPs *ebpf.Map, at frontendKey) (frontendKey, list, error) {
	var l list
	err := frontends.Lookup(at, &l)
	if !errors.Is(err, ebpf.ErrKeyNotExist) || nodeIPs.Lookup(ipKey(at.IP), new(uint32)) != nil {
		return at, l, err
	}
	if at.NodePort = 6; netip.AddrFrom16(at.IP).Is4In6() {
		at.NodePort = 4
	}
	at.IP = ipKey{}
	return at, l, frontends.Lookup(at, &l)
}

// followAddresses writes the addresses of the node to the map node_ips, now and after each
// change, until the returned function is called. If a write fails, Verify repeats it.
func (b *backend) followAddresses(ctx context.Context) (end func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var running sync.WaitGroup
	running.Go(func() {
		for ctx.Err() == nil {
			var changed <-chan struct{}
			if b.opts.NodeAddresses != nil {
				_, changed = b.opts.NodeAddresses.Addresses()
			}
			if err := b.updateAddresses(ctx); err != nil && ctx.Err() == nil {
				klog.FromContext(ctx).Error(err, "Cannot write the addresses of node ports to the eBPF map; retrying")
			}
			select {
			case <-ctx.Done():
			case <-changed:
			}
		}
	})
	return func() {
		cancel()
		running.Wait()
	}
}

func (b *backend) updateAddresses(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.writeAddresses(ctx)
}

// writeAddresses fills the map node_ips with the addresses at which the node has node
// ports.
func (b *backend) writeAddresses(ctx context.Context) error {
	wanted := map[ipKey]uint32{}
	if b.opts.NodeAddresses != nil {
		addrs, _ := b.opts.NodeAddresses.Addresses()
		for _, a := range addrs {
			if wanted[a.As16()] = everywhere; a.IsLoopback() {
				wanted[a.As16()] = nodeOnly
			}
		}
	}
	return kernelTable[ipKey, uint32]{"node_ips", b.programs.NodeIps}.replace(ctx, wanted)
}
