// SPDX-License-Identifier: Apache-2.0

package sink_test

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/sinkscript"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"k8s.io/apimachinery/pkg/types"
)

// frontendMap is a sink that works like a kernel map. It stores the endpoints of each
// address, protocol and port.
type frontendMap struct {
	entries map[api.Claim]entry
	pass    sink.Pass
	fail    func(k api.Claim) error // decides whether a write fails; if nil, no write fails
}

// entry includes the owner of the address. So the entry of the new owner stays when the
// previous owner is deleted late.
type entry struct {
	owner     types.NamespacedName
	endpoints string
}

func (m *frontendMap) Sync(_ context.Context, c *sink.Changes) error {
	m.pass.Begin(c)
	var failed sink.Failed
	for s := range c.Services {
		failed.Do(s.Key, func() error { return m.program(s) })
	}
	if c.Last {
		for k, e := range m.entries {
			if m.pass.Stale(e.owner) {
				failed.Do(e.owner, func() error { return m.remove(k, e.owner) })
			}
		}
	}
	return failed.Err()
}

// program removes the stale entries of a service and sets the new entries.
func (m *frontendMap) program(s sink.Change) error {
	if err := m.removeStale(s); err != nil {
		return err
	}
	return m.set(s)
}

// removeStale removes the entries of s.Old that s.New does not need. If s is unsure, it
// removes all entries of the service that s.New does not need.
func (m *frontendMap) removeStale(s sink.Change) error {
	stale := map[api.Claim]bool{}
	for f := range nodeview.Frontends(s.Old) {
		stale[f.Claim()] = true
	}
	if s.Unsure {
		for k, e := range m.entries {
			if e.owner == s.Key {
				stale[k] = true
			}
		}
	}
	for f := range nodeview.Frontends(s.New) {
		delete(stale, f.Claim())
	}
	for k := range stale {
		if err := m.remove(k, s.Key); err != nil {
			return err
		}
	}
	return nil
}

// remove deletes the entry with the key k if it still belongs to owner.
func (m *frontendMap) remove(k api.Claim, owner types.NamespacedName) error {
	if e, ok := m.entries[k]; !ok || e.owner != owner {
		return nil
	}
	if err := m.write(k); err != nil {
		return fmt.Errorf("remove %v: %w", k.IP, err)
	}
	delete(m.entries, k)
	return nil
}

// set writes an entry for each frontend of s.New, even if another service has an entry
// with the same key.
func (m *frontendMap) set(s sink.Change) error {
	for f := range nodeview.Frontends(s.New) {
		k := f.Claim()
		if err := m.write(k); err != nil {
			return fmt.Errorf("set %s: %w", f.FrontendKey, err)
		}
		m.entries[k] = entry{s.Key, targets(f)}
	}
	return nil
}

func (m *frontendMap) write(k api.Claim) error {
	if m.fail != nil {
		return m.fail(k)
	}
	return nil
}

// lines returns the entries sorted by address.
func (m *frontendMap) lines() []string {
	var lines []string
	for k, e := range m.entries {
		lines = append(lines, fmt.Sprintf("%v:%d %s → %s", k.IP, k.Port, e.owner.Name, e.endpoints))
	}
	slices.Sort(lines)
	return lines
}

// A sink that programs only differences has to know the owner of each entry. For an
// unsure service, it has to look at all entries. At the end of a pass, it prunes the
// entries of stale services.
func Example_frontends() {
	src := sinktest.NewSource()
	src.Set(withIP(1, view(web, 1)))
	src.MarkSynced()
	left := api.Claim{IP: netip.MustParseAddr("10.96.0.9"), Protocol: api.TCP, Port: 80}
	m := &frontendMap{entries: map[api.Claim]entry{left: {owner: key("left-over")}}}

	ctx, cancel := context.WithCancel(context.Background())
	d := sink.NewDriver(src, m, sink.Options{})
	ended := make(chan error)
	go func() { ended <- d.Run(ctx) }()
	_ = d.WaitApplied(ctx, src.Revision())
	src.Set(withIP(2, view(web, 1, 2)), withIP(1, view(dns, 3))) // dns gets web's address
	_ = d.WaitApplied(ctx, src.Revision())
	cancel()
	<-ended
	fmt.Println(strings.Join(m.lines(), "\n"))
	// Output:
	// 10.96.0.1:80 dns → [3]
	// 10.96.0.2:80 web → [1 2]
}

