// SPDX-License-Identifier: Apache-2.0

package netif

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

var (
	ip4 = netip.MustParseAddr("10.96.0.10")
	ip6 = netip.MustParseAddr("fd00:10:96::a")
)

const nic = "vEthernet (HNS Internal NIC)"

// fakeSystem is a Windows system with in-memory interfaces.
type fakeSystem struct {
	mu sync.Mutex
	// addrs contains, for each address, its interface and the time at which it becomes
	// usable.
	addrs map[netip.Addr]fakeAddress
	// delay is the time until an added address is usable.
	delay time.Duration
	// callErrors maps the verb of a call (add or delete) to the call's error. If takesEffect
	// is true, a failing call takes effect anyway.
	callErrors  map[string]error
	takesEffect bool
	// gone is true if the interface does not exist.
	gone    bool
	calls   []string
	lookups int
}

type fakeAddress struct {
	on     string
	usable time.Time
}

func newFakeSystem() *fakeSystem {
	return &fakeSystem{addrs: map[netip.Addr]fakeAddress{}, callErrors: map[string]error{}}
}

func (f *fakeSystem) add(_ context.Context, on string, addr netip.Addr) error {
	return f.change("add", on, addr, func() { f.addrs[addr] = fakeAddress{on, time.Now().Add(f.delay)} })
}

func (f *fakeSystem) remove(_ context.Context, on string, addr netip.Addr) error {
	return f.change("delete", on, addr, func() { delete(f.addrs, addr) })
}

func (f *fakeSystem) change(verb, on string, addr netip.Addr, do func()) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, fmt.Sprint(verb, " ", addr))
	if f.gone {
		return errNoInterface
	}
	if _, there := f.addrs[addr]; there == (verb == "add") {
		return errors.New("status 1") // like netsh, this error does not name the cause
	}
	if err := f.callErrors[verb]; err != nil && !f.takesEffect {
		return err
	}
	do()
	return f.callErrors[verb]
}

func (f *fakeSystem) usable(addr netip.Addr) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	a, ok := f.addrs[addr]
	return ok && !time.Now().Before(a.usable)
}

func (f *fakeSystem) addresses(on string) (map[netip.Addr]bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lookups++
	if f.gone {
		return nil, errNoInterface
	}
	here := map[netip.Addr]bool{}
	for addr, a := range f.addrs {
		here[addr] = a.on == on
	}
	return here, nil
}

func (f *fakeSystem) expect(t *testing.T, want ...netip.Addr) {
	t.Helper()
	got := slices.SortedFunc(maps.Keys(f.addrs), netip.Addr.Compare)
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Errorf("addresses of the host (-want +got):\n%s", diff)
	}
}

// newProcess returns a new Addresses value, as after a restart of the process.
func newProcess(t *testing.T, f *fakeSystem, path string) *Addresses {
	t.Helper()
	return &Addresses{on: nic, stateFile: path, system: f}
}

func check(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Errorf("%s: %v", what, err)
	}
}

func TestArgumentsOfNetsh(t *testing.T) {
	var calls []string
	for _, addr := range []netip.Addr{ip4, ip6} {
		calls = append(calls, strings.Join(addArguments(nic, addr), " "), strings.Join(deleteArguments(nic, addr), " "))
	}
	if diff := cmp.Diff([]string{
		"interface ipv4 add address name=" + nic + " address=10.96.0.10 mask=255.255.255.255 store=active skipassource=true",
		"interface ipv4 delete address name=" + nic + " address=10.96.0.10 store=active",
		"interface ipv6 add address interface=" + nic + " address=fd00:10:96::a/128 store=active skipassource=true",
		"interface ipv6 delete address interface=" + nic + " address=fd00:10:96::a store=active",
	}, calls); diff != "" {
		t.Errorf("calls of netsh (-want +got):\n%s", diff)
	}
}

func TestAddressIsAddedAndRemoved(t *testing.T) {
	f := newFakeSystem()
	a := newProcess(t, f, filepath.Join(t.TempDir(), "kpng", "state"))
	for _, addr := range []netip.Addr{ip4, ip6} {
		check(t, "add", a.Add(t.Context(), addr))
	}
	f.expect(t, ip4, ip6)
	for _, addr := range []netip.Addr{ip4, ip6} {
		check(t, "remove", a.Remove(t.Context(), addr))
	}
	f.expect(t)
}

// many returns n addresses.
func many(n int) []netip.Addr {
	var all []netip.Addr
	for i := range n {
		all = append(all, netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}))
	}
	return all
}

