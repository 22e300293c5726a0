// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// checkFresh checks that b's table equals a new table with only these services. It also
// checks that b's state describes its table.
func checkFresh(t *testing.T, b *backend, services ...sink.Change) {
	t.Helper()
	if err := verifyAll(t, b); err != nil {
		t.Error(err)
	}
	fresh, _ := start(t, Options{})
	mustSync(t, fresh, batchOf(true, services...))
	if diff := cmp.Diff(tableContents(t, fresh), tableContents(t, b)); diff != "" {
		t.Errorf("the table differs from a fresh load (-fresh +actual):\n%s", diff)
	}
	if diff := cmp.Diff(chainNames(t, fresh), chainNames(t, b)); diff != "" {
		t.Errorf("the chains differ from a fresh load (-fresh +actual):\n%s", diff)
	}
}

func batch(first, last bool, list ...sink.Change) *sink.Changes {
	c := batchOf(true, list...)
	c.First, c.Last, c.NodeChanged = first, last, first
	return c
}

// firstEndpoint returns the first endpoint of a cluster IP in b's table, in sorted order.
func firstEndpoint(t *testing.T, b *backend, ip string) string {
	t.Helper()
	for _, line := range tableContents(t, b) {
		if rest, ok := strings.CutPrefix(line, "services4 "+ip+" . tcp . 80 : "); ok {
			return strings.Split(rest, ", ")[1]
		}
	}
	return "nothing"
}

// TestAPassInSeveralBatches checks three properties of passes. A service can take over
// the address of another service. A pass removes stale elements only at its end. A new
// pass may begin before the previous pass ends.
func TestAPassInSeveralBatches(t *testing.T) {
	at := func(name, ip, endpoint string) sink.Change {
		return set(view(name, []string{ip}, []string{endpoint}, nil))
	}
	for name, restart := range map[string]bool{"the same process": false, "another process": true} {
		t.Run(name, func(t *testing.T) {
			b, ns := start(t, Options{})
			mustSync(t, b, batchOf(true, at("a", "10.96.0.1", "!10.0.0.1"), at("b", "10.96.0.2", "!10.0.0.1"), at("gone", "10.96.0.3", "10.0.0.3")))
			undrifted := Options{Options: backends.Options{Observer: &backendtest.Observer{OnDrifted: func() { t.Error("drift is reported, but no other program changed the table") }}}}
			if restart {
				b = startIn(t, ns, undrifted)
			}
			check := func(when string, want ...string) {
				t.Helper()
				got := []string{firstEndpoint(t, b, "10.96.0.1"), firstEndpoint(t, b, "10.96.0.2"), firstEndpoint(t, b, "10.96.0.3")}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("%s, the addresses lead to (-want +got):\n%s", when, diff)
				}
			}
			// The services swap their addresses. Before, both had the same endpoint on this node.
			a, bb := at("a", "10.96.0.2", "10.0.0.4"), at("b", "10.96.0.1", "!10.0.0.1")
			mustSync(t, b, batch(true, false, a))
			check("after the first batch", "10.0.0.1 . 8080", "10.0.0.4 . 8080", "10.0.0.3 . 8080")
			if !slices.Contains(tableContents(t, b), "service-hairpins4 10.0.0.1 . 10.0.0.1 . tcp . 8080") {
				t.Error("the pass removed a hairpin that another service needs")
			}
			mustSync(t, b, batch(false, false, bb))
			check("after the second batch", "10.0.0.1 . 8080", "10.0.0.4 . 8080", "10.0.0.3 . 8080")

			// During another pass, both services change: they swap their addresses again.
			mustSync(t, b, batch(true, false, a))
			first, second := at("a", "10.96.0.1", "10.0.0.4"), at("b", "10.96.0.2", "!10.0.0.1")
			change := batchOf(false, sink.Change{Old: a.New, New: first.New}, sink.Change{New: second.New, Unsure: true})
			mustSync(t, b, change)
			check("after a change during the pass", "10.0.0.4 . 8080", "10.0.0.1 . 8080", "10.0.0.3 . 8080")
			mustSync(t, b, batch(false, true))
			check("after the pass", "10.0.0.4 . 8080", "10.0.0.1 . 8080", "nothing")
			checkFresh(t, b, first, second)
		})
	}
}