// addressTable is a Handler that stores frontends by address and port, without an owner.
type addressTable struct {
	eventLog
	table map[api.Claim]string
}

func (t *addressTable) SetFrontend(ctx context.Context, svc *api.Service, f nodeview.Frontend) error {
	if err := t.eventLog.SetFrontend(ctx, svc, f); err != nil {
		return err
	}
	t.table[f.Claim()] = fmt.Sprintf("%v:%d %s → %s", f.Addr, f.Port, svc.Name, targets(f))
	return nil
}

func (t *addressTable) DeleteFrontend(ctx context.Context, svc *api.Service, f nodeview.Frontend) error {
	if err := t.eventLog.DeleteFrontend(ctx, svc, f); err != nil {
		return err
	}
	delete(t.table, f.Claim())
	return nil
}

// An address moves between services in a Sync that fails. When the services are delivered
// again, the address must not be lost.
func TestAddressMovesInFailingSync(t *testing.T) {
	a, b := key("a"), key("b")
	// newSink returns a sink, and a function that lists its entries. The sink calls write
	// before each change of an entry. If write returns an error, the change fails.
	sinks := []struct {
		name    string
		newSink func(write func() error) (sink.Sink, func() []string)
	}{{
		name: "a map of frontends",
		newSink: func(write func() error) (sink.Sink, func() []string) {
			m := &frontendMap{entries: map[api.Claim]entry{}, fail: func(api.Claim) error { return write() }}
			return m, m.lines
		},
	}, {
		name: "events",
		newSink: func(write func() error) (sink.Sink, func() []string) {
			m := &addressTable{table: map[api.Claim]string{}}
			m.fail = func(string) error { return write() }
			return sink.Events(m), func() []string { return slices.Sorted(maps.Values(m.table)) }
		},
	}}
	failures := []struct {
		name   string
		writes int // number of writes before the failing write; -1: no write fails
		script []sinkscript.Step
	}{
		{"the first write fails", 0, nil},
		{"the second write fails", 1, nil},
		{"the third write fails", 2, nil},
		{"the service that gives the address fails", -1, []sinkscript.Step{sinkscript.FailServices(errBusy, a)}},
		{"the service that gets the address fails", -1, []sinkscript.Step{sinkscript.FailServices(errBusy, b)}},
		{"both fail, twice", -1, sinkscript.Repeat(2, sinkscript.FailServices(errBusy, a, b))},
		{"everything fails", -1, []sinkscript.Step{sinkscript.Fail(errBusy)}},
		{"the sink starts over", -1, []sinkscript.Step{sinkscript.FailServices(sink.ErrStartOver, a)}},
	}
	for _, s := range sinks {
		for _, f := range failures {
			t.Run(s.name+": "+f.name, func(t *testing.T) {
				left := -1
				tested, list := s.newSink(func() error {
					left--
					if left == -1 {
						return errBusy
					}
					return nil
				})
				run(t, sink.Options{}, tested, func(w *world) {
					w.src.Delete(web)
					w.src.Set(withIP(1, view(a, 1)))
					w.src.MarkSynced()
					w.waitApplied()
					left = f.writes
					w.script.Add(f.script...)
					w.src.Set(withIP(2, view(a, 1)), withIP(1, view(b, 2)))
					w.waitApplied()
					want := []string{"10.96.0.1:80 b → [2]", "10.96.0.2:80 a → [1]"}
					if diff := cmp.Diff(want, list()); diff != "" {
						w.Errorf("dataplane (-want +got):\n%s", diff)
					}
				})
			})
		}
	}
}

// The tutorial in the module's doc.go contains the method Sync of this file.
func TestTutorialIsCompiled(t *testing.T) {
	doc, err := os.ReadFile("../doc.go")
	if err != nil {
		t.Fatal(err)
	}
	code, err := os.ReadFile("example_frontends_test.go")
	if err != nil {
		t.Fatal(err)
	}
	_, sync, _ := strings.Cut(string(code), "func (m *frontendMap) Sync(")
	sync, _, _ = strings.Cut(sync, "\n}\n")
	var comment strings.Builder
	for line := range strings.Lines("func (m *frontendMap) Sync(" + sync + "\n}\n") {
		comment.WriteString("//\t" + line)
	}
	if !strings.Contains(string(doc), comment.String()) {
		t.Errorf("the tutorial in doc.go is not:\n%s", comment.String())
	}
}
