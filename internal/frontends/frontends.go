// SPDX-License-Identifier: Apache-2.0

// Package frontends compares the frontends of views without the endpoints.
package frontends

import (
	"iter"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
)

// Of returns a view with the same frontends, but without endpoints.
func Of(view *api.View) *api.View { return &api.View{Service: view.Service, Lost: view.Lost} }

// Keys yields the keys of the view's frontends, in the order of [nodeview.Frontends]. Its
// time does not depend on the number of endpoints. If view is nil, it yields nothing.
func Keys(view *api.View) iter.Seq[nodeview.FrontendKey] {
	return func(yield func(nodeview.FrontendKey) bool) {
		if view == nil {
			return
		}
		for f := range nodeview.Frontends(Of(view)) {
			if !yield(f.FrontendKey) {
				return
			}
		}
	}
}

// Same reports whether two views of a service have the same frontends, apart from the
// endpoints. It may return false although the frontends are the same. If one of the views
// is nil, it returns false.
func Same(a, b *api.View) bool {
	return a != nil && b != nil && a.Service.Equal(b.Service) &&
		slices.EqualFunc(a.Lost, b.Lost, func(a, b api.LostClaim) bool { return a.Claim == b.Claim })
}

// SourcesID identifies the sources that frontends of one view admit. It is for programs that
// compute or write the sources once for all frontends that share them. Frontends of a view
// with the same SourcesID admit the same sources on each node. Frontends with different
// SourcesIDs may nevertheless admit the same sources. The zero value belongs to no frontend.
// A SourcesID has no meaning for other views.
type SourcesID struct {
	family     api.Family
	restricted bool
	first      *netip.Prefix // nodeview shares the ranges of one list in memory
	n          int
}

// SourcesOf returns the ID of the frontend's sources.
func SourcesOf(f *nodeview.Frontend) SourcesID {
	id := SourcesID{family: f.Family, restricted: f.Sources.Restricted, n: len(f.Sources.Ranges)}
	if id.n > 0 {
		id.first = &f.Sources.Ranges[0]
	}
	return id
}
