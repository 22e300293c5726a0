// SPDX-License-Identifier: Apache-2.0

package diffstore_test

import (
	"fmt"
	"maps"
	"strings"

	"github.com/kpng-project/kpng/diffstore"
)

func newStore() *diffstore.Store[string, string] {
	return diffstore.New(diffstore.Options[string, string]{
		Compare:   strings.Compare,
		Equal:     func(a, b string) bool { return a == b },
		Resumable: true,
	})
}

func printChanges(delta diffstore.Delta[string, string]) {
	for change := range delta.Changes() {
		fmt.Printf("  %s: %q -> %q\n", change.Key, change.Old, change.New)
	}
}

// A reader resumes from a revision. Between reads it needs no snapshot and no cursor.
func Example() {
	store := newStore()
	store.Set("default/web", "10.0.0.1")
	store.Set("default/db", "10.0.0.2")

	before := store.Snapshot()
	store.Delete("default/db")
	store.Set("default/web", "10.0.0.3")
	store.Set("default/web", "10.0.0.4")

	changes, _ := store.Snapshot().Since(before.Revision())
	for key, value := range changes {
		fmt.Printf("%s is %q\n", key, value)
	}
	was, _ := before.Get("default/web")
	fmt.Println("a snapshot never changes:", was)

	// Output:
	// default/db is ""
	// default/web is "10.0.0.4"
	// a snapshot never changes: 10.0.0.1
}

// Replace changes only the entries that differ from the full listing.
func ExampleStore_Replace() {
	store := newStore()
	store.Replace(maps.All(map[string]string{"a": "1", "b": "1", "c": "1"}))

	cursor := store.NewCursor()
	defer cursor.Close()
	cursor.Advance(store.Snapshot())

	recorded := store.Replace(maps.All(map[string]string{"a": "1", "b": "2"}))
	fmt.Println(recorded, "changes")
	printChanges(cursor.Until(store.Snapshot()))

	// Output:
	// 2 changes
	//   b: "1" -> "2"
	//   c: "1" -> ""
}

// A mirror holds a copy of the store.
func ExampleCursor() {
	store := newStore()
	store.Set("a", "1")

	mirror := map[string]string{}
	cursor := store.NewCursor()
	defer cursor.Close()
	for range 2 { // a real reader waits for the writer's signal here
		delta := cursor.Until(store.Snapshot())
		if delta.Full() {
			clear(mirror)
		}
		for change := range delta.Changes() {
			if change.New == "" { // deleted, because no value in this store is empty
				delete(mirror, change.Key)
			} else {
				mirror[change.Key] = change.New
			}
		}
		cursor.Advance(delta.New)
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

func (k kernel) apply(delta diffstore.Delta[string, string]) {
	for change := range delta.Changes() {
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
		delta := programmed.Until(desired.Snapshot())
		fmt.Println("sync")
		printChanges(delta)
		kernel.apply(delta)
		programmed.Advance(delta.New) // if the kernel fails, do not call Advance: then the next delta repeats the changes
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
