// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
)

// drive runs a driver between src and b until stop is called or the test ends. Before b
// is told what changed during a full Sync, meanwhile is called.
func drive(t testing.TB, src sink.Source, b *Backend, meanwhile func()) (d *sink.Driver, stop func()) {
	t.Helper()
	asked := sink.Func(func(ctx context.Context, c *sink.Changes) error {
		if ask := c.Meanwhile; ask != nil {
			observed := *c
			observed.Meanwhile = func() []sink.Change {
				meanwhile()
				return ask()
			}
			c = &observed
		}
		return b.Sync(ctx, c)
	})
	var s sink.Sink = asked
	if t, ok := t.(*testing.T); ok {
		s = sinktest.NewRecorder(t, asked)
	}
	d = sink.NewDriver(src, s, sink.Options{Backoff: sink.Backoff{Initial: time.Millisecond, Max: 10 * time.Millisecond}, VerifyInterval: -1})
	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), klog.Logger{}))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		d.Run(ctx)
	}()
	stop = func() { cancel(); <-ended }
	t.Cleanup(stop)
	return d, stop
}

// waitApplied waits until d's sink has all that src has, whatever comes to it meanwhile.
// Where a service stays in the way of its own leftovers, it has a full Sync come, which Verify
// would ask for.
func waitApplied(t testing.TB, d *sink.Driver, src *sinktest.Source) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for applied := uint64(0); applied != src.Revision(); {
		applied = src.Revision()
		for {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			err := d.WaitApplied(ctx, applied)
			cancel()
			if err == nil {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("%v: %+v", err, d.Status())
			}
			if len(d.Status().Failing) > 0 {
				src.Lag()
			}
		}
	}
}

// TestChangesPassAFullSync changes services in the middle of a full Sync, some that it
// has come to and some that it has not, and looks into the kernel before it goes on.
func TestChangesPassAFullSync(t *testing.T) {
	const n = 100
	for name, restart := range map[string]bool{"the first load": false, "a restart": true} {
		t.Run(name, func(t *testing.T) {
			b, ns := start(t, Options{})
			src := sinktest.NewSource()
			for _, c := range world(n, 4) {
				src.Set(c.New)
			}
			src.SetNode(node)
			src.MarkSynced()
			if restart {
				mustSync(t, b, changes(true, world(n, 4)...))
				b = startIn(t, ns, Options{})
			}
			b.piece = 100
			observer, err := dial(ns.FD, b.opts.table())
			if err != nil {
				t.Fatal(err)
			}
			defer observer.close()
			// The slots that a service has, as the kernel leads to them.
			endpointsOf := func(i int) (addrs []netip.Addr) {
				for slot := range 10 {
					e, at := frontendKeyOf(i)
					w := keyWriter{&e, at}
					w.slot(slot)
					got, ok, err := observer.get(t.Context(), e)
					if err != nil {
						t.Fatal(err)
					}
					if ok {
						addrs = append(addrs, addrOf(got.data[:4]))
					}
				}
				return addrs
			}
			want := map[int]int{2: 5, 5: 0, 90: 6, 95: 0, 150: 3, 3: 2} // by service
			asked := 0
			d, stop := drive(t, src, b, func() {
				switch asked++; asked {
				case 3:
					for i, m := range want {
						if m == 0 {
							src.Delete(numbered(i, 1).Key())
						} else {
							src.Set(numbered(i, m))
						}
					}
				case 4:
					for i, m := range want {
						if got := len(endpointsOf(i)); got != m {
							t.Errorf("during the full Sync, service %d has %d endpoints in the kernel, want %d", i, got, m)
						}
					}
				}
			})
			waitApplied(t, d, src)
			stop()
			if s := d.Status(); asked < 6 || s.FullSyncs != 1 {
				t.Errorf("it was asked %d times what changed, in %d full Syncs", asked, s.FullSyncs)
			}
			checkTable(t, b, src)
		})
	}
}

// frontendKeyOf returns the beginning of the keys of service i's endpoints, and where
// it ends.
func frontendKeyOf(i int) (elementID, int) {
	e := elementID{m: mapID{endpoints, service, api.IPv4}}
	w := keyWriter{id: &e}
	w.addr(numbered(i, 1).Service.IPs.ClusterIPs.V4[0])
	w.protocol(api.TCP)
	w.port(80)
	return e, w.at
}

