// SPDX-License-Identifier: Apache-2.0

package diffstore_test

import (
	"context"
	"fmt"
	"maps"
	"strings"

	"github.com/kpng-project/kpng/diffstore"
)

func newStore() *diffstore.Store[string, string] {
	return diffstore.New(diffstore.Options[string, string]{
		Compare: strings.Compare,
		Equal:   func(a, b string) bool { return a == b },
	})
}

func printChanges(delta diffstore.Delta[string, string]) {
	for change := range delta.Changes() {
		if change.Deleted {
			fmt.Println("  delete", change.Key)
		} else {
			fmt.Println("  set", change.Key, change.Value)
		}
	}
}

func Example() {
	store := newStore()
	store.Set(0, "default/web", "10.0.0.1")
	store.Set(0, "default/db", "10.0.0.2")

	before := store.Snapshot()
	store.Delete(0, "default/db")
	store.Set(0, "default/web", "10.0.0.3")
	store.Set(0, "default/web", "10.0.0.4")

	changes, _ := store.Snapshot().Since(before.Revision())
	for change := range changes {
		fmt.Println(change.Key, change.Value, change.Deleted)
	}
	was, _ := before.Get("default/web")
	fmt.Println("a snapshot never changes:", was)

	// Output:
	// default/db  true
	// default/web 10.0.0.4 false
	// a snapshot never changes: 10.0.0.1
}

// Two watches fill one store. A relist by one of them leaves what the other wrote alone.
func ExampleStore_Replace() {
	store := newStore()
	store.Replace(0, maps.All(map[string]string{"a": "1", "b": "1", "c": "1"}))
	store.Replace(1, maps.All(map[string]string{"x": "1"}))

	cursor := store.NewCursor()
	defer cursor.Close()
	cursor.Advance(store.Snapshot())

	recorded := store.Replace(0, maps.All(map[string]string{"a": "1", "b": "2"}))
	fmt.Println(recorded, "changes")
	printChanges(cursor.Until(store.Snapshot()))

	// Output:
	// 2 changes
	//   delete c
	//   set b 2
}

// A mirror holds a copy of the store.
func ExampleCursor() {
	store := newStore()
	store.Set(0, "a", "1")

	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	mirror := map[string]string{}
	cursor := store.NewCursor()
	defer cursor.Close()
	for {
		delta := cursor.Until(store.Snapshot())
		if delta.Full() {
			clear(mirror)
		}
		for change := range delta.Changes() {
			if change.Deleted {
				delete(mirror, change.Key)
			} else {
				mirror[change.Key] = change.Value
			}
		}
		cursor.Advance(delta.New)
		fmt.Println(mirror)

		if len(mirror) == 2 {
			stop()
		} else {
			store.Set(0, "b", "2") // as another goroutine may at any time
		}
		if err := store.Wait(ctx, delta.New.Revision()); err != nil {
			fmt.Println(err)
			return
		}
	}

	// Output:
	// map[a:1]
	// map[a:1 b:2]
	// waiting for a change after revision 2: context canceled
}

// A feed computes something of the state before and after, only for the keys that changed.
func ExampleDelta() {
	store := newStore()
	store.Replace(0, maps.All(map[string]string{"a": "one", "b": "two"}))
	cursor := store.NewCursor()
	defer cursor.Close()
	cursor.Advance(store.Snapshot())

	store.Set(0, "a", "three")
	store.Delete(0, "b")

	delta := cursor.Until(store.Snapshot())
	for change := range delta.Changes() {
		before, _ := delta.Old.Get(change.Key)
		after, _ := delta.New.Get(change.Key)
		fmt.Println(change.Key, len(before), "->", len(after))
	}
	cursor.Advance(delta.New)

	// Output:
	// a 3 -> 5
	// b 3 -> 0
}

// kernel stands for a dataplane that is programmed element by element.
type kernel map[string]string

func (k kernel) apply(delta diffstore.Delta[string, string]) {
	for change := range delta.Changes() {
		if change.Deleted {
			delete(k, change.Key)
		} else {
			k[change.Key] = change.Value
		}
	}
}

// A backend keeps what it wants in a store, and what it has programmed as the position of a cursor. The cursor begins at what
// an earlier run left in the kernel, so that even the first, full synchronisation is a minimal difference.
func Example_desiredAgainstProgrammed() {
	kernel := kernel{"10.0.0.1:80": "10.1.0.1", "10.0.0.9:80": "10.1.0.9"}

	desired := newStore()
	desired.Replace(0, maps.All(kernel))
	programmed := desired.NewCursor()
	defer programmed.Close()
	programmed.Advance(desired.Snapshot())

	sync := func(frontends map[string]string) {
		desired.Replace(0, maps.All(frontends))
		delta := programmed.Until(desired.Snapshot())
		fmt.Println("sync")
		printChanges(delta)
		kernel.apply(delta)
		programmed.Advance(delta.New) // left out if the kernel refuses: the difference comes again
	}
	sync(map[string]string{"10.0.0.1:80": "10.1.0.1", "10.0.0.2:80": "10.1.0.2"})
	sync(map[string]string{"10.0.0.1:80": "10.1.0.3", "10.0.0.2:80": "10.1.0.2"})
	sync(map[string]string{"10.0.0.1:80": "10.1.0.3", "10.0.0.2:80": "10.1.0.2"})
	fmt.Println(kernel)

	// Output:
	// sync
	//   delete 10.0.0.9:80
	//   set 10.0.0.2:80 10.1.0.2
	// sync
	//   set 10.0.0.1:80 10.1.0.3
	// sync
	// map[10.0.0.1:80:10.1.0.3 10.0.0.2:80:10.1.0.2]
}
