// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
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

// fakeSystem is a Windows whose interfaces are in memory.
type fakeSystem struct {
	mu sync.Mutex
	// addresses has the interface of each address, and when it can be used.
	addresses map[netip.Addr]fakeAddress
	// delay is how long an address that was added cannot be used.
	delay time.Duration
	// fails says how netsh fails, by the verb add or delete; what it was asked
	// for is done nevertheless if does says so.
	fails map[string]error
	does  bool
	calls []string
}

type fakeAddress struct {
	on     string
	usable time.Time
}

func newFakeSystem() *fakeSystem {
	return &fakeSystem{addresses: map[netip.Addr]fakeAddress{}, fails: map[string]error{}}
}

func (f *fakeSystem) netsh(_ context.Context, args ...string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, strings.Join(args, " "))
	verb := args[2]
	if err := f.fails[verb]; err != nil && !f.does {
		return err
	}
	_, on, _ := strings.Cut(args[4], "=")
	_, text, _ := strings.Cut(args[5], "=")
	addr := netip.MustParseAddr(strings.TrimSuffix(text, "/128"))
	if verb == "add" {
		f.addresses[addr] = fakeAddress{on, time.Now().Add(f.delay)}
	} else {
		delete(f.addresses, addr)
	}
	return f.fails[verb]
}

func (f *fakeSystem) usable(addr netip.Addr) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	a, ok := f.addresses[addr]
	return ok && !time.Now().Before(a.usable)
}

func (f *fakeSystem) has(name string, addr netip.Addr) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.addresses[addr].on == name, nil
}

func (f *fakeSystem) expect(t *testing.T, want ...netip.Addr) {
	t.Helper()
	got := slices.SortedFunc(maps.Keys(f.addresses), netip.Addr.Compare)
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Errorf("addresses of the host (-want +got):\n%s", diff)
	}
}

// process returns Addresses as a process that has just started has them.
func process(t *testing.T, f *fakeSystem, path string) *Addresses {
	t.Helper()
	a, err := newAddresses(Options{StateFile: path, Interface: nic}, f)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func check(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Errorf("%s: %v", what, err)
	}
}

func TestNetshIsCalledWithAllThatMatters(t *testing.T) {
	f := newFakeSystem()
	a := process(t, f, filepath.Join(t.TempDir(), "kpng", "state"))
	for _, addr := range []netip.Addr{ip4, ip6} {
		check(t, "add", a.Add(t.Context(), addr))
	}
	f.expect(t, ip4, ip6)
	for _, addr := range []netip.Addr{ip4, ip6} {
		check(t, "remove", a.Remove(t.Context(), addr))
	}
	f.expect(t)
	if diff := cmp.Diff([]string{
		"interface ipv4 add address name=" + nic + " address=10.96.0.10 mask=255.255.255.255 store=active skipassource=true",
		"interface ipv6 add address interface=" + nic + " address=fd00:10:96::a/128 store=active skipassource=true",
		"interface ipv4 delete address name=" + nic + " address=10.96.0.10 store=active",
		"interface ipv6 delete address interface=" + nic + " address=fd00:10:96::a store=active",
	}, f.calls); diff != "" {
		t.Errorf("calls of netsh (-want +got):\n%s", diff)
	}
}

func TestAddReturnsWhenTheAddressCanBeUsed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeSystem()
		f.delay = 3 * time.Second
		a := process(t, f, filepath.Join(t.TempDir(), "state"))
		start := time.Now()
		check(t, "add", a.Add(t.Context(), ip4))
		if took := time.Since(start); took < f.delay || took > f.delay+200*time.Millisecond {
			t.Errorf("it returned after %v, and the address can be used after %v", took, f.delay)
		}
	})
}

func TestAddressesAreWaitedForTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeSystem()
		f.delay = 3 * time.Second
		a := process(t, f, filepath.Join(t.TempDir(), "state"))
		start := time.Now()
		var all sync.WaitGroup
		for i := range 40 {
			all.Go(func() { check(t, "add", a.Add(t.Context(), netip.AddrFrom4([4]byte{10, 96, 1, byte(i)}))) })
		}
		all.Wait()
		if took := time.Since(start); took > f.delay+200*time.Millisecond {
			t.Errorf("40 of them took %v, and each can be used after %v", took, f.delay)
		}
		check(t, "clean up", a.Cleanup(t.Context()))
		f.expect(t)
	})
}

func TestAnAddressThatCannotBeAddedIsTakenBack(t *testing.T) {
	for _, test := range []struct {
		name  string
		when  func(*fakeSystem)
		wants string
	}{
		{"netsh fails", func(f *fakeSystem) { f.fails["add"] = errors.New("status 1") }, "status 1"},
		{"netsh fails after it has added it", func(f *fakeSystem) { f.fails["add"], f.does = errors.New("status 1"), true }, "status 1"},
		{"it cannot be used in time", func(f *fakeSystem) { f.delay = time.Minute }, "cannot be used after 10s"},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFakeSystem()
				path := filepath.Join(t.TempDir(), "state")
				a := process(t, f, path)
				test.when(f)
				if err := a.Add(t.Context(), ip4); err == nil || !strings.Contains(err.Error(), test.wants) {
					t.Errorf("add returned %v, want an error about %q", err, test.wants)
				}
				f.expect(t)
				f.fails, f.delay = map[string]error{}, 0
				check(t, "add again", a.Add(t.Context(), ip4))
				f.expect(t, ip4)
			})
		})
	}
}

func TestAnEndedContextEndsTheWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeSystem()
		f.delay = 5 * time.Second
		a := process(t, f, filepath.Join(t.TempDir(), "state"))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := a.Add(ctx, ip4); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("add returned %v", err)
		}
		f.expect(t)
	})
}

func TestAddressesOfOthersAreLeftAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeSystem()
		f.addresses[ip4] = fakeAddress{on: "Ethernet"}
		// Somebody has just added it where ours go.
		f.addresses[ip6] = fakeAddress{on: nic, usable: time.Now().Add(time.Second)}
		a := process(t, f, filepath.Join(t.TempDir(), "state"))
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

func TestWhatAKilledProcessAddedIsRemovedByTheNext(t *testing.T) {
	f := newFakeSystem()
	f.addresses[netip.MustParseAddr("10.96.0.99")] = fakeAddress{on: nic}
	path := filepath.Join(t.TempDir(), "state")
	first := process(t, f, path)
	for _, addr := range []netip.Addr{ip4, ip6, netip.MustParseAddr("10.96.0.11")} {
		check(t, "add", first.Add(t.Context(), addr))
	}
	check(t, "remove", first.Remove(t.Context(), ip6))
	f.addresses[ip6] = fakeAddress{on: nic} // now it is somebody else's

	second := process(t, f, path)
	check(t, "clean up", second.Cleanup(t.Context()))
	f.expect(t, netip.MustParseAddr("10.96.0.99"), ip6)
	calls := len(f.calls)
	check(t, "clean up in a third", process(t, f, path).Cleanup(t.Context()))
	if len(f.calls) != calls {
		t.Errorf("a third process had something to clean up: %q", f.calls[calls:])
	}
}

func TestAnAddressThatCannotBeRemovedIsTriedAgain(t *testing.T) {
	f := newFakeSystem()
	path := filepath.Join(t.TempDir(), "state")
	a := process(t, f, path)
	check(t, "add", a.Add(t.Context(), ip4))
	f.fails["delete"] = errors.New("status 1")
	if err := a.Remove(t.Context(), ip4); err == nil {
		t.Error("remove returned no error")
	}
	if err := process(t, f, path).Cleanup(t.Context()); err == nil {
		t.Error("clean up returned no error")
	}
	delete(f.fails, "delete")
	check(t, "remove", a.Remove(t.Context(), ip4))
	f.expect(t)
}

