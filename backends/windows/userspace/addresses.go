// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/kpng-project/kpng/backends/userspace"
	"k8s.io/klog/v2"
)

const (
	// InterfaceVariable is the environment variable with the default of
	// Options.Interface.
	InterfaceVariable = "INTERFACE_TO_ADD_SERVICE_IP"
	// DefaultInterface is that where neither says another one.
	DefaultInterface = "vEthernet (HNS Internal NIC)"
)

// Options are the settings of Addresses. The zero value is useful on Windows.
type Options struct {
	// Interface is the name of the network interface that addresses are put on.
	// Default: the environment variable InterfaceVariable, and without it
	// DefaultInterface.
	Interface string
	// StateFile is where the addresses that have been added are written down; its
	// folder is made if need be. Two proxies on one host need different ones.
	// Default: kpng\userspace.addresses in the folder %ProgramData%.
	StateFile string
	// Timeout is how long adding an address may take until sockets can be bound to
	// it. Windows looks for others that have it first, for about three seconds
	// unless the interface is told not to (dadtransmits=0). Default 10 s.
	Timeout time.Duration
}

// Addresses puts addresses on a network interface. Its methods may be called at
// the same time for different addresses, which then wait together until they can
// be used; Cleanup is called alone.
type Addresses struct {
	opts   Options
	system system
	record record
	// running has room for as many calls of netsh as there may be at once: each is
	// a process.
	running chan struct{}
}

var _ userspace.Addresses = (*Addresses)(nil)

// New returns Addresses that nothing has been done for yet. It fails if the
// options make no sense.
func New(opts Options) (*Addresses, error) { return newAddresses(opts, host{}) }

func newAddresses(opts Options, s system) (*Addresses, error) {
	opts.Interface = cmp.Or(opts.Interface, os.Getenv(InterfaceVariable), DefaultInterface)
	if opts.StateFile == "" {
		data := os.Getenv("ProgramData")
		if data == "" {
			return nil, errors.New("no state file is given, and %ProgramData%, where it would be, is not set")
		}
		opts.StateFile = filepath.Join(data, "kpng", "userspace.addresses")
	}
	if opts.Timeout < 0 {
		return nil, fmt.Errorf("timeout %v: negative", opts.Timeout)
	}
	opts.Timeout = cmp.Or(opts.Timeout, 10*time.Second)
	return &Addresses{opts: opts, system: s, record: record{path: opts.StateFile}, running: make(chan struct{}, 4)}, nil
}

// Interface returns the name of the network interface that addresses are put on.
func (a *Addresses) Interface() string { return a.opts.Interface }

// Add implements userspace.Addresses.
func (a *Addresses) Add(ctx context.Context, addr netip.Addr) error {
	if err := a.record.load(); err != nil {
		return err
	}
	if a.system.usable(addr) {
		return nil
	}
	there, err := a.system.has(a.opts.Interface, addr)
	if err != nil {
		return err
	}
	if !there {
		if err := a.put(ctx, addr); err != nil {
			return err
		}
	}
	if err := a.wait(ctx, addr); err != nil {
		// Who asked takes it as not added, and does not ask for its removal.
		return errors.Join(err, a.Remove(context.WithoutCancel(ctx), addr))
	}
	klog.FromContext(ctx).V(4).Info("Added address", "address", addr, "interface", a.opts.Interface, "existed", there)
	return nil
}

// put adds an address that is not there.
func (a *Addresses) put(ctx context.Context, addr netip.Addr) error {
	if err := a.record.add(addr, a.opts.Interface); err != nil {
		return err
	}
	if err := a.netsh(ctx, addArguments(a.opts.Interface, addr)...); err != nil {
		// It may have come all the same.
		return errors.Join(fmt.Errorf("adding %s to interface %q: %w", addr, a.opts.Interface, err), a.Remove(context.WithoutCancel(ctx), addr))
	}
	return nil
}

// wait waits until sockets can be bound to addr.
func (a *Addresses) wait(ctx context.Context, addr netip.Addr) error {
	late := time.NewTimer(a.opts.Timeout)
	defer late.Stop()
	for pause := 5 * time.Millisecond; !a.system.usable(addr); pause = min(2*pause, 200*time.Millisecond) {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-late.C:
			return fmt.Errorf("%s is on interface %q but cannot be used after %v", addr, a.opts.Interface, a.opts.Timeout)
		case <-time.After(pause):
		}
	}
	return nil
}

// Remove implements userspace.Addresses.
func (a *Addresses) Remove(ctx context.Context, addr netip.Addr) error {
	if err := a.record.load(); err != nil {
		return err
	}
	on, ours := a.record.on(addr)
	if !ours {
		return nil
	}
	there, err := a.system.has(on, addr)
	if err != nil {
		return err
	}
	if there {
		if err := a.netsh(ctx, deleteArguments(on, addr)...); err != nil {
			return fmt.Errorf("deleting %s from interface %q: %w", addr, on, err)
		}
		klog.FromContext(ctx).V(4).Info("Removed address", "address", addr, "interface", on)
	}
	return a.record.remove(addr)
}

// Cleanup implements userspace.Addresses.
func (a *Addresses) Cleanup(ctx context.Context) error {
	if err := a.record.load(); err != nil {
		return err
	}
	left := a.record.addresses()
	klog.FromContext(ctx).V(2).Info("Removing addresses that were left behind", "addresses", len(left), "stateFile", a.opts.StateFile)
	errs := make([]error, len(left))
	var all sync.WaitGroup
	for i, addr := range left {
		all.Go(func() { errs[i] = a.Remove(ctx, addr) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// netsh calls netsh when there is room for another.
func (a *Addresses) netsh(ctx context.Context, args ...string) error {
	select {
	case a.running <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { <-a.running }()
	return a.system.netsh(ctx, args...)
}

func addArguments(on string, addr netip.Addr) []string {
	// Without a mask, Windows would take all of 10.0.0.0/8 for near.
	args := []string{"interface", "ipv4", "add", "address", "name=" + on, "address=" + addr.String(), "mask=255.255.255.255"}
	if addr.Is6() {
		args = []string{"interface", "ipv6", "add", "address", "interface=" + on, "address=" + addr.String() + "/128"}
	}
	return append(args, "store=active", "skipassource=true")
}

func deleteArguments(on string, addr netip.Addr) []string {
	if addr.Is6() {
		return []string{"interface", "ipv6", "delete", "address", "interface=" + on, "address=" + addr.String(), "store=active"}
	}
	return []string{"interface", "ipv4", "delete", "address", "name=" + on, "address=" + addr.String(), "store=active"}
}
