// SPDX-License-Identifier: Apache-2.0

package kernelspace

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"k8s.io/apimachinery/pkg/types"
)

// record remembers, in a file, which of the machine's load balancers are own
// ones, as HNS gives them no name to tell by. A load balancer is noted before it
// is made, by its frontend, and with its ID after: whenever the process is
// killed, what it made is found again, and nothing else.
type record struct {
	path    string // empty: in memory only
	entries map[Frontend]entry
	changed bool
}

// entry is an own load balancer.
type entry struct {
	// ID is empty if it was never seen to be made.
	ID string
	// Pending says that it is being made, in the place of ID if there is one.
	Pending bool `json:",omitempty"`
	// Service is whom it is for.
	Service types.NamespacedName

	// deleted says that HNS has said that it is deleted, which its next listing
	// has to confirm.
	deleted bool
}

// line is an entry in the file.
type line struct {
	Frontend
	entry
}

// readRecord reads the record of a file. One that does not exist is empty.
func readRecord(path string) (*record, error) {
	r := &record{path: path, entries: map[Frontend]entry{}}
	if path == "" {
		return r, nil
	}
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the record of load balancers: %w", err)
	}
	var lines []line
	if err := json.Unmarshal(data, &lines); err != nil {
		return nil, fmt.Errorf("read the record of load balancers, %s: %w", path, err)
	}
	for _, l := range lines {
		r.entries[l.Frontend] = l.entry
	}
	return r, nil
}

// owns reports whether the load balancer id at f is an own one.
func (r *record) owns(f Frontend, id string) bool {
	e, ok := r.entries[f]
	return ok && (e.Pending || e.ID == id)
}

// set notes an entry.
func (r *record) set(f Frontend, e entry) {
	if r.entries[f] != e {
		r.entries[f] = e
		r.changed = true
	}
}

// delete notes that HNS says that the load balancer of f is deleted.
func (r *record) delete(f Frontend) {
	if e, ok := r.entries[f]; ok {
		e.deleted = true
		r.entries[f] = e
	}
}

// confirm forgets the load balancers that were deleted and are not in a listing,
// and takes those that are for what they are.
func (r *record) confirm(have *holdings) {
	for f, e := range r.entries {
		if !e.deleted {
			continue
		}
		if id, ok := have.byFrontend[f]; ok && r.owns(f, id) {
			e.deleted = false
			r.entries[f] = e
		} else {
			r.forget(f)
		}
	}
}

// len returns how many load balancers there are.
func (r *record) len() int {
	n := 0
	for _, e := range r.entries {
		if !e.deleted {
			n++
		}
	}
	return n
}

// forget removes the entry of f.
func (r *record) forget(f Frontend) {
	if _, ok := r.entries[f]; ok {
		delete(r.entries, f)
		r.changed = true
	}
}

// save writes the file if there is something new.
func (r *record) save() error {
	if !r.changed || r.path == "" {
		return nil
	}
	lines := make([]line, 0, len(r.entries))
	for _, f := range slices.SortedFunc(maps.Keys(r.entries), compareFrontends) {
		lines = append(lines, line{f, r.entries[f]})
	}
	data, err := json.Marshal(lines)
	if err == nil {
		err = writeFile(r.path, data)
	}
	if err != nil {
		return fmt.Errorf("write the record of load balancers: %w", err)
	}
	r.changed = false
	return nil
}

// remove removes the file.
func (r *record) remove() error {
	clear(r.entries)
	if r.path == "" {
		return nil
	}
	if err := os.Remove(r.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the record of load balancers: %w", err)
	}
	return nil
}

// writeFile replaces a file so that it is there as a whole or as it was before,
// after a crash too.
func writeFile(path string, data []byte) (err error) {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if closed := f.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

func compareFrontends(a, b Frontend) int {
	switch {
	case a.VIP != b.VIP:
		return a.VIP.Compare(b.VIP)
	case a.Family != b.Family:
		return int(a.Family) - int(b.Family)
	case a.Protocol != b.Protocol:
		return int(a.Protocol) - int(b.Protocol)
	default:
		return int(a.Port) - int(b.Port)
	}
}