// TestAPassKeepsElementsOfFailedServices makes the kernel refuse a service. In one case
// the service fails until the end of the pass. In the other case it succeeds earlier.
func TestAPassKeepsElementsOfFailedServices(t *testing.T) {
	old := []string{"10.0.0.1", "10.0.0.2", "10.0.0.3"}
	web := set(view("web", []string{"10.96.0.1"}, []string{"10.99.98.97"}, nil))
	ok := set(view("ok", []string{"10.96.0.2"}, []string{"10.0.0.1"}, nil))
	for name, recovers := range map[string]bool{"until its end": false, "before its end": true} {
		t.Run(name, func(t *testing.T) {
			b, ns := start(t, Options{})
			mustSync(t, b, batchOf(true, set(view("web", []string{"10.96.0.1"}, old, nil)), set(view("gone", []string{"10.96.0.3"}, old, nil))))
			var f faults
			f.refuse("10.99.98.97")
			b = startIn(t, ns, Options{Options: backends.Options{Observer: &backendtest.Observer{OnDrifted: func() { t.Error("drift is reported, but no other program changed the table") }}}}, f.use)
			if failed, ok := sink.Acknowledged(b.Sync(t.Context(), batch(true, false, web))); !ok || len(failed) != 1 {
				t.Fatalf("failed: %v, acknowledged: %t; want one service", failed, ok)
			}
			mustSync(t, b, batch(false, false, ok))
			last := batch(false, true)
			if recovers {
				f.exchange = nil
				mustSync(t, b, batch(false, false, web))
			} else {
				last.Failing = []types.NamespacedName{web.New.Key()}
			}
			mustSync(t, b, last)
			if got := firstEndpoint(t, b, "10.96.0.3"); got != "nothing" {
				t.Errorf("a deleted service leads to %s", got)
			}
			if recovers {
				checkFresh(t, b, web, ok)
				return
			}
			if got := firstEndpoint(t, b, "10.96.0.1"); got != "10.0.0.1 . 8080" {
				t.Errorf("the service that failed leads to %s", got)
			}
			f.ahead = time.Hour
			if err := verifyAll(t, b); !errors.Is(err, sink.ErrStartOver) {
				t.Errorf("Verify returns %v, want a request for a pass that removes leftovers", err)
			}
			f.exchange = nil
			mustSync(t, b, batchOf(true, web, ok))
			checkFresh(t, b, web, ok)
		})
	}
}

// TestOldElementsOfAFailedServiceAreRemoved makes the kernel refuse a service during a
// pass. Later in that pass, the service gets another address and loses session affinity.
func TestOldElementsOfAFailedServiceAreRemoved(t *testing.T) {
	web := func(ip, endpoint string, affinity bool) sink.Change {
		v := view("web", []string{ip}, []string{endpoint}, nil)
		if affinity {
			v.Service.AffinitySeconds = 10
		}
		return set(v)
	}
	b, ns := start(t, Options{})
	mustSync(t, b, batchOf(true, web("10.96.0.1", "10.0.0.1", true)))
	var f faults
	b = startIn(t, ns, Options{}, f.use)
	f.exchange = func([]byte, func([]byte) error) error { return &netfilter.Failure{Errno: unix.EINVAL} }
	if failed, ok := sink.Acknowledged(b.Sync(t.Context(), batch(true, false, web("10.96.0.1", "10.0.0.2", true)))); !ok || len(failed) != 1 {
		t.Fatalf("failed: %v, acknowledged: %t; want one service", failed, ok)
	}
	f.exchange = nil
	moved := web("10.96.0.9", "10.0.0.1", false)
	mustSync(t, b, batch(false, false, moved), batch(false, true))
	checkFresh(t, b, moved)
}

