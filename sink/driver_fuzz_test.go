// SPDX-License-Identifier: Apache-2.0

package sink_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/sinkscript"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// FuzzDriver changes a source at random and makes a sink fail at random. Addresses move
// between services. In the end, the sink must have the source's state. The Recorder
// checks the order of services and the fields Old, Unsure and Failing, and that no
// acknowledged change is delivered again.
func FuzzDriver(f *testing.F) {
	for seed := range uint64(100) {
		f.Add(seed, uint8(200))
	}
	f.Fuzz(func(t *testing.T, seed uint64, ops uint8) {
		r := rand.New(rand.NewPCG(seed, 0))
		plane := newDataplane(r.IntN(2) == 0)
		opts := sink.Options{
			BatchSize:   1 + r.IntN(4),
			MinInterval: time.Duration(r.IntN(3)) * 50 * time.Millisecond,
		}
		jitter := float64(r.IntN(2)) / 2
		configure := func(d *sink.Driver) {
			d.SetBackoff(sink.Backoff{Initial: 100 * time.Millisecond, Max: 30 * time.Second, Jitter: jitter})
		}
		runWith(t, opts, configure, plane, func(w *world) {
			w.src.Delete(web)
			services := fuzzServices{w: w, r: r, large: r.IntN(2) == 0}
			var blocks []chan struct{}
			for range ops {
				blocks = append(blocks, services.mutate(plane)...)
				if r.IntN(2) == 0 {
					synctest.Wait()
				}
			}
			for _, b := range blocks {
				close(b)
			}
			w.src.Fail(nil)
			plane.refuse("")
			w.src.MarkSynced()
			if err := w.driver.WaitApplied(w.Context(), w.src.Revision()); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Hour) // another pass may follow
			w.waitApplied()

			plane.expect(t, w.src.Views())
			if !w.rec.Node().Equal(w.src.Node()) {
				w.Errorf("the sink has node %v, the source %v", w.rec.Node(), w.src.Node())
			}
			s := w.driver.Status()
			if s.Pending != 0 || len(s.Failing) != 0 || s.Err != nil || !s.WaitingSince.IsZero() || s.Revision != w.src.Revision() {
				w.Errorf("everything is applied up to revision %d, but the status is %+v", w.src.Revision(), s)
			}
			if last := w.script.Times()[len(w.rec.Syncs())-1]; time.Since(last.Ended) < 30*time.Minute {
				w.Errorf("a Sync without a change, %v ago", time.Since(last.Ended))
			}
			if len(w.rec.Syncs()) > 100*(int(ops)+1) {
				w.Errorf("%d changes needed %d Syncs", ops, len(w.rec.Syncs()))
			}
		})
	})
}

// fuzzServices are six services, named "a" to "f". Eight addresses move between them.
type fuzzServices struct {
	w      *world
	r      *rand.Rand
	large  bool   // some services are large
	owners [8]int // for each address, the number of its service (1 is "a", 6 is "f"), or 0 for none
}

func fuzzKey(n int) types.NamespacedName { return key(string(rune('a' + n))) }

// mutate makes one random change of the source, the sink or the clock. If the result has
// a channel, the sink blocks until the caller closes this channel.
func (f *fuzzServices) mutate(plane *dataplane) []chan struct{} {
	w, r := f.w, f.r
	switch r.IntN(18) {
	case 0, 1, 2, 3, 4, 5, 6:
		f.moveAddresses()
	case 7:
		w.src.SetNode(&api.Node{Name: fmt.Sprint("n", r.IntN(3))})
	case 8:
		w.src.MarkSynced()
		switch r.IntN(6) {
		case 0:
			w.src.Reset()
		case 1:
			w.driver.StartOver()
		}
	case 9:
		var err error
		if r.IntN(2) == 0 {
			err = errBusy
		}
		w.src.Fail(err)
	case 10, 11, 12:
		time.Sleep(time.Duration(r.IntN(300)) * time.Millisecond)
	case 13:
		plane.fail(fuzzKey(r.IntN(6)), 1+r.IntN(3), errBusy)
	case 14:
		plane.fail(fuzzKey(r.IntN(6)), 1+r.IntN(8), errPanic)
	case 15:
		w.script.Add(plane.failHalfway(r.IntN(4), []error{errBusy, sink.ErrStartOver, nil}[r.IntN(3)]))
	case 16:
		release := make(chan struct{})
		w.script.Add(sinkscript.Block(release))
		if r.IntN(2) == 0 {
			return []chan struct{}{release}
		}
		close(release)
	case 17:
		plane.refuse(fmt.Sprint("n", r.IntN(6)))
	}
	return nil
}

