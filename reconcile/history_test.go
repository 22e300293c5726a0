// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

var histories = flag.Int("histories", 400, "the `number` of random histories that TestHistories plays")

// TestHistories replaces the driver, and plays random histories. It checks the promises
// of the package comment. If a history fails, the test reduces it to the steps that the
// failure needs.
func TestHistories(t *testing.T) {
	for seed := range uint64(*histories) {
		random := rand.New(rand.NewPCG(seed, 37))
		steps := []step{{"start", random.Uint64()}}
		for range 10 + random.IntN(90) {
			steps = append(steps, step{kinds[random.IntN(len(kinds))], random.Uint64()})
		}
		var err error
		// The bubble has a clock of its own, so waiting takes no time.
		synctest.Test(t, func(t *testing.T) {
			if _, err = play(t, steps); err == nil {
				return
			}
			steps = apitest.Reduce(steps, func(steps []step) bool { _, err := play(t, steps); return err != nil })
			var log []string
			log, err = play(t, steps)
			t.Logf("history of seed %d:\n%s", seed, strings.Join(log, "\n"))
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// step is a step of a history. The effect of a step depends only on its kind, its seed
// and the earlier steps.
type step struct {
	kind string
	seed uint64
}

// kinds has the kinds of steps. A kind occurs more often if this list has it several
// times.
var kinds = []string{
	"change", "change", "change", "change", "sync", "sync", "sync", "sync",
	"disturb", "disturb", "calm", "calm", "drift", "pass", "restart", "wait", "interrupt",
}

// player replaces the driver in one history.
type player struct {
	*world
	random *rand.Rand
	// views has the views of the source, and acked has the views that were acknowledged
	// last.
	views, acked map[string]*api.View
	// The services in pending are not acknowledged with their present views. The last delivery
	// of the services in failing has failed.
	pending, failing map[string]bool
	// claimed has pairs of a service and an object. After the service was acknowledged,
	// another service has claimed the object.
	claimed map[[2]string]bool
	// begun is true between the end of a pass and the next loss of the dataplane's state.
	begun bool
	// addrs has the service of each flow.
	addrs [6]string
	log   []string
}

// play plays a history. It returns a log, and the first violation of a promise.
func play(t testing.TB, steps []step) (log []string, err error) {
	p := &player{
		world: &world{TB: t, fake: newFake()}, views: map[string]*api.View{}, acked: map[string]*api.View{},
		pending: map[string]bool{}, failing: map[string]bool{}, claimed: map[[2]string]bool{},
	}
	p.opts = Options[string, string]{Depth: depth, Virtual: func(k string) bool { return k[0] == 'v' }, VerifyInterval: -1}
	p.opts.Base = func(emit func(k, v string)) { emit("base", "1"); emit("s0", "1") }
	for i, s := range steps {
		p.random = rand.New(rand.NewPCG(s.seed, 0))
		p.log = append(p.log, s.kind)
		err := p.step(s.kind)
		if err == nil && len(p.faults) > 0 {
			err = errors.New(p.faults[0])
		}
		if err != nil {
			return p.log, fmt.Errorf("step %d (%s): %w", i, s.kind, err)
		}
	}
	return p.log, nil
}

func (p *player) logf(format string, args ...any) {
	p.log = append(p.log, "  "+fmt.Sprintf(format, args...))
}

func (p *player) one(n int) bool { return p.random.IntN(n) == 0 }

func (p *player) step(kind string) error {
	switch kind {
	case "start":
		p.atomic, p.opts.MaxOps = p.one(2), 1+p.random.IntN(12)
		p.logf("atomic %t, at most %d operations", p.atomic, p.opts.MaxOps)
		p.fake.objects = map[string]string{"gs1.9": "stale", "fStale": "gs1.9", "sStale": "1"}
		p.restart()
	case "change":
		p.change()
		return nil
	case "disturb":
		p.disturb()
		return nil
	case "calm":
		clear(p.bad)
		clear(p.stuck)
		p.broken, p.unlisted = -1, false
		return nil
	case "restart":
		p.restart()
		p.begun = false
		return nil
	case "drift":
		return p.drift()
	case "wait":
		time.Sleep(11 * time.Minute)
		if !p.begun {
			return nil
		}
		// Services that have failed since the last restart may lose their earlier objects.
		maps.DeleteFunc(p.acked, func(name string, _ *api.View) bool { return p.pending[name] && !p.programmed(name) })
		if err := p.verify(); err != nil || !p.begun {
			return err
		}
		return p.checkNothingStale()
	case "interrupt":
		if p.begun {
			ctx, cancel := context.WithCancel(p.Context())
			cancel()
			if err := p.deliver(ctx, sink.Changes{}, slices.Collect(maps.Keys(p.pending))); err != nil {
				return err
			}
		}
		return p.check()
	case "pass":
		p.begun = false
	}
	if !p.begun {
		if err := p.pass(); err != nil {
			return err
		}
	} else if err := p.deliver(p.Context(), sink.Changes{}, slices.Collect(maps.Keys(p.pending))); err != nil {
		return err
	}
	return p.check()
}

// change changes a service. A flow belongs to one service at a time. A group also does,
// except groups that services share.
func (p *player) change() {
	name := fmt.Sprint("s", p.random.IntN(5))
	for i, owner := range p.addrs {
		if owner == name {
			p.addrs[i] = ""
		}
	}
	p.pending[name] = true
	if p.one(5) {
		p.logf("%s is deleted", name)
		delete(p.views, name)
		return
	}
	group := fmt.Sprintf("g%s.%d", name, p.random.IntN(3))
	value := fmt.Sprint(p.random.IntN(2))
	if p.one(3) {
		group, value = fmt.Sprint("gShared", p.random.IntN(2)), "1"
	}
	objects := []string{group + "=" + value}
	for i := range p.addrs {
		if !p.one(3) {
			continue
		}
		if other := p.addrs[i]; other != "" { // the other service loses the address
			p.pending[other] = true
			p.views[other] = p.view(other, slices.DeleteFunc(slices.Clone(p.plans[p.views[other]]), func(o string) bool {
				return strings.HasPrefix(o, fmt.Sprint("f", i, "="))
			})...)
			p.logf("%s loses f%d", other, i)
		}
		p.addrs[i] = name
		objects = append(objects, fmt.Sprintf("f%d=%s", i, group))
	}
	for i := range 3 {
		if p.one(2) {
			objects = append(objects, fmt.Sprint("s", i, "=", []string{"1", "1", ""}[i]))
		}
	}
	if p.one(3) {
		objects = append(objects, "conflict="+name)
	}
	if p.one(3) {
		objects = append(objects, "v"+name+"="+value)
	}
	if p.one(6) {
		objects = append(objects, "s3=0", "s3=1") // emitted twice
	}
	if p.one(10) {
		objects = append(objects, "error")
	}
	p.logf("%s needs %v", name, objects)
	p.views[name] = p.view(name, objects...)
}

// disturb makes some operations fail until the next "calm".
func (p *player) disturb() {
	group := fmt.Sprintf("gs%d.%d", p.random.IntN(5), p.random.IntN(3))
	if p.one(4) {
		group = fmt.Sprint("gShared", p.random.IntN(2))
	}
	flow := fmt.Sprint("f", p.random.IntN(6))
	switch p.random.IntN(8) {
	case 0, 1, 2:
		p.bad[group] = true
	case 3:
		p.bad[flow] = true
	case 4:
		p.stuck[group] = true
	case 5:
		p.stuck[[]string{flow, "fStale"}[p.random.IntN(2)]] = true
	case 6:
		p.broken = p.random.IntN(5)
	case 7:
		p.unlisted = true
	}
	p.logf("bad %v, stuck %v, broken after %d operations, unlisted %t", p.bad, p.stuck, p.broken, p.unlisted)
}

// drift changes objects as another program might do, and lets the Reconciler repair them.
func (p *player) drift() error {
	p.unlisted = false
	for _, k := range slices.Sorted(maps.Keys(p.fake.objects)) {
		switch {
		case !p.one(4) || p.stuck[k]:
		case k[0] == 'f':
			delete(p.fake.objects, k)
			p.logf("%s is lost", k)
		case k[0] == 's' || k == "base" || k[0] == 'g':
			p.fake.objects[k] = "changed"
			p.logf("%s is changed", k)
		}
	}
	p.fake.objects["extra"] = "1"
	if p.begun {
		if err := p.verify(); err != nil {
			return err
		}
	}
	// Services that fail do not get back the objects that they have lost.
	maps.DeleteFunc(p.acked, func(name string, _ *api.View) bool { return !p.begun || p.pending[name] })
	return p.check()
}

func (p *player) verify() error {
	switch err := p.Verify(p.Context()); {
	case err == nil:
	case errors.Is(err, sink.ErrStartOver):
		p.logf("verify: %v", err)
		p.begun = false
	case !p.unlisted:
		return err
	}
	return nil
}

// deliver delivers services. It returns an error if the result is wrong.
func (p *player) deliver(ctx context.Context, c sink.Changes, names []string) error {
	slices.Sort(names)
	var list []any
	for _, name := range names {
		if v := p.views[name]; v != nil {
			list = append(list, v)
		} else {
			list = append(list, name)
		}
	}
	if c.First {
		maps.DeleteFunc(p.fake.objects, func(k, _ string) bool { return k[0] == 'v' })
	}
	err := p.syncWith(ctx, c, list...)
	p.logf("first %t, last %t, failing %v, services %v: %q: %v", c.First, c.Last, c.Failing, names, p.calls, err)
	for _, name := range names {
		for _, o := range p.plans[p.views[name]] {
			k, _, _ := strings.Cut(o, "=")
			for other := range p.acked {
				if other != name {
					p.claimed[[2]string{other, k}] = true
				}
			}
		}
	}
	failed, ok := sink.Acknowledged(err)
	if !ok {
		p.begun = false
		if !errors.Is(err, sink.ErrStartOver) && !(c.First && p.unlisted) {
			return err
		}
		for _, name := range names { // these services may be half applied
			delete(p.acked, name)
			p.pending[name] = true
		}
		// If a pass has not delivered a deleted service, its deletion may also be half
		// applied.
		maps.DeleteFunc(p.acked, func(name string, _ *api.View) bool { return p.views[name] == nil })
		return nil
	}
	for _, name := range names {
		if failed[key(name)] == nil {
			p.acknowledge(name)
		}
	}
	for k, err := range failed {
		p.pending[k.Name], p.failing[k.Name] = true, true
		if errors.Is(err, errBad) && len(p.bad)+len(p.stuck) == 0 {
			return fmt.Errorf("%v fails, although the dataplane works", k)
		}
	}
	return nil
}

// acknowledge records that the Reconciler has acknowledged a service.
func (p *player) acknowledge(name string) {
	delete(p.pending, name)
	delete(p.failing, name)
	p.acked[name] = p.views[name]
	maps.DeleteFunc(p.claimed, func(k [2]string, _ bool) bool { return k[0] == name })
}

// pass delivers all services in two batches. Services may change between them.
func (p *player) pass() error {
	names := slices.Sorted(maps.Keys(p.views))
	c := sink.Changes{Last: true}
	names = slices.DeleteFunc(names, func(name string) bool {
		isolated := p.pending[name] && p.failing[name] && p.one(4) // the driver delivers it alone
		if isolated {
			c.Failing = append(c.Failing, key(name))
		}
		return isolated
	})
	split := p.random.IntN(len(names) + 1)
	first, last := names[:split:split], slices.Clone(names[split:])
	p.begun = true
	if err := p.deliver(p.Context(), sink.Changes{First: true}, slices.Clone(first)); err != nil || !p.begun {
		return err
	}
	failed := maps.Clone(p.pending)
	for range p.random.IntN(2) {
		p.change()
	}
	if p.one(4) {
		p.fake.objects["extra"] = "1"
		if err := p.verify(); err != nil || !p.begun {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(p.pending)) {
		switch {
		case slices.Contains(last, name), slices.Contains(c.Failing, key(name)):
		case slices.Contains(first, name) && failed[name] && p.one(2):
			c.Failing = append(c.Failing, key(name))
		case p.views[name] != nil || slices.Contains(first, name) || p.one(2):
			last = append(last, name)
		}
	}
	for name := range p.views {
		if !slices.Contains(first, name) && !slices.Contains(last, name) && !slices.Contains(c.Failing, key(name)) {
			last = append(last, name)
		}
	}
	slices.SortFunc(c.Failing, func(a, b types.NamespacedName) int { return strings.Compare(a.Name, b.Name) })
	if err := p.deliver(p.Context(), c, last); err != nil || !p.begun {
		return err
	}
	// The pass has pruned the objects of deleted services that it has not delivered.
	for name := range p.pending {
		if p.views[name] == nil && !slices.Contains(first, name) && !slices.Contains(last, name) && (p.services[key(name)] == nil) {
			p.acknowledge(name)
		}
	}
	return nil
}

// programmed reports whether a service was programmed since the last restart or loss.
func (p *player) programmed(name string) bool {
	s := p.services[key(name)]
	return s != nil && s.view != nil
}

// check checks the promises about services.
func (p *player) check() error {
	if !p.begun {
		return nil
	}
	for name, s := range p.services {
		seen := map[*object[string, string]]bool{}
		for _, o := range s.objects {
			if seen[o] {
				return fmt.Errorf("service %v has recorded the object %s twice", name, o.key)
			}
			seen[o] = true
		}
	}
	for name, v := range p.acked {
		for _, o := range p.plans[v] {
			k, want, _ := strings.Cut(o, "=")
			got, ok := p.fake.objects[k]
			switch {
			case k == "conflict" || k[0] == 'v' || k == "s3":
			case p.pending[name]:
				// A failing service keeps its objects, unless another service has claimed them. Without
				// transactions, it may be half applied.
				if !ok && p.atomic && (!p.claimed[[2]string{name, k}] || k[0] == 's' && p.programmed(name)) {
					return fmt.Errorf("service %s fails and has lost %s", name, k)
				}
			case got != want && (!p.claimed[[2]string{name, k}] || k[0] == 's'):
				return fmt.Errorf("service %s was acknowledged and has %s=%q, want %q", name, k, got, want)
			}
		}
	}
	if len(p.pending)+len(p.stuck) > 0 || p.broken >= 0 || p.unlisted {
		return nil
	}
	if err := p.verify(); err != nil || !p.begun {
		return err
	}
	want := map[string]string{"base": "1", "s0": "1"}
	for _, v := range p.views {
		for _, o := range p.plans[v] {
			k, value, _ := strings.Cut(o, "=")
			want[k] = value
		}
	}
	if want["conflict"] != "" { // the value of any service that needs the object is right
		want["conflict"] = p.fake.objects["conflict"]
		if v := p.views[want["conflict"]]; v == nil || !slices.Contains(p.plans[v], "conflict="+want["conflict"]) {
			return fmt.Errorf("the object conflict has value %q", want["conflict"])
		}
	}
	if diff := cmp.Diff(want, p.fake.objects); diff != "" {
		return fmt.Errorf("all services are acknowledged, but the objects differ (-want +got):\n%s", diff)
	}
	return nil
}

// checkNothingStale checks that services that fail for a long time do not keep the
// stale objects of other services.
func (p *player) checkNothingStale() error {
	for _, k := range []string{"fStale", "sStale", "extra"} {
		if _, ok := p.fake.objects[k]; ok && len(p.stuck) == 0 && p.broken < 0 && !p.unlisted {
			return fmt.Errorf("the object %s is stale", k)
		}
	}
	return nil
}
