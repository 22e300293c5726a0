// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/node/nodeaddr"
)

type fakeAddresses struct {
	// Add first calls onAdd. Remove first calls onRemove.
	onAdd, onRemove func() error

	mu    sync.Mutex
	there []netip.Addr
	// leftovers has the addresses that an earlier process made local.
	leftovers []netip.Addr
	leftErr   error
}

func newFakeAddresses() *fakeAddresses {
	nothing := func() error { return nil }
	return &fakeAddresses{onAdd: nothing, onRemove: nothing}
}

func (f *fakeAddresses) Add(_ context.Context, addr netip.Addr) error {
	err := f.onAdd()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.there = append(f.there, addr) // the address is added even if err is not nil
	return err
}

func (f *fakeAddresses) Remove(_ context.Context, addr netip.Addr) error {
	if err := f.onRemove(); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.there = slices.DeleteFunc(f.there, func(a netip.Addr) bool { return a == addr })
	return nil
}

func (f *fakeAddresses) Left(context.Context) ([]netip.Addr, error) { return f.leftovers, f.leftErr }

func (f *fakeAddresses) Cleanup(context.Context) error { return nil }

// barrier returns a function that blocks until it has been called n times.
func barrier(n int) func() error {
	var all sync.WaitGroup
	all.Add(n)
	return func() error {
		all.Done()
		gathered := make(chan struct{})
		go func() {
			defer close(gathered)
			all.Wait()
		}()
		select {
		case <-gathered:
			return nil
		case <-time.After(patience):
			return errors.New("the other calls do not begin")
		}
	}
}

func TestUnneededAddressesOfEarlierProcessAreRemoved(t *testing.T) {
	f := newFakeAddresses()
	needed, needless := netip.MustParseAddr("192.0.2.0"), netip.MustParseAddr("198.51.100.1")
	f.leftovers, f.there = []netip.Addr{needed, needless}, []netip.Addr{needed, needless}
	f.onAdd = func() error { return errors.New("added again") }
	b, err := newBackend(settings{Options: Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}}, addresses: f})
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := b.local.sweep(t.Context()); err != nil || !slices.Contains(f.there, needless) {
		t.Errorf("before the end of the first pass: addresses %v, error %v", f.there, err)
	}
	if err := b.Sync(t.Context(), fullOf(unusableServices(1)...)); err != nil {
		t.Error(err)
	}
	if !slices.Equal(f.there, []netip.Addr{needed}) {
		t.Errorf("after the first pass: addresses %v, want %s", f.there, needed)
	}
	if err := b.Stop(context.Background()); err != nil || len(f.there) > 0 {
		t.Errorf("at the end: addresses %v, error %v", f.there, err)
	}
}

// unusableServices returns one service per address. The first address is 192.0.2.0. The
// ports of these services have no usable endpoints, so the backend opens no listeners.
func unusableServices(addresses int) []*api.View {
	var views []*api.View
	for i := range addresses {
		views = append(views, serviceAt(fmt.Sprint("web", i), fmt.Sprintf("192.0.2.%d", i), 80, api.TCP).markUnusable().view())
	}
	return views
}

func TestAddressesChangeConcurrently(t *testing.T) {
	const addresses = 40
	f := newFakeAddresses()
	f.onAdd, f.onRemove = barrier(addresses), barrier(addresses)
	b, err := newBackend(settings{Options: Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}}, addresses: f})
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := b.Sync(t.Context(), fullOf(unusableServices(addresses)...)); err != nil {
		t.Error(err)
	}
	if err := b.Stop(context.Background()); err != nil {
		t.Error(err)
	}
	if len(f.there) > 0 {
		t.Errorf("at the end: addresses %v", f.there)
	}
}

func TestSlowAddressDelaysOnlyItsListeners(t *testing.T) {
	f := newFakeAddresses()
	begun, end := make(chan struct{}), make(chan struct{})
	f.onAdd = func() error {
		close(begun)
		<-end
		return nil
	}
	w := newWorld(t, settings{addresses: f})
	w.source.Set(unusableServices(1)...)
	<-begun
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.allStats()
		w.startsHere(netip.MustParseAddr("198.51.100.1"))
	}()
	select {
	case <-done:
	case <-time.After(patience):
		t.Error("statistics or a new connection wait for an address")
	}
	close(end)
	<-done
	w.applied()
}

func TestAddressIsRemovedAfterFailedAdd(t *testing.T) {
	f := newFakeAddresses()
	r := newReferences(f)
	addr := netip.MustParseAddr("192.0.2.1")
	f.onAdd = func() error { return errors.New("status 1") }
	if err := r.acquire(t.Context(), addr); err == nil {
		t.Error("no error")
	}
	f.onRemove = func() error { return errors.New("status 2") }
	if err := r.sweep(t.Context()); err == nil {
		t.Error("no error of the removal")
	}
	f.onRemove = func() error { return nil }
	if err := r.sweep(t.Context()); err != nil || len(f.there) > 0 {
		t.Errorf("after a retry: addresses %v, error %v", f.there, err)
	}
}