// TestRandomChangesDuringPasses makes random changes during passes: it adds, deletes and
// changes services, or lets two of them swap addresses. Some transactions fail. In the
// end the table must equal a new table with only the final views.
func TestRandomChangesDuringPasses(t *testing.T) {
	for seed := range uint64(8) {
		failures := seed%2 == 1
		t.Run(fmt.Sprintf("seed %d, failures: %t", seed, failures), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 2))
			src := sinktest.NewSource()
			src.SetNode(node)
			numbers := rng.Perm(12)
			keyOf := func(i int) types.NamespacedName {
				return types.NamespacedName{Namespace: "default", Name: fmt.Sprint("svc-", i)}
			}
			change := func() {
				i, j := rng.IntN(len(numbers)), rng.IntN(len(numbers))
				if rng.IntN(3) == 0 {
					numbers[i], numbers[j] = numbers[j], numbers[i]
				}
				// Each service must lose its address before another service gets it.
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

			var f faults
			b, _ := start(t, Options{Options: backends.Options{Observer: &backendtest.Observer{OnDrifted: func() {
				if !failures {
					t.Error("drift is reported, but no other program changed the table")
				}
			}}}}, f.use)
			fail := false // only the driver's goroutine uses this variable
			f.exchange = func(batch []byte, send func([]byte) error) error {
				if fail && rng.IntN(8) == 0 {
					return &netfilter.Failure{Errno: unix.ENFILE}
				}
				return send(batch)
			}
			syncs := 0
			changing := sink.Func(func(ctx context.Context, c *sink.Changes) error {
				fail = failures
				if syncs++; !c.First && syncs < 200 && rng.IntN(2) == 0 {
					change()
				}
				return b.Sync(ctx, c)
			})
			d, stop := drive(t, src, sinktest.NewRecorder(t, changing), 1+rng.IntN(40))
			waitApplied(t, d, src)
			for i := range 8 {
				src.Reset()
				src.Set(view("last", []string{"10.97.0.1"}, []string{fmt.Sprintf("10.0.1.%d", i)}, nil))
				waitApplied(t, d, src)
			}
			stop()
			if d.Status().Passes < 5 {
				t.Errorf("the driver made %d passes, want at least 5", d.Status().Passes)
			}
			f.exchange = nil
			var list []sink.Change
			for _, v := range src.Views() {
				list = append(list, set(v))
			}
			if b.table.leftovers.Exist || b.table.drift.comparedCommits < 0 {
				mustSync(t, b, batchOf(true, list...))
			}
			checkFresh(t, b, list...)
		})
	}
}

// TestTableIsReadAhead checks that Start reads the table, and that the first Sync does
// not read it again. If another program changes a table between Start and the first Sync,
// this Sync reads the table again.
func TestTableIsReadAhead(t *testing.T) {
	first, ns := start(t, Options{})
	web, other := view("web", []string{"10.96.0.1"}, []string{"10.0.0.1"}, nil), view("other", []string{"10.96.0.2"}, []string{"10.0.0.2"}, nil)
	mustSync(t, first, batchOf(true, set(web), set(other)))
	for name, edit := range map[string]string{
		"unchanged":                  "",
		"changed by another program": "delete element inet kpng services4 { 10.96.0.2 . tcp . 80 }\n",
	} {
		t.Run(name, func(t *testing.T) {
			b := startIn(t, ns, Options{})
			waitReadAhead(b)
			before := b.table.ahead.state
			if edit != "" {
				runNFT(t, ns, edit, "-f", "-")
			}
			mustSync(t, b, batchOf(true, set(web), set(other)))
			if used := b.table.state == before; used != (edit == "") || b.table.ahead != nil {
				t.Errorf("the first Sync used the read of Start: %t, and kept it: %t", used, b.table.ahead != nil)
			}
			if err := verifyAll(t, b); err != nil {
				t.Error(err)
			}
		})
	}
}

// waitReadAhead waits until b has read its table after Start.
func waitReadAhead(b *backend) {
	for read := false; !read; time.Sleep(time.Millisecond) {
		b.mu.Lock()
		read = b.table.ahead != nil
		b.mu.Unlock()
	}
}

// endpointsOf returns the kernel's elements for the endpoints of service i.
func endpointsOf(t testing.TB, c *conn, i int) (endpoints []element) {
	t.Helper()
	get := func(id elementID) (element, bool) {
		e, ok, err := c.getElement(t.Context(), id)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			t.Fatal(err)
		}
		return e, ok
	}
	id := elementID{m: mapID{kindFrontends, matchService, api.IPv4}}
	w := keyWriter{id: &id}
	w.addr(numberedService(i, 1).Service.IPs.ClusterIPs.Family(api.IPv4)[0])
	w.protocol(api.TCP)
	w.port(80)
	frontend, ok := get(id)
	l := list{listKey: listKey{family: api.IPv4, protocol: api.TCP, port: 80}, number: frontend.value.number() &^ handlingMask}
	for slot := 0; ok; slot++ {
		var e element
		if e, ok = get(l.slotID(slot)); ok {
			endpoints = append(endpoints, e)
		}
	}
	return endpoints
}

