// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/nodeview"
)

// admission is a list of source addresses that are admitted. It is never modified. The
// frontends of a service share one value for equal lists. The nil *admission admits all
// addresses.
type admission struct {
	// prefixes is sorted by address, and no prefix contains another one.
	prefixes []netip.Prefix
}

func newAdmission(prefixes []netip.Prefix) *admission {
	sorted := make([]netip.Prefix, len(prefixes))
	for i, p := range prefixes {
		sorted[i] = p.Masked()
	}
	slices.SortFunc(sorted, func(a, b netip.Prefix) int { // a prefix comes before those that it contains
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
	a := &admission{}
	for _, p := range sorted {
		if n := len(a.prefixes); n == 0 || !a.prefixes[n-1].Contains(p.Addr()) {
			a.prefixes = append(a.prefixes, p)
		}
	}
	return a
}

func (a *admission) admits(client netip.Addr) bool {
	if a == nil {
		return true
	}
	after, _ := slices.BinarySearchFunc(a.prefixes, client, func(p netip.Prefix, client netip.Addr) int {
		if p.Addr().Compare(client) <= 0 {
			return -1
		}
		return 1
	})
	return after > 0 && a.prefixes[after-1].Contains(client)
}

// admissions has the admissions of one service by their prefixes, so that frontends with
// equal source ranges share one admission.
type admissions map[string]*admission

// of returns the admission of the sources at a node with these addresses. It takes the
// admission from earlier ones if they have one with the same prefixes.
func (a admissions) of(sources *nodeview.Sources, node []netip.Addr, earlier admissions) *admission {
	if !sources.Restricted {
		return nil
	}
	prefixes := sources.Prefixes(node)
	var key []byte
	if len(prefixes) > 0 {
		key = append(key, byte(prefixes[0].Addr().BitLen()))
	}
	for _, p := range prefixes {
		key, _ = p.AppendBinary(key)
	}
	found := a[string(key)]
	if found == nil {
		if found = earlier[string(key)]; found == nil {
			found = newAdmission(prefixes)
		}
		a[string(key)] = found
	}
	return found
}
