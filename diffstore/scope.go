// SPDX-License-Identifier: Apache-2.0

package diffstore

// Scope names a writer of a [Store], such as one of several watches. Each entry belongs to the scope that wrote it last.
//
// Scope 0 is meant for the main writer, the one that owns most entries: those of other scopes are indexed, which costs some
// 20 bytes an entry.
type Scope uint32

// scopes knows which entries each scope but 0 owns.
type scopes[K, V any] struct {
	compare func(a, b K) int
	entries map[Scope]*tree[K, V] // by key; no empty trees
}

func newScopes[K, V any](compare func(a, b K) int) scopes[K, V] {
	return scopes[K, V]{compare: compare, entries: make(map[Scope]*tree[K, V])}
}

func (x *scopes[K, V]) add(e *entry[K, V]) {
	if e.scope == 0 {
		return
	}
	owned, ok := x.entries[e.scope]
	if !ok {
		owned = newKeyTree[K, V](x.compare)
		x.entries[e.scope] = owned
	}
	owned.ReplaceOrInsert(e)
}

func (x *scopes[K, V]) remove(e *entry[K, V]) {
	if e.scope == 0 {
		return
	}
	owned := x.entries[e.scope]
	owned.Delete(e)
	if owned.Len() == 0 {
		delete(x.entries, e.scope)
	}
}

// move makes scope the owner of e.
func (x *scopes[K, V]) move(e *entry[K, V], scope Scope) {
	if e.scope == scope {
		return
	}
	x.remove(e)
	e.scope = scope
	x.add(e)
}
