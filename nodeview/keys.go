// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"iter"
	"slices"

	"github.com/kpng-project/kpng/api"
)

// FrontendKeys yields the keys of the frontends of view, in the order of [Frontends]. Unlike
// Frontends, it takes no time for endpoints.
func FrontendKeys(view *api.View) iter.Seq[FrontendKey] {
	return func(yield func(FrontendKey) bool) {
		for s := range namedFrontends(view) {
			if s.Fault == 0 && !yield(s.FrontendKey) {
				return
			}
		}
	}
}

// SameFrontends reports whether two views of a service have the same frontends, apart from
// the endpoints. It may return false although they have. If one of the views is nil, it
// returns false.
func SameFrontends(a, b *api.View) bool {
	return a != nil && b != nil && a.Service.Equal(b.Service) &&
		slices.EqualFunc(a.Lost, b.Lost, func(a, b api.LostClaim) bool { return a.Claim == b.Claim })
}
