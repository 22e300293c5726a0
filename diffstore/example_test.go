// SPDX-License-Identifier: Apache-2.0

package diffstore_test

import (
	"fmt"
	"iter"
	"maps"
	"strings"

	"github.com/kpng-project/kpng/diffstore"
)

func newStore() *diffstore.Store[string, string] {
	return diffstore.New(strings.Compare, func(a, b string) bool { return a == b })
}

func printChanges(changes iter.Seq[diffstore.Change[string, string]]) {
	for change := range changes {
		fmt.Printf("  %s: %q -> %q\n", change.Key, change.Old, change.New)
	}
}

// Replace changes only the entries that differ from the full listing.
func ExampleStore_Replace() {
	store := newStore()
	store.Replace(maps.All(map[string]string{"a": "1", "b": "1", "c": "1"}))
	before := store.Snapshot()

	cursor := store.NewCursor()
	defer cursor.Close()
	cursor.Advance(before)

	recorded := store.Replace(maps.All(map[string]string{"a": "1", "b": "2"}))
	fmt.Println(recorded, "changes")
	changes, _ := cursor.Until(store.Snapshot())
	printChanges(changes)
	was, _ := before.Get("b")
	fmt.Println("a snapshot never changes:", was)

	// Output:
	// 2 changes
	//   b: "1" -> "2"
	//   c: "1" -> ""
	// a snapshot never changes: 1
}

// A mirror holds a copy of the store.
func ExampleCursor() {
	store := newStore()
	store.Set("a", "1")

	mirror := map[string]string{}
	cursor := store.NewCursor()
	defer cursor.Close()
	for range 2 { // a real reader waits for the writer's signal here
		snapshot := store.Snapshot()
		changes, all := cursor.Until(snapshot)
		if all {
			clear(mirror)
		}
		for change := range changes {
			if change.New == "" { // deleted, because no value in this store is empty
				delete(mirror, change.Key)
			} else {
				mirror[change.Key] = change.New
			}
		}
		cursor.Advance(snapshot)
		fmt.Println(mirror)

		store.Delete("a")
		store.Set("b", "2")
	}

	// Output:
	// map[a:1]
	// map[b:2]
}

// kernel is a dataplane that is programmed entry by entry.
type kernel map[string]string

func (k kernel) apply(changes iter.Seq[diffstore.Change[string, string]]) {
	for change := range changes {
		if change.New == "" {
			delete(k, change.Key)
		} else {
			k[change.Key] = change.New
		}
	}
}

// A backend keeps its desired state in a store. The position of a cursor represents the
// programmed state. At first, this is the state that an earlier run left in the kernel.
// So even the first full synchronization programs only the differences.
func Example_desiredAgainstProgrammed() {
	kernel := kernel{"10.0.0.1:80": "10.1.0.1", "10.0.0.9:80": "10.1.0.9"}

	desired := newStore()
	desired.Replace(maps.All(kernel))
	programmed := desired.NewCursor()
	defer programmed.Close()
	programmed.Advance(desired.Snapshot())

	sync := func(frontends map[string]string) {
		desired.Replace(maps.All(frontends))
		snapshot := desired.Snapshot()
		changes, _ := programmed.Until(snapshot)
		fmt.Println("sync")
		printChanges(changes)
		kernel.apply(changes)
		programmed.Advance(snapshot) // if the kernel fails, do not call Advance: then the next call repeats the changes
	}
	sync(map[string]string{"10.0.0.1:80": "10.1.0.1", "10.0.0.2:80": "10.1.0.2"})
	sync(map[string]string{"10.0.0.1:80": "10.1.0.3", "10.0.0.2:80": "10.1.0.2"})
	sync(map[string]string{"10.0.0.1:80": "10.1.0.3", "10.0.0.2:80": "10.1.0.2"})
	fmt.Println(kernel)

	// Output:
	// sync
	//   10.0.0.2:80: "" -> "10.1.0.2"
	//   10.0.0.9:80: "10.1.0.9" -> ""
	// sync
	//   10.0.0.1:80: "10.1.0.1" -> "10.1.0.3"
	// sync
	// map[10.0.0.1:80:10.1.0.3 10.0.0.2:80:10.1.0.2]
}
