// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/internal/sourcelists"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"golang.org/x/sys/unix"
)

var (
	histories       = flag.Int("histories", 5, "how many random `histories` to test")
	kernelHistories = flag.Int("kernel-histories", 0, "how many random `histories` TestKernel tests with IPVS, which takes long")
)

// TestHistories uses virtual servers in memory, and routes of the loopback interface. So it
// needs no kernel with IPVS. The nftables table is in the kernel.
func TestHistories(t *testing.T) {
	sinktest.TestHistories(t, *histories, func(tb testing.TB) *sinktest.Subject {
		servers := fakeServers{}
		return newSubject(tb, backends.IgnoreSysctls, func(o *options) { inMemory(o, servers) })
	})
}

// testHistories is TestHistories with the IPVS of the kernel.
func testHistories(t *testing.T) {
	sinktest.TestHistories(t, *kernelHistories, func(tb testing.TB) *sinktest.Subject {
		return newSubject(tb, backends.SetSysctls, func(*options) {})
	})
}

func newSubject(tb testing.TB, sysctls backends.SysctlMode, edit func(*options)) *sinktest.Subject {
	ns := netnstest.New(tb)
	opts := options{verifyInterval: -1, public: Options{Options: backends.Options{
		NetNS: ns.FD, NodeAddresses: &backendtest.NodeAddresses{}, Sysctls: sysctls,
		Conntrack: sink.Func(func(context.Context, *sink.Changes) error { return nil }),
	}}}
	edit(&opts)
	var f faults
	f.use(&opts)
	var b *backend
	return &sinktest.Subject{
		Open: func() sink.Sink {
			var err error
			if b, err = newBackend(opts); err != nil {
				tb.Fatal(err)
			}
			return b
		},
		Objects: func() []string { return append(objects(tb, b.dataplane), restObjects(tb, b)...) },
		Disturb: func(random *rand.Rand) func() {
			f.random = random
			return func() { f.random = nil }
		},
		Drift: func(random *rand.Rand) { drift(tb, b.dataplane, random) },
		Verify: func(ctx context.Context, _ sink.Sink) error {
			// The second call removes the endpoints that the first call takes out of
			// service.
			for range 2 {
				b.idleAt, b.searchAt = time.Time{}, time.Time{}
				if err := b.Verify(ctx); err != nil {
					return err
				}
			}
			return nil
		},
	}
}

// faults makes operations fail at random, unless random is nil.
type faults struct{ random *rand.Rand }

// use puts f between a backend and the kernel, or what the options have in place of it.
func (f *faults) use(o *options) {
	servers, routes := o.servers, o.routes
	o.servers = func(s virtualServers) virtualServers {
		if servers != nil {
			s = servers(s)
		}
		return &faultyServers{s, f}
	}
	o.routes = func(r localRoutes) localRoutes {
		if routes != nil {
			r = routes(r)
		}
		return &faultyRoutes{r, f}
	}
	o.exchange = func(batch []byte, send func([]byte) error) error {
		return f.transact(func() error { return send(batch) })
	}
}

// fail does an operation or fails, or both.
func (f *faults) fail(do func() error) error {
	if f.random == nil {
		return do()
	}
	switch f.random.IntN(12) {
	case 0:
		return unix.ENOMEM
	case 1:
		return errors.Join(do(), unix.ENOBUFS)
	default:
		return do()
	}
}

// transact is like fail for a transaction of nf_tables.
func (f *faults) transact(do func() error) error {
	if f.random != nil {
		switch f.random.IntN(6) {
		case 0:
			return unix.ENOENT
		case 1:
			return errors.Join(do(), netfilter.ErrUnknownOutcome)
		}
	}
	return do()
}

type faultyServers struct {
	virtualServers
	faults *faults
}

func (s *faultyServers) set(id serverID, create bool, to settings) error {
	return s.faults.fail(func() error { return s.virtualServers.set(id, create, to) })
}

