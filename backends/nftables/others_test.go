// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// changeElsewhere makes a table that belongs to no backend, and changes it 200 times a
// second until the test ends. It returns a counter of these changes.
func changeElsewhere(t testing.TB, ns *netnstest.Namespace) *atomic.Int64 {
	t.Helper()
	runNFT(t, ns, "table inet a { chain first { }; }\n", "-f", "-")
	c := newConn(ns.FD, "a")
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	var n atomic.Int64
	go func() {
		defer close(ended)
		defer c.Close()
		for tick := time.Tick(5 * time.Millisecond); ctx.Err() == nil; <-tick {
			err := c.Transact(ctx, func(w *nft.Writer) {
				if n.Load()%2 == 0 {
					w.MakeChain(nft.Chain{Name: "second"})
				} else {
					w.DeleteChainsAndSets([]string{"second"}, nil)
				}
			})
			if err != nil && ctx.Err() == nil {
				t.Errorf("change another table: %v", err)
				return
			}
			n.Add(1)
		}
	}()
	t.Cleanup(func() { cancel(); <-ended })
	return &n
}

func affineServices(n, m int) []sink.Change {
	list := manyServices(n, m)
	for _, c := range list {
		affine(c.New.Service)
	}
	return list
}

// TestBusyNeighbors starts, restarts and verifies a backend while another program
// constantly changes another table. The backend must report no drift.
func TestBusyNeighbors(t *testing.T) {
	ns := netnstest.New(t)
	n := changeElsewhere(t, ns)
	opts := Options{Options: backends.Options{Observer: &backendtest.Observer{OnDrifted: func() { t.Error("drift is reported") }}}}
	list := append(affineServices(600, 6), manyServices(6_000, 6)[600:]...)
	all := splitPass(list)
	for _, when := range []string{"at the start", "after a restart"} {
		before, began := n.Load(), time.Now()
		b := startIn(t, ns, opts)
		mustSync(t, b, all...)
		compared := b.table.drift.comparedCommits
		if err := b.Verify(t.Context()); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		if b.table.drift.comparedCommits == compared {
			t.Errorf("%s, Verify compared nothing", when)
		}
		mustSync(t, b, all...)
		t.Logf("%s: %d transactions of another program in %v", when, n.Load()-before, time.Since(began))
		if n.Load()-before < 20 {
			t.Errorf("%s, another program made %d transactions, want at least 20", when, n.Load()-before)
		}
		if err := b.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// TestVerifyReadsOnlyAfterChangesByOthers checks that Verify reads the table only after
// another program has changed a table. A Sync must not make Verify read the table.
func TestVerifyReadsOnlyAfterChangesByOthers(t *testing.T) {
	b, ns := start(t, Options{Options: backends.Options{NodeAddresses: nil}})
	old, changed := view("web", []string{"10.96.0.1"}, []string{"10.0.0.1"}, nil), view("web", []string{"10.96.0.1"}, []string{"10.0.0.2", "10.0.0.3"}, nil)
	mustSync(t, b, batchOf(true, set(old)))
	m := mapID{kind: kindClusterIPs, family: api.IPv4}
	b.table.state.digests[m] = digest{n: 1} // a wrong digest, so that a Verify that reads the table fails
	for range 3 {
		mustSync(t, b, batchOf(false, sink.Change{Old: old, New: changed}), batchOf(false, sink.Change{Old: changed, New: old}))
		if err := b.Verify(t.Context()); err != nil {
			t.Fatalf("no other program changed a table, but Verify returns %v", err)
		}
	}
	runNFT(t, ns, "", "add", "table", "inet", "other")
	if err := b.Verify(t.Context()); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("another program changed a table, but Verify returns %v", err)
	}
}

// TestComparisonsAreLimited checks that changes of other tables make Verify compare all
// elements only a few times. Verify still checks the chains each time.
func TestComparisonsAreLimited(t *testing.T) {
	now := time.Now()
	b, ns := start(t, Options{}, func(o *options) {
		o.now = func() time.Time { now = now.Add(10 * time.Millisecond); return now }
	})
	web := batchOf(true, set(view("web", []string{"10.96.0.1"}, []string{"10.0.0.1"}, nil)))
	mustSync(t, b, web)
	compared := 0
	for i := range 60 {
		runNFT(t, ns, "", []string{"add", "delete"}[i%2], "table", "inet", "other")
		before := b.table.drift.comparedCommits
		if err := b.Verify(t.Context()); err != nil {
			t.Fatal(err)
		}
		if b.table.drift.comparedCommits != before {
			compared++
		}
		now = now.Add(time.Second - 50*time.Millisecond)
	}
	if compared < 2 || compared > 40 {
		t.Errorf("in a minute, %d Verifies compared all elements, want 2 to 40", compared)
	}
	b.table.drift.compareAt = now.Add(time.Hour)
	runNFT(t, ns, "", "flush", "chain", "inet", b.table.conn.Table, "services")
	if err := b.Verify(t.Context()); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("after a chain was flushed, Verify returns %v", err)
	}
}

