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
	"sync"
	"time"

	"github.com/kpng-project/kpng/internal/journal"
	"github.com/kpng-project/kpng/internal/ownership"
	"k8s.io/klog/v2"
)

// timeout limits how long Add waits until sockets can bind to an address. Windows first
// checks for about three seconds whether another host has the address, unless dadtransmits
// is 0 on the interface.
const timeout = 10 * time.Second

// An Addresses value adds addresses to a network interface. Concurrent calls of Add and
// Remove are safe if their addresses are different. No other call may overlap a call of
// Left or Cleanup.
type Addresses struct {
	on        string // the name of the interface
	stateFile string
	system    system

	// recordMu guards the field record, which is nil before its first use. The record
	// contains the interface of each address that was added or is about to be added. The
	// file of the record need not survive a restart of Windows, because Windows then removes
	// the addresses.
	recordMu sync.Mutex
	record   *journal.Journal

	// lookMu guards the result of the last read of the interface.
	lookMu  sync.Mutex
	looked  time.Time
	has     map[netip.Addr]bool
	lookErr error
}

// New returns an Addresses value for the named interface. It records the added addresses
// in a state file. By default, the file is kpng\userspace.journal in the folder
// %ProgramData%. New does not change the host.
func New(on, stateFile string) (*Addresses, error) {
	if stateFile == "" {
		data := os.Getenv("ProgramData")
		if data == "" {
			return nil, errors.New("no state file given, and %ProgramData% is not set")
		}
		stateFile = filepath.Join(data, "kpng", "userspace.journal")
	}
	return &Addresses{on: on, stateFile: stateFile, system: newHost()}, nil
}

// Own takes the ownership of the addresses in the state file. If another process owns
// them, the error wraps sink.ErrOwned.
func (a *Addresses) Own(context.Context) (release func(), err error) {
	return ownership.File(a.stateFile)
}

// updateRecord calls f with the record and writes the changes that f made.
func (a *Addresses) updateRecord(f func(*journal.Journal)) error {
	a.recordMu.Lock()
	defer a.recordMu.Unlock()
	if a.record == nil {
		j, err := journal.Open(a.stateFile, "addresses")
		if err != nil {
			return err
		}
		a.record = j
	}
	f(a.record)
	return a.record.Write()
}

// Add uses a list of the interface's addresses. The list is at most maxLookAge old. So
// Add does not read the interface for each address of a Sync.
const maxLookAge = time.Second

// hasAddress reports whether the interface has an address. It reads the interface's
// addresses again unless the last read was after the given time.
func (a *Addresses) hasAddress(addr netip.Addr, since time.Time) (there bool, err error) {
	a.lookMu.Lock()
	defer a.lookMu.Unlock()
	if !a.looked.After(since) {
		a.looked = time.Now()
		a.has, a.lookErr = a.system.addresses(a.on)
	}
	return a.has[addr], a.lookErr
}

// isOn reports whether an interface has an address now. Concurrent calls for the
// interface a.on share one read of its addresses.
func (a *Addresses) isOn(on string, addr netip.Addr) (there bool, err error) {
	if on == a.on {
		return a.hasAddress(addr, time.Now())
	}
	has, err := a.system.addresses(on)
	return has[addr], err
}

// Add implements the interface addresses of package userspace.
func (a *Addresses) Add(ctx context.Context, addr netip.Addr) error {
	if a.system.usable(addr) {
		return nil
	}
	there, err := a.hasAddress(addr, time.Now().Add(-maxLookAge))
	if err != nil {
		return err
	}
	if !there {
		if err := a.addMissing(ctx, addr); err != nil {
			return err
		}
	}
	if err := a.wait(ctx, addr); err != nil {
		// Remove the address here, because the caller does not remove it after an error of Add.
		return errors.Join(err, a.Remove(context.WithoutCancel(ctx), addr))
	}
	klog.FromContext(ctx).V(4).Info("Added address", "address", addr, "interface", a.on, "existed", there)
	return nil
}

// addMissing adds an address that the interface does not have, and records it.
func (a *Addresses) addMissing(ctx context.Context, addr netip.Addr) error {
	if err := a.updateRecord(func(j *journal.Journal) { j.Set(addr.String(), a.on) }); err != nil {
		return err
	}
	err := a.system.add(ctx, a.on, addr)
	if err == nil {
		return nil
	}
	err = fmt.Errorf("add %s to interface %q: %w", addr, a.on, err)
	if there, lookErr := a.hasAddress(addr, time.Now()); lookErr == nil && !there {
		return errors.Join(err, a.forget(addr))
	}
	return errors.Join(err, a.Remove(context.WithoutCancel(ctx), addr)) // the address may have been added despite the error
}

// wait waits until sockets can bind to addr.
func (a *Addresses) wait(ctx context.Context, addr netip.Addr) error {
	late := time.NewTimer(timeout)
	defer late.Stop()
	for pause := 5 * time.Millisecond; !a.system.usable(addr); pause = min(2*pause, 200*time.Millisecond) {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-late.C:
			return fmt.Errorf("%s is on interface %q but cannot be used after %v", addr, a.on, timeout)
		case <-time.After(pause):
		}
	}
	return nil
}

// Remove implements the interface addresses of package userspace.
func (a *Addresses) Remove(ctx context.Context, addr netip.Addr) error {
	on, ours := "", false
	if err := a.updateRecord(func(j *journal.Journal) { on, ours = j.Get(addr.String()) }); err != nil || !ours {
		return err
	}
	if err := a.system.remove(ctx, on, addr); err != nil {
		there, lookErr := a.isOn(on, addr)
		if there || lookErr != nil && !errors.Is(lookErr, errNoInterface) {
			return fmt.Errorf("delete %s from interface %q: %w", addr, on, err)
		}
	}
	klog.FromContext(ctx).V(4).Info("Removed address", "address", addr, "interface", on)
	a.lookMu.Lock()
	delete(a.has, addr)
	a.lookMu.Unlock()
	return a.forget(addr)
}

func (a *Addresses) forget(addr netip.Addr) error {
	return a.updateRecord(func(j *journal.Journal) { j.Delete(addr.String()) })
}

// Left implements the interface addresses of package userspace.
func (a *Addresses) Left(context.Context) ([]netip.Addr, error) {
	recorded := map[string]string{}
	if err := a.updateRecord(func(j *journal.Journal) { recorded = maps.Collect(j.All()) }); err != nil {
		return nil, err
	}
	interfaces := map[string]map[netip.Addr]bool{}
	var left []netip.Addr
	for text, on := range recorded {
		addr, err := netip.ParseAddr(text)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", a.stateFile, err)
		}
		has, listed := interfaces[on]
		if !listed {
			if has, err = a.system.addresses(on); err != nil && !errors.Is(err, errNoInterface) {
				return nil, err
			}
			interfaces[on] = has
		}
		if has[addr] {
			left = append(left, addr)
		} else if err := a.forget(addr); err != nil { // not on the interface: a restart of Windows has removed it
			return nil, err
		}
	}
	return left, nil
}

// Cleanup implements the interface addresses of package userspace.
func (a *Addresses) Cleanup(ctx context.Context) error {
	left, err := a.Left(ctx)
	if err != nil {
		return err
	}
	klog.FromContext(ctx).V(2).Info("Removing addresses of an earlier process", "addresses", len(left), "stateFile", a.stateFile)
	errs := make([]error, len(left))
	var all sync.WaitGroup
	for i, addr := range left {
		all.Go(func() { errs[i] = a.Remove(ctx, addr) })
	}
	all.Wait()
	return errors.Join(errs...)
}
