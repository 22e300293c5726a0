// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// table is a map in the kernel.
type table[K comparable, V any] interface {
	// set adds or replaces elements in order, and stops at the first failure. It returns the
	// number of elements that it has set.
	set(keys []K, values []V) (int, error)
	// delete deletes the elements with these keys. A missing element is no error.
	delete(keys []K) error
	// each calls f for every element that does not change meanwhile, and perhaps for
	// other elements. It ends early if ctx ends.
	each(ctx context.Context, f func(K, V)) error
}

// batch has elements to write.
type batch[K comparable, V any] struct {
	keys   []K
	values []V
}

func (b *batch[K, V]) add(k K, v V) {
	b.keys, b.values = append(b.keys, k), append(b.values, v)
}

// While the kernel refills its reserve of free elements, it refuses new elements with
// ENOMEM. Then setAll waits for memoryPause and tries again, at most memoryPauses times.
const (
	memoryPause  = time.Millisecond
	memoryPauses = 100
)

// setAll writes the elements of b. If the kernel refuses an element, setAll stores the
// error at the address that errOf returns. It skips elements for which an error is already
// stored there.
func setAll[K comparable, V any](t table[K, V], b batch[K, V], errOf func(K) *error) {
	for i, pauses := 0, 0; i < len(b.keys); {
		if *errOf(b.keys[i]) != nil {
			i++
			continue
		}
		n, err := t.set(b.keys[i:], b.values[i:])
		if i += n; err == nil || i == len(b.keys) {
			continue
		}
		if errors.Is(err, unix.ENOMEM) && pauses < memoryPauses {
			pauses++
			time.Sleep(memoryPause)
			continue
		}
		*errOf(b.keys[i]) = err
	}
}

// kernelTable is a map in the kernel, of type hash or LRU hash.
type kernelTable[K, V comparable] struct {
	name string
	m    *ebpf.Map
}

// maxBatch limits the elements of one system call. This limits the time for which the
// kernel holds locks, and the memory of a dump.
const maxBatch = 16384

func (t kernelTable[K, V]) set(keys []K, values []V) (done int, err error) {
	for done < len(keys) {
		end := min(done+maxBatch, len(keys))
		n, err := t.m.BatchUpdate(keys[done:end], values[done:end], nil)
		done += n
		if errors.Is(err, unix.E2BIG) {
			return done, fmt.Errorf("map %s is full with %d elements", t.name, t.m.MaxEntries())
		}
		if err != nil {
			return done, fmt.Errorf("write to map %s: %w", t.name, err)
		}
	}
	return done, nil
}

func (t kernelTable[K, V]) delete(keys []K) error {
	for len(keys) > 0 {
		n, err := t.m.BatchDelete(keys[:min(maxBatch, len(keys))], nil)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			n++ // the first n keys were deleted; skip the next key, which is missing
		} else if err != nil {
			return fmt.Errorf("delete from map %s: %w", t.name, err)
		}
		keys = keys[n:]
	}
	return nil
}

func (t kernelTable[K, V]) each(ctx context.Context, f func(K, V)) error {
	keys, values := make([]K, maxBatch), make([]V, maxBatch)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := t.m.BatchLookup(&cursor, keys, values, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("read map %s: %w", t.name, err)
		}
		for i := range n {
			f(keys[i], values[i])
		}
		if err != nil || ctx.Err() != nil { // the end of the map, or of ctx
			return context.Cause(ctx)
		}
	}
}

// replace makes t equal to the argument wanted. It writes only the differences.
func (t kernelTable[K, V]) replace(ctx context.Context, wanted map[K]V) error {
	missing := maps.Clone(wanted)
	var stale []K
	err := t.each(ctx, func(k K, is V) {
		if want, ok := wanted[k]; !ok {
			stale = append(stale, k)
		} else if want == is {
			delete(missing, k)
		}
	})
	if err != nil {
		return err
	}
	var added batch[K, V]
	for k, v := range missing {
		added.add(k, v)
	}
	err = t.delete(stale)
	_, setErr := t.set(added.keys, added.values)
	return errors.Join(err, setErr)
}
