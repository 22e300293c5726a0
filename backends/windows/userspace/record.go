// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// record is the file in which the addresses that have been added stand, so that
// they are known after a crash. Each line says that an address is about to be put
// on an interface, or that it has been removed:
//
//	add 10.96.0.10 vEthernet (HNS Internal NIC)
//	removed 10.96.0.10
//
// So a change costs the same however many addresses there are. Windows forgets the
// addresses when it stops, so the file needs not survive that. It is safe for
// concurrent use.
type record struct {
	path string

	mu sync.Mutex
	// interfaces has the interface of each address; nil until it is loaded.
	interfaces map[netip.Addr]string
	// lines is how many the file has. It is written anew when it has many more than
	// there are addresses, or if a line may have been written by half.
	lines int
	torn  bool
}

// load reads the file, the first time, and leaves of it what still holds.
func (r *record) load() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.interfaces != nil {
		return nil
	}
	data, err := os.ReadFile(r.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("reading which addresses were added: %w", err)
	}
	interfaces := map[netip.Addr]string{}
	for line := range strings.Lines(string(data)) {
		what, whole := strings.CutSuffix(line, "\n")
		if !whole {
			break // whoever wrote it was killed before anything else
		}
		verb, what, _ := strings.Cut(what, " ")
		text, on, _ := strings.Cut(what, " ")
		addr, err := netip.ParseAddr(text)
		switch {
		case err == nil && verb == "add" && on != "":
			interfaces[addr] = on
		case err == nil && verb == "removed" && on == "":
			delete(interfaces, addr)
		default:
			return fmt.Errorf("%s is not a file of addresses that were added: it has the line %q", r.path, line)
		}
	}
	if err := r.replace(interfaces); err != nil {
		return fmt.Errorf("writing which addresses were added: %w", err)
	}
	r.interfaces = interfaces
	return nil
}

// replace writes the file anew.
func (r *record) replace(interfaces map[netip.Addr]string) error {
	var content strings.Builder
	for addr, on := range interfaces {
		fmt.Fprintf(&content, "add %s %s\n", addr, on)
	}
	if err := os.MkdirAll(filepath.Dir(r.path), 0o755); err != nil {
		return err
	}
	next := r.path + ".new"
	if err := os.WriteFile(next, []byte(content.String()), 0o644); err != nil {
		return err
	}
	if err := os.Rename(next, r.path); err != nil {
		return err
	}
	r.lines, r.torn = len(interfaces), false
	return nil
}

// on returns the interface that addr was put on, if it was.
func (r *record) on(addr netip.Addr) (string, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	on, ours := r.interfaces[addr]
	return on, ours
}

// addresses returns those that were added.
func (r *record) addresses() []netip.Addr {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Keys(r.interfaces))
}

// add notes that addr is about to be put on an interface.
func (r *record) add(addr netip.Addr, on string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.append(fmt.Sprintf("add %s %s\n", addr, on)); err != nil {
		return err
	}
	r.interfaces[addr] = on
	return nil
}

// remove notes that addr has been removed.
func (r *record) remove(addr netip.Addr) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.append(fmt.Sprintf("removed %s\n", addr)); err != nil {
		return err
	}
	delete(r.interfaces, addr)
	return nil
}

// append adds a line. The caller holds the lock.
func (r *record) append(line string) error {
	err := r.tidy()
	if err == nil {
		err = appendTo(r.path, line)
		r.torn = err != nil
		r.lines++
	}
	if err != nil {
		return fmt.Errorf("writing which addresses were added: %w", err)
	}
	return nil
}

// tidy writes the file anew if need be.
func (r *record) tidy() error {
	if !r.torn && r.lines < 1000+2*len(r.interfaces) {
		return nil
	}
	return r.replace(r.interfaces)
}

func appendTo(path, line string) error {
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = f.WriteString(line)
	return errors.Join(err, f.Close())
}
