// SPDX-License-Identifier: Apache-2.0

// Package nodeview says what a Service means on one node. It is pure: no
// clock, no I/O, no state.
package nodeview

import "github.com/kpng-project/kpng/api"

// View returns what the node has to do for the service of s, nil if there is
// no service (only slices of one) or if it is of type ExternalName.
//
// Of node it uses the name and the zone. A nil node, or one without a name,
// has no local endpoints. The result shares what it can with s and is
// immutable like everything else.
func View(s *api.ServiceState, node *api.Node) *api.ServiceEndpoints {
	panic("not written yet")
}