func TestRestartKeepsNeededAddresses(t *testing.T) {
	f := newFakeSystem()
	path := filepath.Join(t.TempDir(), "state")
	first := newProcess(t, f, path)
	all := many(100)
	for _, addr := range all {
		check(t, "add", first.Add(t.Context(), addr))
	}
	f.calls = nil
	second := newProcess(t, f, path)
	left, err := second.Left(t.Context())
	check(t, "remaining addresses", err)
	slices.SortFunc(left, netip.Addr.Compare)
	if !slices.Equal(left, all) {
		t.Errorf("%d of 100 addresses remain", len(left))
	}
	for _, addr := range all {
		check(t, "add", second.Add(t.Context(), addr))
	}
	if len(f.calls) > 0 {
		t.Errorf("a restart with the same addresses changed the host %d times", len(f.calls))
	}
	check(t, "remove", second.Remove(t.Context(), all[0]))
	f.expect(t, all[1:]...)
}

func TestMissingInterfaceIsDetectedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeSystem()
		f.gone = true
		a := newProcess(t, f, filepath.Join(t.TempDir(), "state"))
		for _, addr := range many(1000) {
			if err := a.Add(t.Context(), addr); !errors.Is(err, errNoInterface) {
				t.Fatalf("Add returned %v", err)
			}
		}
		if len(f.calls) > 0 || f.lookups != 1 {
			t.Errorf("for 1000 addresses the host was changed %d times, and the interface looked up %d times; want 0 and 1", len(f.calls), f.lookups)
		}
		// The interface appears. Add reads it again after maxLookAge.
		f.gone = false
		time.Sleep(maxLookAge)
		check(t, "add", a.Add(t.Context(), ip4))
	})
}

func TestUnusableAddressDelaysNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeSystem()
		a := newProcess(t, f, filepath.Join(t.TempDir(), "state"))
		f.delay = time.Hour
		var bad sync.WaitGroup
		for _, addr := range many(10) {
			bad.Go(func() {
				if err := a.Add(t.Context(), addr); err == nil {
					t.Errorf("%s can be used", addr)
				}
			})
		}
		synctest.Wait()
		f.mu.Lock()
		f.delay = 0
		f.mu.Unlock()
		start := time.Now()
		check(t, "add", a.Add(t.Context(), ip4))
		if took := time.Since(start); took > 0 {
			t.Errorf("it took %v while other addresses wait", took)
		}
		bad.Wait()
		f.expect(t, ip4)
	})
}

func TestAddReturnsWhenAddressIsUsable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeSystem()
		f.delay = 3 * time.Second
		a := newProcess(t, f, filepath.Join(t.TempDir(), "state"))
		start := time.Now()
		check(t, "add", a.Add(t.Context(), ip4))
		if took := time.Since(start); took < f.delay || took > f.delay+200*time.Millisecond {
			t.Errorf("Add returned after %v, but the address is usable after %v", took, f.delay)
		}
	})
}

func TestAddressesAreWaitedForTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeSystem()
		f.delay = 3 * time.Second
		a := newProcess(t, f, filepath.Join(t.TempDir(), "state"))
		start := time.Now()
		var all sync.WaitGroup
		for i := range 40 {
			all.Go(func() { check(t, "add", a.Add(t.Context(), netip.AddrFrom4([4]byte{10, 96, 1, byte(i)}))) })
		}
		all.Wait()
		if took := time.Since(start); took > f.delay+200*time.Millisecond {
			t.Errorf("40 addresses took %v, and each is usable after %v", took, f.delay)
		}
		check(t, "clean up", a.Cleanup(t.Context()))
		f.expect(t)
	})
}

func TestFailedAddIsReverted(t *testing.T) {
	for _, test := range []struct {
		name  string
		when  func(*fakeSystem)
		wants string
	}{
		{"netsh fails", func(f *fakeSystem) { f.callErrors["add"] = errors.New("status 1") }, "status 1"},
		{"netsh fails after it has added the address", func(f *fakeSystem) { f.callErrors["add"], f.takesEffect = errors.New("status 1"), true }, "status 1"},
		{"the address is not usable in time", func(f *fakeSystem) { f.delay = time.Minute }, "cannot be used after 10s"},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFakeSystem()
				path := filepath.Join(t.TempDir(), "state")
				a := newProcess(t, f, path)
				test.when(f)
				if err := a.Add(t.Context(), ip4); err == nil || !strings.Contains(err.Error(), test.wants) {
					t.Errorf("Add returned %v, want an error with %q", err, test.wants)
				}
				f.expect(t)
				f.callErrors, f.delay = map[string]error{}, 0
				check(t, "add again", a.Add(t.Context(), ip4))
				f.expect(t, ip4)
			})
		})
	}
}

func TestEndOfContextEndsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeSystem()
		f.delay = 5 * time.Second
		a := newProcess(t, f, filepath.Join(t.TempDir(), "state"))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := a.Add(ctx, ip4); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Add returned %v", err)
		}
		f.expect(t)
	})
}

func TestAddressesOfOtherProgramsAreNotChanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeSystem()
		f.addrs[ip4] = fakeAddress{on: "Ethernet"}
		// Another program has just added ip6 to our interface, so ip6 is not usable yet.
		f.addrs[ip6] = fakeAddress{on: nic, usable: time.Now().Add(time.Second)}
		a := newProcess(t, f, filepath.Join(t.TempDir(), "state"))
		for _, addr := range []netip.Addr{ip4, ip6} {
			check(t, "add", a.Add(t.Context(), addr))
			check(t, "remove", a.Remove(t.Context(), addr))
		}
		check(t, "clean up", a.Cleanup(t.Context()))
		f.expect(t, ip4, ip6)
		if len(f.calls) > 0 {
			t.Errorf("netsh was called: %q", f.calls)
		}
	})
}

func TestNextProcessRemovesAddressesOfKilledOne(t *testing.T) {
	f := newFakeSystem()
	f.addrs[netip.MustParseAddr("10.96.0.99")] = fakeAddress{on: nic}
	path := filepath.Join(t.TempDir(), "state")
	first := newProcess(t, f, path)
	for _, addr := range []netip.Addr{ip4, ip6, netip.MustParseAddr("10.96.0.11")} {
		check(t, "add", first.Add(t.Context(), addr))
	}
	check(t, "remove", first.Remove(t.Context(), ip6))
	f.addrs[ip6] = fakeAddress{on: nic} // now another program owns ip6

	second := newProcess(t, f, path)
	check(t, "clean up", second.Cleanup(t.Context()))
	f.expect(t, netip.MustParseAddr("10.96.0.99"), ip6)
	calls := len(f.calls)
	check(t, "clean up in a third", newProcess(t, f, path).Cleanup(t.Context()))
	if len(f.calls) != calls {
		t.Errorf("a third process cleaned up %q", f.calls[calls:])
	}
}

func TestFailedRemovalIsRetried(t *testing.T) {
	f := newFakeSystem()
	path := filepath.Join(t.TempDir(), "state")
	a := newProcess(t, f, path)
	check(t, "add", a.Add(t.Context(), ip4))
	f.callErrors["delete"] = errors.New("status 1")
	if err := a.Remove(t.Context(), ip4); err == nil {
		t.Error("Remove returned no error")
	}
	if err := newProcess(t, f, path).Cleanup(t.Context()); err == nil {
		t.Error("clean up returned no error")
	}
	delete(f.callErrors, "delete")
	check(t, "remove", a.Remove(t.Context(), ip4))
	f.expect(t)
}

func TestVanishedAddressesAreDropped(t *testing.T) {
	f := newFakeSystem()
	path := filepath.Join(t.TempDir(), "state")
	check(t, "add", newProcess(t, f, path).Add(t.Context(), ip4))
	clear(f.addrs) // Windows was restarted
	calls := len(f.calls)
	check(t, "clean up", newProcess(t, f, path).Cleanup(t.Context()))
	if len(f.calls) != calls {
		t.Errorf("netsh was called: %q", f.calls[calls:])
	}
}

func TestForeignStateFileIsNotOverwritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	const something = "[mysqld]\n"
	if err := os.WriteFile(path, []byte(something), 0o644); err != nil {
		t.Fatal(err)
	}
	f := newFakeSystem()
	a := newProcess(t, f, path)
	for what, err := range map[string]error{"Cleanup": a.Cleanup(t.Context()), "Add": a.Add(t.Context(), ip4)} {
		if err == nil || !strings.Contains(err.Error(), "[mysqld]") {
			t.Errorf("%s returned %v", what, err)
		}
	}
	if data, _ := os.ReadFile(path); string(data) != something {
		t.Errorf("the file was overwritten with %q", data)
	}
	f.expect(t)
}

func TestStateFileIsInDataFolder(t *testing.T) {
	data := t.TempDir()
	t.Setenv("ProgramData", data)
	a, err := New(nic, "")
	if err != nil {
		t.Fatal(err)
	}
	if want := filepath.Join(data, "kpng", "userspace.journal"); a.stateFile != want {
		t.Errorf("state file %s, want %s", a.stateFile, want)
	}
	t.Setenv("ProgramData", "")
	if _, err := New(nic, ""); err == nil {
		t.Error("no error without that folder")
	}
}
