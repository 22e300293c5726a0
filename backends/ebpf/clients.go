// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import "context"

// ipKey is the key of the maps client_counts and node_ips.
type ipKey [16]byte

// clientTables are the maps of the clients of services with session affinity. The
// programs write the map "clients", and count the clients of each cluster IP in the map
// "counts". If a cluster IP has too many clients, the programs leave its new clients to
// the other sink.
type clientTables struct {
	clients table[clientKey, choice]
	counts  table[ipKey, uint64]
	// now returns the time of the kernel in nanoseconds since the boot, or 0 if it is not
	// known.
	now func() uint64
}

// countClients sets elements of the map client_counts. If the map is full, the programs do
// not count the clients of some cluster IPs.
func (t *clientTables) countClients(ips map[ipKey]uint64) {
	var b batch[ipKey, uint64]
	for ip, n := range ips {
		b.add(ip, n)
	}
	errs := map[ipKey]*error{}
	setAll(t.counts, b, func(ip ipKey) *error {
		if errs[ip] == nil {
			errs[ip] = new(error)
		}
		return errs[ip]
	})
}

// recount corrects the counts of clients, and returns the cluster IPs in the map. The
// counts may be too high, because the programs do not see when the kernel removes clients
// from the map. recount deletes the clients of frontends that do not exist or have no
// session affinity. The argument affinity has the frontends with session affinity, and
// their timeouts in seconds.
func (t *clientTables) recount(ctx context.Context, affinity map[frontendKey]uint32) (ips []ipKey, err error) {
	now := int64(t.now())
	wrong := map[ipKey]uint64{}
	for f := range affinity {
		wrong[f.IP] = 0
	}
	var freed []clientKey
	if err := t.clients.each(ctx, func(k clientKey, c choice) {
		switch seconds := int64(affinity[k.Frontend]); {
		case seconds == 0:
			freed = append(freed, k)
		case now-int64(c.Time) < seconds*1e9:
			wrong[k.Frontend.IP]++
		}
	}); err != nil {
		return nil, err
	}
	for ip := range wrong {
		ips = append(ips, ip)
	}
	if err := t.counts.each(ctx, func(ip ipKey, n uint64) {
		switch count, needed := wrong[ip]; {
		case !needed:
			ips = append(ips, ip)
		case count == n:
			delete(wrong, ip)
		}
	}); err != nil {
		return nil, err
	}
	t.countClients(wrong)
	return ips, t.clients.delete(freed)
}
