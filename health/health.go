// SPDX-License-Identifier: Apache-2.0

// Package health answers a proxy's health checks over HTTP. A program mounts the handler
// in its own server:
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

// stuckAfter is how long work may wait for a sink without progress before the proxy
// counts as stuck.
const stuckAfter = 2 * time.Minute

// toBeDeleted is the taint that the cluster autoscaler sets on a node before deleting it.
const toBeDeleted = "ToBeDeletedByClusterAutoscaler"

// Report is the JSON body of every response.
type Report struct {
	// LastUpdated is the earliest of the times at which the sinks were last programmed.
	// It is zero if a sink was never programmed.
	LastUpdated time.Time `json:"lastUpdated"`
	CurrentTime time.Time `json:"currentTime"`
	// Synced reports whether every service was programmed once, except failing services.
	Synced bool `json:"synced"`
	// Stuck reports whether work has waited for a sink for two minutes in which the sink
	// made no progress.
	Stuck bool `json:"stuck"`
	// NodeEligible reports whether load balancers may send traffic to this node. A node
	// that is about to be deleted is not eligible. A node that existed and was removed is
	// not eligible either (KEP-3836). A node that never existed is eligible, because a
	// cluster made of manifests may have no Node objects.
	NodeEligible bool `json:"nodeEligible"`
}

// Of returns the report of a proxy whose sinks have these statuses. The argument node is
// the proxy's node, or nil if it is not known. The argument nodeKnown reports whether the
// node was ever known.
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

// Handler responds to /livez, /healthz and /readyz, under any prefix. The response is the
// report as JSON with status 200, or 503 if the check fails:
//
//   - /livez: the proxy is not stuck.
//   - /healthz: in addition, its node is eligible for traffic from load balancers, as in
//     kube-proxy.
//   - /readyz: in addition to both, every service was programmed once.
//
// ServeHTTP calls the function for each request, from several goroutines.
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