func (s *faultyServers) setDestination(id serverID, at netip.AddrPort, create bool, weight uint32) error {
	return s.faults.fail(func() error { return s.virtualServers.setDestination(id, at, create, weight) })
}

func (s *faultyServers) deleteDestination(id serverID, at netip.AddrPort) error {
	return s.faults.fail(func() error { return s.virtualServers.deleteDestination(id, at) })
}

func (s *faultyServers) delete(id serverID) error {
	return s.faults.fail(func() error { return s.virtualServers.delete(id) })
}

type faultyRoutes struct {
	localRoutes
	faults *faults
}

func (r *faultyRoutes) add(addr netip.Addr) error {
	return r.faults.fail(func() error { return r.localRoutes.add(addr) })
}

func (r *faultyRoutes) remove(addr netip.Addr) error {
	return r.faults.fail(func() error { return r.localRoutes.remove(addr) })
}

// inMemory makes a backend use virtual servers in memory and routes of the loopback interface.
func inMemory(o *options, servers virtualServers) {
	netNS := o.NetNS
	o.servers = func(virtualServers) virtualServers { return servers }
	o.routes = func(localRoutes) localRoutes { return &loopback{localAddresses{netNS: netNS}} }
}

// loopback adds routes to the loopback interface.
type loopback struct{ localAddresses }

func (l *loopback) open() error {
	l.link = 1
	return l.connect()
}

func (l *loopback) lost() bool { return false }

// fakeServers are virtual servers in memory.
type fakeServers map[serverID]*server

func (f fakeServers) open() error           { return nil }
func (f fakeServers) close() error          { return nil }
func (f fakeServers) checkConntrack() error { return nil }

func (f fakeServers) list() (map[serverID]*server, error) {
	all := map[serverID]*server{}
	for id, s := range f {
		all[id] = &server{settings: s.settings, destinations: map[netip.AddrPort]destination{}}
	}
	return all, nil
}

func (f fakeServers) read(id serverID) (*server, error) {
	s := f[id]
	if s == nil {
		return nil, nil
	}
	return &server{settings: s.settings, destinations: maps.Clone(s.destinations)}, nil
}

func (f fakeServers) readDestinations(id serverID, s *server) error {
	if f[id] != nil {
		s.destinations = maps.Clone(f[id].destinations)
	}
	return nil
}

func (f fakeServers) set(id serverID, create bool, to settings) error {
	switch s := f[id]; {
	case create && s != nil:
		return unix.EEXIST
	case create:
		f[id] = &server{settings: to, destinations: map[netip.AddrPort]destination{}}
	case s == nil:
		return unix.ESRCH
	default:
		s.settings = to
	}
	return nil
}

// check returns the kernel's error if the destination exists but must not, or does not
// exist but must.
func (f fakeServers) check(id serverID, at netip.AddrPort, exists bool) error {
	if f[id] == nil {
		return unix.ESRCH
	}
	switch _, ok := f[id].destinations[at]; {
	case exists && !ok:
		return unix.ENOENT
	case !exists && ok:
		return unix.EEXIST
	}
	return nil
}

func (f fakeServers) setDestination(id serverID, at netip.AddrPort, create bool, weight uint32) error {
	err := f.check(id, at, !create)
	if err == nil {
		to := f[id].destinations[at]
		to.weight = weight
		f[id].destinations[at] = to
	}
	return err
}

func (f fakeServers) deleteDestination(id serverID, at netip.AddrPort) error {
	err := f.check(id, at, true)
	if err == nil {
		delete(f[id].destinations, at)
	}
	return err
}

func (f fakeServers) delete(id serverID) error {
	delete(f, id)
	return nil
}

func ownServers(tb testing.TB, d *dataplane) map[serverID]*server {
	all := map[serverID]*server{}
	if err := d.readServers(tb.Context(), func(id serverID, s *server) { all[id] = s }); err != nil {
		tb.Fatal(err)
	}
	return all
}

