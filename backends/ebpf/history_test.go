// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"golang.org/x/sys/unix"
)

var histories = flag.Int("histories", 5, "how many random `histories` to test")

// TestHistories tests the backend above a sink that fails services. The backend itself fails
// no service. After Verify, its maps must have all services again.
func TestHistories(t *testing.T) {
	bpffs := mountBPFFS(t)
	cgroup := netnstest.NewCgroup(t).Dir
	made := 0
	sinktest.TestHistories(t, *histories, func(tb testing.TB) *sinktest.Subject {
		made++
		name := fmt.Sprint(made)
		var b *backend
		var f tableFaults
		var clock skippingClock
		opts := options{tables: f.in, now: clock.now, verifyInterval: -1, public: Options{
			Options: backends.Options{Instance: name}, Cgroup: filepath.Join(cgroup, name), BPFFS: bpffs,
			MaxFrontends: 1024, MaxEndpoints: 4096, MaxMembers: 4096, MaxClients: 1024,
		}}
		if err := os.Mkdir(opts.Cgroup, 0o755); err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() {
			if err := errors.Join(b.Cleanup(context.Background()), os.Remove(opts.Cgroup)); err != nil {
				tb.Error(err)
			}
		})
		return &sinktest.Subject{
			Open: func() sink.Sink {
				var err error
				if b, err = newBackend(sink.Func(f.sync), opts); err != nil {
					tb.Fatal(err)
				}
				return b
			},
			Objects: func() []string { return objects(tb, b) },
			Disturb: func(random *rand.Rand) func() {
				f.random = random
				return func() { f.random = nil }
			},
			Drift: func(random *rand.Rand) { drift(tb, b, random) },
			Verify: func(ctx context.Context, s sink.Sink) error {
				clock.skip(repairPause)
				return b.Verify(ctx)
			},
		}
	})
}

// tableFaults makes operations fail at random, unless random is nil.
type tableFaults struct{ random *rand.Rand }

// in returns tables with these faults.
func (f *tableFaults) in(t tables) tables {
	t.frontends = faultyTable[frontendKey, list]{t.frontends, f}
	t.slots = faultyTable[slotKey, address]{t.slots, f}
	t.members = faultyTable[memberKey, uint32]{t.members, f}
	t.counts = faultyTable[ipKey, uint64]{t.counts, f}
	return t
}

func (f *tableFaults) fails(n int) bool { return f.random != nil && f.random.IntN(n) == 0 }

// sync is the Sync of the sink below. It fails some services.
func (f *tableFaults) sync(_ context.Context, c *sink.Changes) error {
	if f.fails(20) {
		return fmt.Errorf("the sink below is lost (%w)", sink.ErrStartOver)
	}
	var failed sink.Failed
	for ch := range c.Services {
		if f.fails(3) {
			failed.Add(ch.Key, unix.EINVAL)
		}
	}
	return failed.Err()
}

// faultyTable is a table in the kernel that refuses some elements.
type faultyTable[K comparable, V any] struct {
	table[K, V]
	faults *tableFaults
}

func (t faultyTable[K, V]) set(keys []K, values []V) (int, error) {
	if t.faults.fails(4) {
		n, err := t.table.set(keys[:t.faults.random.IntN(len(keys))], values)
		if err == nil {
			err = unix.E2BIG
		}
		return n, err
	}
	return t.table.set(keys, values)
}

func (t faultyTable[K, V]) delete(keys []K) error {
	if len(keys) > 0 && t.faults.fails(20) {
		if err := t.table.delete(keys[:t.faults.random.IntN(len(keys))]); err != nil {
			return err
		}
		return unix.EAGAIN
	}
	return t.table.delete(keys)
}

func (t faultyTable[K, V]) each(ctx context.Context, f func(K, V)) error {
	if t.faults.fails(20) {
		return unix.EINTR
	}
	return t.table.each(ctx, f)
}

// read returns the elements of a table.
func read[K comparable, V any](tb testing.TB, t table[K, V]) map[K]V {
	all := map[K]V{}
	if err := t.each(context.Background(), func(k K, v V) { all[k] = v }); err != nil {
		tb.Fatal(err)
	}
	return all
}

// objects describes the content of the maps without the IDs of lists.
func objects(tb testing.TB, b *backend) (lines []string) {
	d := b.dataplane
	slots, members := read(tb, d.slots), read(tb, d.members)
	usedSlots, usedMembers := map[slotKey]bool{}, map[memberKey]bool{}
	for f, l := range read(tb, d.frontends) {
		line := fmt.Sprintf("frontend %s affinity %d endpoints", f, l.Affinity)
		for i := range l.Count {
			k := slotKey{List: l.ID, Index: i}
			usedSlots[k] = true
			line += fmt.Sprint(" ", slots[k])
		}
		var own []string
		for k := range members {
			if k.List == l.ID {
				usedMembers[k] = true
				own = append(own, k.Endpoint.String())
			}
		}
		// A TCP frontend without session affinity may share a list that has members.
		if slices.Sort(own); l.Affinity != 0 || f.Protocol == unix.IPPROTO_UDP {
			line += fmt.Sprint(" members ", own)
		}
		lines = append(lines, line)
	}
	lines = append(lines, fmt.Sprintf("%d unused slots, %d unused members", len(slots)-len(usedSlots), len(members)-len(usedMembers)))
	for ip, n := range read(tb, d.counts) {
		lines = append(lines, fmt.Sprintf("%d clients of %x", n, ip))
	}
	if b.programs.time() == 0 {
		lines = append(lines, "the programs are paused")
	}
	return lines
}

// drift deletes or changes elements of the maps, as another program does.
func drift(tb testing.TB, b *backend, random *rand.Rand) {
	for range 1 + random.IntN(3) {
		switch random.IntN(4) {
		case 0:
			driftOf(tb, b.dataplane.frontends, random)
		case 1:
			driftOf(tb, b.dataplane.slots, random)
		case 2:
			driftOf(tb, b.dataplane.counts, random)
		default:
			driftOf(tb, b.dataplane.members, random)
		}
	}
}

func driftOf[K comparable, V any](tb testing.TB, t table[K, V], random *rand.Rand) {
	all := read(tb, t)
	keys := slices.SortedFunc(maps.Keys(all), func(a, b K) int { return cmp.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
	if len(keys) == 0 {
		return
	}
	k := keys[random.IntN(len(keys))]
	var err error
	if random.IntN(2) == 0 {
		err = t.delete([]K{k})
	} else {
		_, err = t.set([]K{k}, []V{all[keys[random.IntN(len(keys))]]})
	}
	if err != nil {
		tb.Fatal(err)
	}
}
