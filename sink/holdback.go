// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"fmt"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"k8s.io/apimachinery/pkg/types"
)

// holder is a service that may still have a frontend.
type holder struct {
	nodeview.FrontendKey
	service types.NamespacedName
}

// holdBack marks the new frontends for which there is no place yet, because a
// stuck service may still have one there.
func (e *events) holdBack(transitions []*transition) {
	holders := e.holders()
	if len(holders) == 0 {
		return
	}
	for _, t := range transitions {
		if !t.deleted {
			continue // it sets nothing in this Sync
		}
		for f := range nodeview.Frontends(t.new) {
			for _, h := range holders[f.Claim().IP] {
				if meet(h.Claim(), f.Claim()) {
					t.setAbsent(f.FrontendKey)
					t.heldBack = fmt.Errorf("set frontend %s: service %s may still have %s", f.FrontendKey, h.service, h.FrontendKey)
				}
			}
		}
	}
}

// holders returns the frontends that stuck services may have, by address.
func (e *events) holders() map[netip.Addr][]holder {
	holders := map[netip.Addr][]holder{}
	for key := range e.stuck {
		t := e.told[key]
		for f := range nodeview.Frontends(t.view) {
			if !t.absent[f.FrontendKey] {
				ip := f.Claim().IP
				holders[ip] = append(holders[ip], holder{f.FrontendKey, key})
			}
		}
	}
	return holders
}

// meet reports whether two claims to one address exclude each other: one to all
// ports meets every other.
func meet(a, b api.Claim) bool {
	whole := api.Claim{IP: a.IP}
	return a == b || a == whole || b == whole
}