// objects describes the objects in the kernel, without the numbers of source-range lists.
func objects(tb testing.TB, d *dataplane) (lines []string) {
	for id, s := range ownServers(tb, d) {
		line := fmt.Sprintf("server %s %+v", id, s.settings)
		for _, at := range slices.SortedFunc(maps.Keys(s.destinations), netip.AddrPort.Compare) {
			line += fmt.Sprintf(" %s=%d", at, s.destinations[at].weight)
		}
		lines = append(lines, line)
	}
	routes, err := d.local.list()
	if err != nil {
		tb.Fatal(err)
	}
	for addr := range routes {
		lines = append(lines, fmt.Sprintf("route %s", addr))
	}
	elements, err := d.table.read(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	type list struct {
		number uint32
		family api.Family
	}
	lists := map[list][]string{}
	for e := range elements {
		if e.set.kind == sources {
			r, _ := sourcelists.ParseKey([]byte(e.key))
			of := list{r.List, e.set.family}
			lists[of] = append(lists[of], r.Prefix.String())
		}
	}
	used := map[list]bool{}
	for e := range elements {
		value := fmt.Sprintf("%x", e.value)
		switch e.set.kind {
		case sources:
			continue
		case restricted:
			of := list{binary.NativeEndian.Uint32([]byte(e.value)), e.set.family}
			used[of] = true
			slices.Sort(lists[of])
			value = fmt.Sprint(lists[of])
		}
		lines = append(lines, fmt.Sprintf("element %s %x %s", e.set.name(), e.key, value))
	}
	for of, ranges := range lists {
		if !used[of] {
			lines = append(lines, fmt.Sprintf("unused list %v", ranges))
		}
	}
	return lines
}

// restObjects returns the frontends in the table for services that IPVS cannot serve, and
// a line if the table exists.
func restObjects(tb testing.TB, b *backend) (lines []string) {
	c := nft.NewConn(b.opts.NetNS, "kpng-"+b.opts.restInstance(), describeElement)
	defer c.Close()
	l, err := c.Inspect(tb.Context(), func(string, []byte) {})
	if err != nil {
		tb.Fatal(err)
	}
	if !l.Exists {
		return nil
	}
	lines = append(lines, "table for other services")
	for _, name := range []string{"services4", "services6", "nodeports4", "nodeports6", "addresses4", "addresses6"} {
		if err := c.Dump(tb.Context(), name, func(item []byte) {
			lines = append(lines, "other "+describeElement(name, item))
		}); err != nil {
			tb.Fatal(err)
		}
	}
	return lines
}

// drift deletes or changes objects of the instance, as another program does.
func drift(tb testing.TB, d *dataplane, random *rand.Rand) {
	for range 1 + random.IntN(3) {
		servers := ownServers(tb, d)
		ids := slices.SortedFunc(maps.Keys(servers), func(a, b serverID) int { return a.Compare(b.AddrPort) })
		elements, err := d.table.read(tb.Context())
		if err != nil {
			tb.Fatal(err)
		}
		sorted := slices.SortedFunc(maps.Keys(elements), element.compare)
		routes := slices.SortedFunc(maps.Keys(d.routes), netip.Addr.Compare)
		switch n := random.IntN(5); {
		case n == 0 && len(routes) > 0:
			err = d.local.remove(routes[random.IntN(len(routes))])
		case n == 1 && len(sorted) > 0:
			err = d.table.change([]element{sorted[random.IntN(len(sorted))]}, nil)
		case n == 2 && len(ids) > 0:
			err = d.conn.delete(ids[random.IntN(len(ids))])
		case n == 3 && len(ids) > 0:
			id := ids[random.IntN(len(ids))]
			err = d.conn.set(id, false, settings{scheduler: "wlc", flags: servers[id].flags})
		case len(ids) > 0:
			id := ids[random.IntN(len(ids))]
			for at := range servers[id].destinations {
				err = errors.Join(err, d.conn.deleteDestination(id, at))
			}
		}
		if err != nil {
			tb.Fatal(err)
		}
	}
}