// TestPassesBecauseOfDriftAreLimited changes the table after each repair, and counts the
// passes in ten minutes.
func TestPassesBecauseOfDriftAreLimited(t *testing.T) {
	now := time.Now()
	b, ns := start(t, Options{}, func(o *options) { o.now = func() time.Time { return now } })
	all := batchOf(true)
	mustSync(t, b, all)
	passes := 0
	for range 600 {
		runNFT(t, ns, "", "flush", "chain", "inet", b.table.conn.Table, "services")
		if err := b.Verify(t.Context()); errors.Is(err, sink.ErrStartOver) {
			mustSync(t, b, all)
			passes++
		}
		now = now.Add(time.Second)
	}
	if passes < 10 || passes > 20 {
		t.Errorf("Verify requested %d passes in ten minutes, want about one a minute", passes)
	}
}

// TestLossIsFoundDuringAPause removes all rules of the table during the pause after a
// change by another program.
func TestLossIsFoundDuringAPause(t *testing.T) {
	for _, command := range []string{"delete table", "flush table", "add table inet kpng { flags dormant; }"} {
		b, ns := start(t, Options{})
		all := batchOf(true, set(view("web", []string{"10.96.0.1"}, []string{"10.0.0.1"}, nil)))
		mustSync(t, b, all)
		b.table.drift.verifyAt = time.Now().Add(time.Hour)
		runNFT(t, ns, "", "flush", "chain", "inet", "kpng", "mark-all")
		if err := b.Verify(t.Context()); err != nil {
			t.Errorf("during a pause, Verify returns %v after another change", err)
		}
		if !strings.Contains(command, "inet") {
			command += " inet kpng"
		}
		runNFT(t, ns, command+"\n", "-f", "-")
		if err := b.Verify(t.Context()); !errors.Is(err, sink.ErrStartOver) {
			t.Errorf("after %q, Verify returns %v", command, err)
		}
		mustSync(t, b, all)
		if err := verifyAll(t, b); err != nil {
			t.Errorf("after %q, the table is not repaired: %v", command, err)
		}
	}
}

// TestDamageOfAJustLoadedSkeletonIsFound flushes a chain immediately after the
// transaction that loads the skeleton.
func TestDamageOfAJustLoadedSkeletonIsFound(t *testing.T) {
	var f faults
	b, ns := start(t, Options{}, f.use)
	mustSync(t, b, batchOf(true))
	runNFT(t, ns, "", "flush", "chain", "inet", "kpng", "services")
	loaded := false
	f.exchange = func(batch []byte, send func([]byte) error) error {
		err := send(batch)
		if !loaded {
			loaded = true
			runNFT(t, ns, "", "flush", "chain", "inet", "kpng", "services")
		}
		return err
	}
	mustSync(t, b, batchOf(true))
	if !loaded {
		t.Fatal("the pass did not load the skeleton")
	}
	if err := b.Verify(t.Context()); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("Verify returns %v", err)
	}
}

// TestStartRetriesTransientFailures checks that Start retries after transient failures,
// and returns immediately after other failures.
func TestStartRetriesTransientFailures(t *testing.T) {
	for name, test := range map[string]struct {
		fault error
		tries int
	}{
		"no memory for a short time": {&netfilter.Failure{Errno: unix.ENOMEM}, 8},
		"a lost answer":              {fmt.Errorf("%w: %w", netfilter.ErrUnknownOutcome, unix.ENOBUFS), 2},
		"no permission":              {&netfilter.Failure{Errno: unix.EPERM}, 1},
		"a missing feature":          {&netfilter.Failure{Errno: unix.EOPNOTSUPP}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			tries := 0
			b := makeBackend(t, netnstest.New(t), Options{}, func(o *options) {
				o.exchange = func(batch []byte, send func([]byte) error) error {
					if tries++; tries < test.tries || test.tries == 1 {
						return test.fault
					}
					return send(batch)
				}
			})
			err := b.Start(t.Context())
			if test.tries == 1 && !errors.Is(err, test.fault) || test.tries > 1 && err != nil || tries != test.tries {
				t.Errorf("after %d transactions, Start returns %v; want %d transactions", tries, err, test.tries)
			}
		})
	}
}

