// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

// clusterIP is the key of the map client_counts.
type clusterIP [16]byte

// clientTables are the maps of the clients of services with session affinity. The programs
// write clients, and count those of each cluster IP in counts. They leave new clients of a
// cluster IP that has too many to the other sink.
type clientTables struct {
	clients table[clientKey, choice]
	counts  table[clusterIP, uint64]
	// now returns the time of the kernel in nanoseconds since the boot, or 0 if it is not
	// known.
	now func() uint64
}

// addAffine counts a frontend with session affinity, or subtracts it if n is -1.
func (d *dataplane) addAffine(f frontendKey, affinity uint32, n int) {
	if affinity != 0 {
		d.affine[f.IP] += n
	}
}

// countClients adds cluster IPs to the map client_counts. If the map is full, the programs do
// not count the clients of some cluster IPs.
func (d *dataplane) countClients(ips map[clusterIP]uint64) {
	var b batch[clusterIP, uint64]
	for ip, n := range ips {
		b.add(ip, n)
	}
	errs := map[clusterIP]*error{}
	setAll(d.counts, b, func(ip clusterIP) *error {
		if errs[ip] == nil {
			errs[ip] = new(error)
		}
		return errs[ip]
	})
}

// beginClients makes the map client_counts have the cluster IPs of the records.
func (d *dataplane) beginClients() error {
	d.affine = map[clusterIP]int{}
	missing := map[clusterIP]uint64{}
	for f, r := range d.records {
		if d.addAffine(f, r.affinity, 1); r.affinity != 0 {
			missing[f.IP] = 0
		}
	}
	var unneeded []clusterIP
	err := each(d.counts, func(ip clusterIP, _ uint64) {
		delete(missing, ip)
		if d.affine[ip] == 0 {
			unneeded = append(unneeded, ip)
		}
	})
	if err != nil {
		return err
	}
	d.countClients(missing)
	return d.counts.delete(unneeded)
}

// clientScan is the content of the map clients.
type clientScan struct {
	counts map[clusterIP]uint64
	// freed are clients of frontends that do not exist or have no session affinity.
	freed []clientKey
}

// read returns a function that adds a client to the scan. It does not count clients whose
// timeout has passed.
func (s *clientScan) read(d *dataplane) func(clientKey, choice) {
	now := int64(d.now())
	s.counts = map[clusterIP]uint64{}
	return func(k clientKey, c choice) {
		switch affinity := d.affinityOf(k); {
		case affinity == 0:
			s.freed = append(s.freed, k)
		case now-int64(c.Time) < int64(affinity)*1e9:
			s.counts[k.Frontend.IP]++
		}
	}
}

// affinityOf returns the session affinity of a client in seconds, or 0 if it has none.
func (d *dataplane) affinityOf(k clientKey) uint32 {
	if r := d.records[k.Frontend]; r != nil {
		return r.affinity
	}
	return 0
}

// recount deletes the clients of services without session affinity, and corrects the counts.
// The kernel may have removed clients from its map, which the programs do not count, or have
// refused a cluster IP.
func (d *dataplane) recount(s *clientScan) error {
	var freed []clientKey
	for _, k := range s.freed {
		if d.affinityOf(k) == 0 {
			freed = append(freed, k)
		}
	}
	if err := d.clients.delete(freed); err != nil {
		return err
	}
	wrong := map[clusterIP]uint64{}
	for ip := range d.affine {
		wrong[ip] = s.counts[ip]
	}
	err := each(d.counts, func(ip clusterIP, n uint64) {
		if s.counts[ip] == n {
			delete(wrong, ip)
		}
	})
	d.countClients(wrong)
	return err
}