// checkTable checks that b's table is what a fresh load of src makes it, and that b
// knows.
func checkTable(t *testing.T, b *Backend, src *sinktest.Source) {
	t.Helper()
	var list []sink.Change
	for _, v := range src.Views() {
		list = append(list, set(v))
	}
	if b.leftovers || b.drifting {
		mustSync(t, b, changes(true, list...))
	}
	if err := b.Verify(t.Context()); err != nil {
		t.Error(err)
	}
	fresh, _ := start(t, Options{})
	mustSync(t, fresh, changes(true, list...))
	if diff := cmp.Diff(contents(t, fresh), contents(t, b)); diff != "" {
		t.Errorf("the table is not as a fresh load makes it (-fresh +is):\n%s", diff)
	}
	if diff := cmp.Diff(chainNames(t, fresh), chainNames(t, b)); diff != "" {
		t.Errorf("the chains are not as a fresh load makes them (-fresh +are):\n%s", diff)
	}
}

// TestAnyChangesDuringFullSyncs checks that the table is what a fresh load makes it,
// whatever happened during full Syncs: services come, go, change and exchange their
// addresses, and transactions fail.
func TestAnyChangesDuringFullSyncs(t *testing.T) {
	for seed := range uint64(8) {
		failures := seed%2 == 1
		t.Run(fmt.Sprintf("seed %d, failures: %t", seed, failures), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 2))
			src := sinktest.NewSource()
			src.SetNode(node)
			numbers := rng.Perm(12)
			change := func() {
				i, j := rng.IntN(len(numbers)), rng.IntN(len(numbers))
				if rng.IntN(3) == 0 {
					numbers[i], numbers[j] = numbers[j], numbers[i]
				}
				// Whoever has an address gives it up before another one gets it.
				src.Delete(keyOf(i), keyOf(j))
				for _, k := range []int{i, j} {
					if v := randomView(rng, keyOf(k).Name, numbers[k]); v != nil {
						src.Set(v)
					}
				}
			}
			for range 20 {
				change()
			}
			src.MarkSynced()

			b, _ := start(t, Options{Observer: Observer{Drifted: func() {
				if !failures {
					t.Error("something is not as it was left, and nobody else changed it")
				}
			}}})
			b.piece = 1 + rng.IntN(40)
			unfailing := b.conn.exchange
			fail := false // set and read by the driver's goroutine
			b.conn.exchange = func(batch []byte) error {
				if fail && rng.IntN(8) == 0 {
					return &failure{errno: unix.ENFILE}
				}
				return unfailing(batch)
			}
			asked := 0
			d, stop := drive(t, src, b, func() {
				fail = failures
				if asked++; asked < 200 && rng.IntN(2) == 0 {
					change()
				}
			})
			waitApplied(t, d, src)
			for i := range 8 {
				src.Lag()
				src.Set(view("last", []string{"10.97.0.1"}, []string{fmt.Sprintf("10.0.1.%d", i)}, nil))
				waitApplied(t, d, src)
			}
			stop()
			if d.Status().FullSyncs < 5 {
				t.Errorf("there were %d full Syncs", d.Status().FullSyncs)
			}
			b.conn.exchange = unfailing
			checkTable(t, b, src)
		})
	}
}

func keyOf(i int) types.NamespacedName {
	return types.NamespacedName{Namespace: "default", Name: fmt.Sprint("svc-", i)}
}