func TestAddressesThatWentByThemselvesAreForgotten(t *testing.T) {
	f := newFakeSystem()
	path := filepath.Join(t.TempDir(), "state")
	check(t, "add", process(t, f, path).Add(t.Context(), ip4))
	clear(f.addresses) // Windows was restarted
	calls := len(f.calls)
	check(t, "clean up", process(t, f, path).Cleanup(t.Context()))
	if len(f.calls) != calls {
		t.Errorf("netsh was called: %q", f.calls[calls:])
	}
}

func TestAHalfWrittenLineCountsForNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	f := newFakeSystem()
	f.addresses[ip4], f.addresses[ip6] = fakeAddress{on: nic}, fakeAddress{on: nic}
	write("add 10.96.0.10 " + nic + "\nadd fd00:10:96::a vEther")
	check(t, "clean up", process(t, f, path).Cleanup(t.Context()))
	f.expect(t, ip6)

	write("[mysqld]\n")
	if err := process(t, f, path).Cleanup(t.Context()); err == nil || !strings.Contains(err.Error(), "[mysqld]") {
		t.Errorf("of a file of others, cleaning up returned %v", err)
	}
	if data, _ := os.ReadFile(path); string(data) != "[mysqld]\n" {
		t.Errorf("it was overwritten with %q", data)
	}
}

func TestALineAfterAHalfWrittenOneIsWhole(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	r := record{path: path}
	check(t, "load", r.load())
	check(t, "add", r.add(ip4, nic))
	check(t, "write half a line", appendTo(path, "add 10.96"))
	r.torn = true // as after the error that came with it
	check(t, "add", r.add(ip6, nic))
	next := record{path: path}
	check(t, "load", next.load())
	if want := map[netip.Addr]string{ip4: nic, ip6: nic}; !maps.Equal(next.interfaces, want) {
		t.Errorf("the next process reads %v, want %v", next.interfaces, want)
	}
}

func TestTheStateFileDoesNotGrowForEver(t *testing.T) {
	r := record{path: filepath.Join(t.TempDir(), "state")}
	check(t, "load", r.load())
	for range 2000 {
		check(t, "add", r.add(ip4, nic))
		check(t, "remove", r.remove(ip4))
	}
	data, err := os.ReadFile(r.path)
	if lines := strings.Count(string(data), "\n"); err != nil || lines > 1100 {
		t.Errorf("of 4000 changes to one address the file has %d lines, error %v", lines, err)
	}
}

func TestTheInterfaceIsThatOfTheOptionsOrTheEnvironment(t *testing.T) {
	for _, test := range []struct{ name, option, variable, want string }{
		{"nothing is said", "", "", DefaultInterface},
		{"the environment names one", "", "Ethernet 2", "Ethernet 2"},
		{"the option comes first", "Ethernet 3", "Ethernet 2", "Ethernet 3"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv(InterfaceVariable, test.variable)
			a, err := New(Options{Interface: test.option, StateFile: "state"})
			if err != nil {
				t.Fatal(err)
			}
			if a.opts.Interface != test.want {
				t.Errorf("it is %q, want %q", a.opts.Interface, test.want)
			}
		})
	}
}

func TestTheStateFileIsInTheFolderForData(t *testing.T) {
	data := t.TempDir()
	t.Setenv("ProgramData", data)
	a, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	if want := filepath.Join(data, "kpng", "userspace.addresses"); a.opts.StateFile != want {
		t.Errorf("it is %s, want %s", a.opts.StateFile, want)
	}
	t.Setenv("ProgramData", "")
	if _, err := New(Options{}); err == nil {
		t.Error("without that folder there is no error")
	}
	if _, err := New(Options{StateFile: "state", Timeout: -1}); err == nil {
		t.Error("a negative timeout is no error")
	}
}