// TestStartEndsWithItsContext checks that Start returns when its context ends.
func TestStartEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	b := makeBackend(t, netnstest.New(t), Options{}, func(o *options) {
		o.exchange = func([]byte, func([]byte) error) error { cancel(); return &netfilter.Failure{Errno: unix.ENOMEM} }
	})
	if err := b.Start(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Start returns %v", err)
	}
}

// TestANodeAddressChangesSourceRanges changes the node's address. If a service has source
// ranges, the sources that it admits depend on that address, so the change must cause a
// pass. Without source ranges, the change must cause no pass.
func TestANodeAddressChangesSourceRanges(t *testing.T) {
	b, _ := start(t, Options{})
	plain := view("plain", []string{"10.96.0.2"}, []string{"10.0.0.1"}, nil)
	restricted := view("web", []string{"10.96.0.1"}, []string{"10.0.0.1"}, func(s *api.Service) {
		s.Type = api.LoadBalancer
		s.IPs.LoadBalancerIPs = api.NewIPSet(netip.MustParseAddr("203.0.113.1"))
		s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.LoadBalancerIPs, Prefixes: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}}
	})
	moved := &api.Node{Name: "here", Addresses: []api.NodeAddress{{Type: "InternalIP", IP: netip.MustParseAddr("192.0.2.77")}}}
	for _, test := range []struct {
		views []sink.Change
		over  bool
	}{{[]sink.Change{set(plain)}, false}, {[]sink.Change{set(plain), set(restricted)}, true}} {
		mustSync(t, b, batchOf(true, test.views...))
		c := batchOf(false)
		c.Node, c.NodeChanged = moved, true
		if err := b.Sync(t.Context(), c); errors.Is(err, sink.ErrStartOver) != test.over || err != nil && !test.over {
			t.Errorf("with %d services, Sync returns %v", len(test.views), err)
		}
	}
}

// TestAFlushIsRepairedSoon flushes the ruleset while a driver runs with default options.
// The first Verify after the flush must find the drift. The test limits the number of
// Verify calls instead of the time, so that it does not depend on the load of the machine.
func TestAFlushIsRepairedSoon(t *testing.T) {
	took, verifies := repairFlush(t, 500)
	t.Logf("the repair of services took %v", took)
	if verifies > 2 { // one of them may have begun before the flush
		t.Errorf("the repair needed %d Verify calls, want at most 2", verifies)
	}
}

func BenchmarkFlush(b *testing.B) {
	for _, n := range []int{1_000, 10_000} {
		b.Run(fmt.Sprintf("services=%d/endpoints=10", n), func(b *testing.B) {
			var all []time.Duration
			for range b.N {
				took, _ := repairFlush(b, n)
				all = append(all, took)
			}
			b.ReportMetric(slices.Max(all).Seconds(), "s-worst")
		})
	}
}

// repairFlush flushes the ruleset while a driver runs. It returns the time until all
// services have been programmed again, and the number of Verify calls that ended in this
// time.
func repairFlush(t testing.TB, n int) (took time.Duration, verifies int64) {
	t.Helper()
	ns := netnstest.New(t)
	b := makeBackend(t, ns, Options{})
	src := sinktest.NewSource()
	for _, c := range manyServices(n, 10) {
		src.Set(c.New)
	}
	src.SetNode(node)
	src.MarkSynced()
	var verified atomic.Int64
	d := sink.NewDriver(src, b, sink.Options{Observer: sink.Observer{Verified: func(error) { verified.Add(1) }}})
	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), klog.Logger{}))
	ended := make(chan struct{})
	go func() { defer close(ended); d.Run(ctx) }()
	defer func() { cancel(); <-ended }()
	waitApplied(t, d, src)
	observer := newConn(ns.FD, b.table.conn.Table)
	defer observer.Close()
	began, before := time.Now(), verified.Load()
	runNFT(t, ns, "", "flush", "ruleset")
	for tick := time.Tick(5 * time.Millisecond); ; <-tick {
		if len(endpointsOf(t, observer, n-1)) == 10 {
			return time.Since(began), verified.Load() - before
		}
		if time.Since(began) > 2*time.Minute {
			t.Fatal("services are not repaired after two minutes")
		}
	}
}