// unverified is a sink whose Verify is never called.
type unverified struct{ sink.Sink }

func (u *unverified) Unwrap() sink.Sink           { return u.Sink }
func (*unverified) VerifyInterval() time.Duration { return -1 }

// drive runs a driver that delivers src to s, until stop is called or the test ends.
func drive(t testing.TB, src sink.Source, s sink.Sink, batchSize int) (d *sink.Driver, stop func()) {
	t.Helper()
	return driveWith(t, src, s, sink.Options{BatchSize: batchSize})
}

func driveWith(t testing.TB, src sink.Source, s sink.Sink, opts sink.Options) (d *sink.Driver, stop func()) {
	t.Helper()
	d = sink.NewDriver(src, &unverified{s}, opts)
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

// waitApplied waits until the sink of d has applied all changes of src. While it waits,
// src may change. If leftovers of a failed service prevent a change, waitApplied begins
// the pass that Verify would request.
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
				src.Reset()
			}
		}
	}
}

// TestDriftOfALargeTable changes elements of lists in a table that is so large that the
// backend reads lists one by one. Verify must find each change, and a pass must repair it.
func TestDriftOfALargeTable(t *testing.T) {
	affine := view("affine", []string{"10.96.0.3"}, []string{"10.0.2.1", "10.0.2.2", "10.0.2.3"}, nil)
	affine.Service.AffinitySeconds = 60
	services := []sink.Change{
		set(view("web", []string{"10.96.0.1"}, []string{"10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"}, nil)),
		set(view("db", []string{"10.96.0.2"}, []string{"10.0.1.1", "10.0.1.2"}, nil)),
		set(affine),
	}
	for _, kind := range []mapKind{kindLists, kindEndpoints, kindSlots, kindNumbers} {
		for _, edit := range []string{"deleted", "changed", "added"} {
			for _, restart := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s %s, restart=%t", mapID{kind: kind, family: api.IPv4}.name(), edit, restart), func(t *testing.T) {
					few := func(o *options) { o.maxDumped = 3 }
					b, ns := start(t, Options{}, few)
					mustSync(t, b, batch(true, false, services[:1]...), batch(false, true, services[1:]...))
					if err := verifyAll(t, b); err != nil {
						t.Fatal(err)
					}
					other := newConn(ns.FD, b.table.conn.Table)
					defer other.Close()
					s, err := readSnapshot(t.Context(), other, mapID{kind: kind, family: api.IPv4}, nil)
					if err != nil {
						t.Fatal(err)
					}
					all := slices.Collect(s.all())
					e := all[rand.IntN(len(all))]
					err = other.Transact(t.Context(), func(w *nft.Writer) {
						next := e
						switch edit {
						case "added":
							next.key[1] ^= 1 // an element of another list
						default:
							writeElements(w, unix.NFT_MSG_DELSETELEM, 0, e.ref())
							next.data[0] ^= 1
						}
						if edit != "deleted" {
							writeElements(w, unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, next.ref())
						}
					})
					if err != nil {
						t.Fatal(err)
					}
					if restart {
						b.Stop(t.Context())
						b = startIn(t, ns, Options{}, few)
						mustSync(t, b, batch(true, false, services[:1]...), batch(false, true, services[1:]...))
					}
					// The first pass reads the elements of lists. A second pass is needed
					// if other elements are left.
					for repairs := 0; ; repairs++ {
						err := verifyAll(t, b)
						if err == nil && (repairs > 0 || restart) {
							break
						} else if repairs == 2 || !errors.Is(err, sink.ErrStartOver) {
							t.Fatalf("after %d repairs, Verify returns %v", repairs, err)
						}
						mustSync(t, b, batch(true, false, services[:1]...), batch(false, true, services[1:]...))
					}
					checkFresh(t, b, services...)
				})
			}
		}
	}
}
