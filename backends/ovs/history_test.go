// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ovs

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/ovs/internal/openflow"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/ovstest"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
)

var histories = flag.Int("histories", 10, "how many random `histories` to test")

func TestHistories(t *testing.T) {
	s := ovstest.New(t, netnstest.New(t).Start)
	var unused []string // the unused bridges
	made := 0
	sinktest.TestHistories(t, *histories, func(tb testing.TB) *sinktest.Subject {
		if len(unused) == 0 {
			made++
			unused = append(unused, fmt.Sprint("br", made))
			s.Vsctl(t, "add-br", unused[0], "--", "set", "bridge", unused[0], "datapath_type=netdev", "fail_mode=secure")
		}
		bridge := unused[len(unused)-1]
		unused = unused[:len(unused)-1]
		p := newFaults(tb, s.Dir, bridge)
		opts := p.options(&backendtest.NodeAddresses{})
		var b *backend
		tb.Cleanup(func() {
			opts.RunDir = s.Dir
			b, err := newBackend(opts)
			if err != nil {
				tb.Fatal(err)
			}
			if err := b.Cleanup(context.WithoutCancel(tb.Context())); err != nil {
				tb.Error(err)
			}
			unused = append(unused, bridge)
		})
		return &sinktest.Subject{
			Open: func() sink.Sink {
				var err error
				if b, err = newBackend(opts); err != nil {
					tb.Fatal(err)
				}
				return b
			},
			Objects: func() []string {
				return p.read(tb).objects()
			},
			Disturb: p.disturb,
			Drift:   func(random *rand.Rand) { p.drift(tb, random) },
		}
	})
}

// faults is a proxy in front of a bridge. It makes some bundles fail.
type faults struct {
	runDir, dir, bridge string

	mu     sync.Mutex
	random *rand.Rand // nil: all bundles succeed
	seed   uint64
}

func newFaults(tb testing.TB, dir, bridge string) *faults {
	f := &faults{runDir: tb.TempDir(), dir: dir, bridge: bridge}
	opts := f.options(nil)
	proxy(tb, opts.socket(), dir, f.handle)
	return f
}

func (f *faults) options(addrs nodeaddr.Source) options {
	return options{verifyInterval: -1, public: Options{
		Options: backends.Options{NodeAddresses: addrs, Instance: "15", Sysctls: backends.IgnoreSysctls, Stats: rand.IntN(2) == 0}, Bridge: f.bridge, RunDir: f.runDir,
		MasqueradeAddresses: nodeAddrs, HairpinAddresses: hairpinAddrs, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")},
	}}
}

func (f *faults) disturb(random *rand.Rand) (calm func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.seed = random.Uint64()
	f.random = rand.New(rand.NewPCG(f.seed, 1))
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.random = nil
	}
}

// handle always refuses certain flows and groups. It also loses some connections, before or
// after the switch has executed the bundle.
func (f *faults) handle(message []byte) (code []byte, lost bool) {
	const bundleControl, bundleAdd, commit, groupMod, groupModFailed, outOfGroups, flowModFailed, tableFull = 33, 34, 4, 15, 6, 3, 5, 1
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.random == nil:
	case message[1] == bundleControl && message[13] == commit:
		switch f.random.IntN(16) {
		case 0:
			return []byte{0, flowModFailed, 0, tableFull}, true
		case 1:
			return nil, true
		}
	case message[1] == bundleAdd && hash(f.seed, message[24:])%30 == 0:
		if message[17] == groupMod {
			return []byte{0, groupModFailed, 0, outOfGroups}, false
		}
		return []byte{0, flowModFailed, 0, tableFull}, false
	}
	return nil, false
}

func hash(seed uint64, b []byte) uint64 {
	for _, c := range b {
		seed = (seed ^ uint64(c)) * 0x100000001b3
	}
	return seed >> 32
}

// contents are the flows and groups of the instance in a bridge.
type contents struct {
	flows  []openflow.Flow
	groups []openflow.Group
}

func (f *faults) dial(tb testing.TB) (*openflow.Conn, *options) {
	opts := f.options(nil)
	opts.RunDir = f.dir
	if err := opts.complete(); err != nil {
		tb.Fatal(err)
	}
	c, err := openflow.Dial(tb.Context(), opts.socket(), opts.writtenCookies())
	if err != nil {
		tb.Fatal(err)
	}
	return c, &opts
}

func (f *faults) read(tb testing.TB) (all contents) {
	c, opts := f.dial(tb)
	defer c.Close()
	var err error
	if all.flows, err = c.Flows(tb.Context(), openflow.AllTables); err != nil {
		tb.Fatal(err)
	}
	var ids []uint32
	for i := range uint32(256) {
		ids = append(ids, opts.firstGroup()+i)
	}
	if all.groups, err = c.Groups(tb.Context(), ids); err != nil {
		tb.Fatal(err)
	}
	return all
}

// objects describes flows and groups with the seeds of groups in place of their IDs.
func (all contents) objects() (lines []string) {
	var names []string
	for _, g := range all.groups {
		names = append(names, fmt.Sprintf("%08x", g.ID), fmt.Sprintf("<%x>", g.Seed))
	}
	replace := strings.NewReplacer(names...).Replace
	for _, f := range all.flows {
		lines = append(lines, replace(fmt.Sprintf("flow table %d priority %d match %x cookie %x actions %x", f.Table, f.Priority, f.Match, f.Cookie, string(f.Actions))))
	}
	for _, g := range all.groups {
		var buckets []string
		for _, b := range g.Buckets {
			buckets = append(buckets, replace(fmt.Sprintf("%x", string(b.Actions))))
		}
		slices.Sort(buckets)
		lines = append(lines, fmt.Sprintf("group <%x> foreign %t buckets %s", g.Seed, g.Foreign, buckets))
	}
	return lines
}

// drift deletes or changes flows and groups of the instance, as another program does.
func (f *faults) drift(tb testing.TB, random *rand.Rand) {
	c, opts := f.dial(tb)
	defer c.Close()
	for range 1 + random.IntN(3) {
		all := f.read(tb)
		var messages []openflow.Message
		if len(all.flows) == 0 {
			return
		}
		flow := all.flows[random.IntN(len(all.flows))]
		switch n := random.IntN(4); {
		case n == 0 && len(all.groups) > 0:
			g := all.groups[random.IntN(len(all.groups))]
			messages = append(messages, openflow.DeleteGroup(g.ID))
			if random.IntN(2) == 0 && len(g.Buckets) > 0 {
				messages = []openflow.Message{openflow.RemoveBucket(g.ID, g.Buckets[0].ID)}
			}
		case n == 1:
			flow.Priority += 5
			flow.Actions = ""
			messages = append(messages, openflow.AddFlow(flow))
		case n == 2:
			flow.Actions = ""
			messages = append(messages, openflow.AddFlow(flow))
		default:
			messages = append(messages, openflow.DeleteFlow(flow.FlowKey, opts.allCookies()))
		}
		if err := c.Commit(tb.Context(), messages); err != nil {
			tb.Fatal(err)
		}
	}
}
