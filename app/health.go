// SPDX-License-Identifier: Apache-2.0

package app

import (
	"encoding/json"
	"net/http"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
)

// stuckAfter is how long something may wait for a sink that makes no progress until the
// proxy counts as stuck.
const stuckAfter = 2 * time.Minute

// toBeDeleted is the taint of a node that the cluster autoscaler takes away.
const toBeDeleted = "ToBeDeletedByClusterAutoscaler"

// Health answers /healthz, /livez and /readyz.
//
//   - livez: the program is not stuck;
//   - healthz: and its node is to stay, so load balancers may use it;
//   - readyz: and it has done everything once.
type Health func() HealthReport

func (h Health) register(mux *http.ServeMux) {
	mux.HandleFunc("GET /livez", h.handler(HealthReport.live))
	mux.HandleFunc("GET /healthz", h.handler(HealthReport.healthy))
	mux.HandleFunc("GET /readyz", h.handler(HealthReport.ready))
}

// HealthReport is the body of every answer.
type HealthReport struct {
	// LastUpdated is when something was last done, zero if that is not known.
	LastUpdated time.Time `json:"lastUpdated"`
	CurrentTime time.Time `json:"currentTime"`
	// Synced says that everything has been done once.
	Synced bool `json:"synced"`
	// Stuck says that something waits and a sink has made no progress for too long.
	Stuck bool `json:"stuck"`
	// NodeEligible says that load balancers may send traffic to this node.
	NodeEligible bool `json:"nodeEligible"`
}

func (r HealthReport) live() bool    { return !r.Stuck }
func (r HealthReport) healthy() bool { return r.live() && r.NodeEligible }
func (r HealthReport) serves() bool  { return r.live() && r.Synced }
func (r HealthReport) ready() bool   { return r.healthy() && r.Synced }

func (h Health) handler(ok func(HealthReport) bool) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		r := h()
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		if !ok(r) {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		json.NewEncoder(w).Encode(r)
	}
}

// healthOf returns the health of a proxy.
func healthOf(p proxy, now func() time.Time) Health {
	return func() HealthReport {
		sinks := p.Status()
		r := HealthReport{CurrentTime: now(), NodeEligible: nodeEligible(p.Node()), Synced: len(sinks) > 0}
		for _, s := range sinks {
			r.Synced = r.Synced && s.Passes > 0
			r.Stuck = r.Stuck || s.StuckFor(r.CurrentTime) > stuckAfter
			if r.LastUpdated.IsZero() || s.LastSync.Before(r.LastUpdated) {
				r.LastUpdated = s.LastSync
			}
		}
		return r
	}
}

// nodeEligible reports whether load balancers may send traffic to this node, as
// far as its object tells.
func nodeEligible(node *api.Node) bool {
	return node == nil || !node.Deleting && !slices.ContainsFunc(node.Taints, func(t api.Taint) bool { return t.Key == toBeDeleted })
}