// moveAddresses moves some addresses between services in one update. A service without an
// address is deleted.
func (f *fuzzServices) moveAddresses() {
	changed := map[int]bool{1 + f.r.IntN(6): true}
	for range f.r.IntN(4) {
		i, to := f.r.IntN(len(f.owners)), f.r.IntN(7)
		changed[f.owners[i]], changed[to] = true, true
		f.owners[i] = to
	}
	delete(changed, 0)
	var set []*api.View
	for n := 1; n <= 6; n++ {
		if !changed[n] {
			continue
		}
		v := view(fuzzKey(n-1), randomBytes(f.r)...)
		v.Service.AllPorts = f.r.IntN(4) == 0
		if f.large && f.r.IntN(3) == 0 {
			v.Service.SourceRanges = largeRanges
		}
		var addrs []netip.Addr
		for i, owner := range f.owners {
			if owner == n {
				addrs = append(addrs, netip.AddrFrom4([4]byte{10, 96, 0, byte(i + 1)}))
			}
		}
		if len(addrs) == 0 {
			f.w.src.Delete(v.Key()) // first, because SetTriggered gives the old addresses to other services
			continue
		}
		v.Service.IPs.ClusterIPs = api.NewIPSet(addrs[0])
		v.Service.IPs.ExternalIPs = api.NewIPSet(addrs[1:]...)
		set = append(set, v)
	}
	f.w.src.SetTriggered(time.Now(), set...)
}

// randomBytes returns some of the bytes 1 to 4, in order.
func randomBytes(r *rand.Rand) []byte {
	var some []byte
	for n := byte(1); n <= 4; n++ {
		if r.IntN(2) == 0 {
			some = append(some, n)
		}
	}
	return some
}

// dataplane is a sink that stores frontends by claim. For a service that is not unsure,
// the sink programs only the difference between Old and New.
type dataplane struct {
	entries map[api.Claim]fuzzEntry
	// If atomic is true, the sink does not program a failed service, and programs nothing if
	// the Sync fails as a whole. An atomic sink may rely on Old even for an unsure service.
	atomic bool
	// The last delivered view of each service. A Changes with First clears the map.
	wanted map[types.NamespacedName]*api.View
	// mu protects the fields below. failing has the services that still have to fail.
	mu      sync.Mutex
	failing map[types.NamespacedName]*failure
	refused string // the name of a Node with which each Sync fails
}

type fuzzEntry struct {
	owner   types.NamespacedName
	targets string
}

type failure struct {
	times int
	err   error
}

var errPanic = errors.New("panic")

func newDataplane(atomic bool) *dataplane {
	p := &dataplane{
		entries: map[api.Claim]fuzzEntry{}, atomic: atomic, failing: map[types.NamespacedName]*failure{},
		wanted: map[types.NamespacedName]*api.View{},
	}
	for n := range byte(9) { // add entries of an earlier process
		claim := api.Claim{IP: netip.AddrFrom4([4]byte{10, 96, 0, n}), Protocol: api.TCP, Port: 80}
		p.entries[claim] = fuzzEntry{key(string(rune('a' + n))), "[9]"}
	}
	return p
}

// fail makes the next deliveries of a service fail with err. The argument times is their
// number.
func (p *dataplane) fail(key types.NamespacedName, times int, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failing[key] = &failure{times, err}
}

// refuse makes each Sync with the named Node fail.
func (p *dataplane) refuse(node string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refused = node
}

func (p *dataplane) refuses(node *api.Node) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return node != nil && node.Name == p.refused
}

