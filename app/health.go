// SPDX-License-Identifier: Apache-2.0

package app

import (
	"encoding/json"
	"net/http"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
)

// stuckAfter is how long changes may wait for a sink that may be told until the
// proxy counts as stuck.
const stuckAfter = 2 * time.Minute

// toBeDeleted is the taint of a node that the cluster autoscaler takes away.
const toBeDeleted = "ToBeDeletedByClusterAutoscaler"

// health answers /healthz, /livez and /readyz.
//
//   - livez: the proxy is not stuck;
//   - healthz: and its node is to stay, so load balancers may use it;
//   - readyz: and everything has been programmed once.
type health struct {
	source source
	now    func() time.Time
}

func newHealth(s source) *health { return &health{s, time.Now} }

func (h *health) register(mux *http.ServeMux) {
	mux.HandleFunc("GET /livez", h.handler(report.live))
	mux.HandleFunc("GET /healthz", h.handler(report.healthy))
	mux.HandleFunc("GET /readyz", h.handler(report.ready))
}

// report is the body of every answer.
type report struct {
	LastUpdated  time.Time `json:"lastUpdated"`
	CurrentTime  time.Time `json:"currentTime"`
	Synced       bool      `json:"synced"`
	Stuck        bool      `json:"stuck"`
	NodeEligible bool      `json:"nodeEligible"`
}

func (r report) live() bool    { return !r.Stuck }
func (r report) healthy() bool { return r.live() && r.NodeEligible }
func (r report) ready() bool   { return r.healthy() && r.Synced }

func (h *health) handler(ok func(report) bool) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		r := h.report()
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		if !ok(r) {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		json.NewEncoder(w).Encode(r)
	}
}

func (h *health) report() report {
	sinks := h.source.Status()
	r := report{CurrentTime: h.now(), NodeEligible: h.nodeEligible(), Synced: len(sinks) > 0}
	for _, s := range sinks {
		r.Synced = r.Synced && s.FullSyncs > 0
		r.Stuck = r.Stuck || !s.WaitingSince.IsZero() && r.CurrentTime.Sub(s.WaitingSince) > stuckAfter
		if r.LastUpdated.IsZero() || s.LastSync.Before(r.LastUpdated) {
			r.LastUpdated = s.LastSync
		}
	}
	return r
}

// nodeEligible reports whether load balancers may send traffic to this node, as
// far as its object tells.
func (h *health) nodeEligible() bool {
	node := h.source.Node()
	return node == nil || !node.Deleting && !slices.ContainsFunc(node.Taints, func(t api.Taint) bool { return t.Key == toBeDeleted })
}
