// SPDX-License-Identifier: Apache-2.0

// Package ordering has the orders of services and of endpoints.
package ordering

import (
	"cmp"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// Keys orders keys by namespace, then by name. All lists of this module that are sorted
// by key have this order.
func Keys(a, b types.NamespacedName) int {
	if c := strings.Compare(a.Namespace, b.Namespace); c != 0 {
		return c
	}
	return strings.Compare(a.Name, b.Name)
}

// Endpoints orders endpoints by address, then by ports. The endpoints of a view have
// this order. It returns 0 only for endpoints with equal keys (see [api.Endpoint.Key]).
func Endpoints(a, b *api.Endpoint) int {
	if c := a.Addr.Compare(b.Addr); c != 0 {
		return c
	}
	return slices.CompareFunc(a.PortOverrides, b.PortOverrides, func(a, b api.PortName) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Port, b.Port))
	})
}
