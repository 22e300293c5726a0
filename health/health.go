// SPDX-License-Identifier: Apache-2.0

// Package health answers the health checks of a proxy over HTTP. A program that has a server
// already mounts them there:
//
//	checks := health.Handler(proxy.Health) // of a *kpng.Proxy
//	mux.Handle("GET /healthz", checks)
//	mux.Handle("GET /livez", checks)
//	mux.Handle("GET /readyz", checks)
package health

import (
	"encoding/json"
	"net/http"
	"path"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
)

// stuckAfter is how long something may wait for a sink that makes no progress until the proxy
// counts as stuck.
const stuckAfter = 2 * time.Minute

// toBeDeleted is the taint of a node that the cluster autoscaler is going to delete.
const toBeDeleted = "ToBeDeletedByClusterAutoscaler"

// Report is the body of every answer.
type Report struct {
	// LastUpdated is when the sink that lags most was last programmed, zero if one never was.
	LastUpdated time.Time `json:"lastUpdated"`
	CurrentTime time.Time `json:"currentTime"`
	// Synced says that every service was programmed once, except services that fail.
	Synced bool `json:"synced"`
	// Stuck says that something has waited for two minutes while a sink made no progress.
	Stuck bool `json:"stuck"`
	// NodeEligible says that load balancers may send traffic to this node: it is not about to be
	// deleted. A node that was known and is gone is not eligible (KEP-3836); one that was never
	// known is, as a cluster of manifests may have none.
	NodeEligible bool `json:"nodeEligible"`
}

// Of returns the report of a proxy whose sinks have these statuses. The node is the one that is
// proxied for, nil while it is not known; nodeKnown says that it was known once.
func Of(sinks []sink.Status, node *api.Node, nodeKnown bool) Report {
	r := Report{CurrentTime: time.Now(), Synced: len(sinks) > 0, NodeEligible: eligible(node, nodeKnown)}
	for i, s := range sinks {
		r.Synced = r.Synced && s.Passes > 0
		r.Stuck = r.Stuck || s.StuckFor(r.CurrentTime) > stuckAfter
		if i == 0 || s.LastSync.Before(r.LastUpdated) {
			r.LastUpdated = s.LastSync
		}
	}
	return r
}

func eligible(node *api.Node, known bool) bool {
	if node == nil {
		return !known
	}
	return !node.Deleting && !slices.ContainsFunc(node.Taints, func(t api.Taint) bool { return t.Key == toBeDeleted })
}

// Handler answers /livez, /healthz and /readyz, at any prefix, with the report as JSON and with
// status 200 or 503:
//
//   - /livez: the proxy is not stuck;
//   - /healthz: and its node is eligible for traffic from load balancers, as kube-proxy has it;
//   - /readyz: and every service was programmed once.
//
// The function is called for each request, from several goroutines.
type Handler func() Report

// ServeHTTP implements [http.Handler].
func (h Handler) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	r := h()
	ok := !r.Stuck
	switch path.Base(req.URL.Path) {
	case "livez":
	case "healthz":
		ok = ok && r.NodeEligible
	case "readyz":
		ok = ok && r.NodeEligible && r.Synced
	default:
		http.NotFound(w, req)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if !ok {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	json.NewEncoder(w).Encode(r)
}