func (p *dataplane) Sync(_ context.Context, c *sink.Changes) error {
	if p.refuses(c.Node) {
		return errBusy
	}
	return p.sync(c, func(key types.NamespacedName) error {
		p.mu.Lock()
		defer p.mu.Unlock()
		f := p.failing[key]
		if f == nil || f.times == 0 {
			return nil
		}
		f.times--
		return f.err
	})
}

// sync programs c, except services for which serviceErr returns an error.
func (p *dataplane) sync(c *sink.Changes, serviceErr func(types.NamespacedName) error) error {
	if c.First {
		clear(p.wanted)
	}
	entries := maps.Clone(p.entries)
	if !p.atomic {
		entries = p.entries
	}
	var failed sink.Failed
	for _, program := range []func(map[api.Claim]fuzzEntry, *sink.Change){p.remove, p.set} {
		for s := range c.Services {
			p.wanted[s.Key] = s.New
			if failed[s.Key] != nil {
				continue
			}
			err := serviceErr(s.Key)
			if err == errPanic {
				panic("oops")
			}
			if failed.Add(s.Key, err); err == nil {
				program(entries, &s)
			}
		}
		if len(failed) > 0 && p.atomic { // program again, without the failed services
			entries = maps.Clone(p.entries)
			for _, program := range []func(map[api.Claim]fuzzEntry, *sink.Change){p.remove, p.set} {
				for s := range c.Services {
					if failed[s.Key] == nil {
						program(entries, &s)
					}
				}
			}
			break
		}
	}
	if c.Last {
		maps.DeleteFunc(entries, func(claim api.Claim, e fuzzEntry) bool {
			if failed[e.owner] != nil || slices.Contains(c.Failing, e.owner) {
				return false
			}
			for f := range nodeview.Frontends(p.wanted[e.owner]) {
				if f.Claim() == claim {
					return false
				}
			}
			return true
		})
	}
	p.entries = entries
	return failed.Err()
}

// remove removes the entries of s.Old. If s is unsure, it removes all entries of the
// service, unless p is atomic and s.Old is not nil.
func (p *dataplane) remove(entries map[api.Claim]fuzzEntry, s *sink.Change) {
	for f := range nodeview.Frontends(s.Old) {
		delete(entries, f.Claim())
	}
	if s.Unsure && (s.Old == nil || !p.atomic) {
		maps.DeleteFunc(entries, func(_ api.Claim, e fuzzEntry) bool { return e.owner == s.Key })
	}
}

// set stores the frontends of s.New.
func (p *dataplane) set(entries map[api.Claim]fuzzEntry, s *sink.Change) {
	for f := range nodeview.Frontends(s.New) {
		entries[f.Claim()] = fuzzEntry{s.Key, targets(f)}
	}
}

// failHalfway returns a step that programs n services and then fails with err. If err is
// nil, the step panics.
func (p *dataplane) failHalfway(n int, err error) sinkscript.Step {
	return func(_ context.Context, c *sink.Changes, _ sink.Sink) (result error) {
		before := p.entries
		defer func() {
			if p.atomic && err != nil {
				p.entries = before
			}
			if r := recover(); r != nil && err == nil {
				panic(r)
			}
			result = err
		}()
		return p.sync(c, func(types.NamespacedName) error {
			if n--; n < 0 {
				panic("oops")
			}
			return nil
		})
	}
}

// expect checks that p has exactly the frontends of views.
func (p *dataplane) expect(t *testing.T, views []*api.View) {
	t.Helper()
	want := map[api.Claim]fuzzEntry{}
	for _, v := range views {
		p.set(want, &sink.Change{Key: v.Key(), New: v})
	}
	list := func(entries map[api.Claim]fuzzEntry) (lines []string) {
		for claim, e := range entries {
			lines = append(lines, fmt.Sprint(claim, " ", e))
		}
		slices.Sort(lines)
		return lines
	}
	if diff := cmp.Diff(list(want), list(p.entries)); diff != "" {
		t.Errorf("dataplane (-want +got):\n%s", diff)
	}
}