// TestTableIsReadAhead checks that the first Sync uses what was read at the start, and
// reads again if somebody has changed tables since.
func TestTableIsReadAhead(t *testing.T) {
	first, ns := start(t, Options{})
	web, other := view("web", []string{"10.96.0.1"}, []string{"10.0.0.1"}, nil), view("other", []string{"10.96.0.2"}, []string{"10.0.0.2"}, nil)
	mustSync(t, first, changes(true, set(web), set(other)))
	for name, edit := range map[string]string{
		"nobody changed it": "",
		"somebody did":      "delete element inet kpng services4 { 10.96.0.2 . tcp . 80 }\n",
	} {
		t.Run(name, func(t *testing.T) {
			b := startIn(t, ns, Options{})
			waitReadAhead(b)
			before := b.found.state
			if edit != "" {
				nft(t, ns, edit, "-f", "-")
			}
			mustSync(t, b, changes(true, set(web), set(other)))
			if used := b.state == before; used != (edit == "") || b.found != nil {
				t.Errorf("what was found at the start was used: %t; is kept: %t", used, b.found != nil)
			}
			if err := b.Verify(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// waitReadAhead waits until b has read its table, which it does after its start.
func waitReadAhead(b *Backend) {
	for read := false; !read; time.Sleep(time.Millisecond) {
		b.mu.Lock()
		read = b.found != nil
		b.mu.Unlock()
	}
}

// TestConnectionsAreJudgedByWhatWasProgrammed checks that connection tracking is told the
// services as they are when a full Sync ends, not as they were when it began.
func TestConnectionsAreJudgedByWhatWasProgrammed(t *testing.T) {
	var told []string
	b, _ := start(t, Options{Conntrack: sink.Func(func(_ context.Context, c *sink.Changes) error {
		for ch := range c.Services {
			told = append(told, fmt.Sprint(ch.Key.Name, " ", ch.New.Endpoints[0].Addr))
		}
		return nil
	})})
	at := func(name, ip, endpoint string) *api.ServiceEndpoints {
		return view(name, []string{ip}, []string{endpoint}, nil)
	}
	changed, gone := at("changed", "10.96.0.2", "10.0.0.1"), at("gone", "10.96.0.3", "10.0.0.1")
	c := changes(true, set(changed), set(gone), set(at("same", "10.96.0.5", "10.0.0.1")))
	meanwhile := changes(false,
		set(at("a-new", "10.96.0.1", "10.0.0.2")), sink.Change{Old: changed, New: at("changed", "10.96.0.2", "10.0.0.2")},
		sink.Change{Old: gone}, set(at("late", "10.96.0.4", "10.0.0.2")), set(at("z-new", "10.96.0.6", "10.0.0.2")))
	asked := 0
	c.Meanwhile = func() []sink.Change {
		if asked++; asked == 2 {
			return slices.Collect(meanwhile.Services)
		}
		return nil
	}
	mustSync(t, b, c)
	want := []string{"a-new 10.0.0.2", "changed 10.0.0.2", "late 10.0.0.2", "same 10.0.0.1", "z-new 10.0.0.2"}
	if diff := cmp.Diff(want, told); diff != "" {
		t.Errorf("connection tracking is told (-want +got):\n%s", diff)
	}
}

// TestAChangeDuringAFullSyncLeavesWhatLaterServicesNeed has one of two services that share
// an endpoint give it up while the other is only in the table.
func TestAChangeDuringAFullSyncLeavesWhatLaterServicesNeed(t *testing.T) {
	const hairpin = "hairpins4 10.0.0.1 . 10.0.0.1"
	early, late := view("early", []string{"10.96.0.1"}, []string{"!10.0.0.1"}, nil), view("late", []string{"10.96.0.2"}, []string{"!10.0.0.1"}, nil)
	changed := view("early", []string{"10.96.0.1"}, []string{"10.0.0.2"}, nil)
	b, ns := start(t, Options{})
	mustSync(t, b, changes(true, set(early), set(late)))
	b = startIn(t, ns, Options{Observer: Observer{Drifted: func() { t.Error("nobody changed the table") }}})
	b.piece = 1
	c := changes(true, set(early), set(late))
	asked := 0
	c.Meanwhile = func() []sink.Change {
		if asked++; asked == 2 {
			return slices.Collect(changes(false, sink.Change{Old: early, New: changed}).Services)
		}
		return nil
	}
	exchange := b.conn.exchange
	b.conn.exchange = func(batch []byte) error {
		err := exchange(batch)
		if listing := nft(t, ns, "", "list", "set", "inet", "kpng", "hairpins4"); !strings.Contains(listing, "10.0.0.1 . 10.0.0.1") {
			t.Errorf("a service needs the hairpin that went:\n%s", listing)
		}
		return err
	}
	mustSync(t, b, c)
	b.conn.exchange = exchange
	mustSync(t, b, changes(false, sink.Change{Old: early, New: changed, Retry: true}, sink.Change{Old: late}))
	if slices.Contains(contents(t, b), hairpin) {
		t.Error("the hairpin is left")
	}
	if err := b.Verify(t.Context()); err != nil {
		t.Error(err)
	}
}
