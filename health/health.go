// SPDX-License-Identifier: Apache-2.0

// Package health answers a proxy's health checks over HTTP. A program adds the handler to
// its own server:
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

// The proxy is stuck if a sink with pending work makes no progress for this time.
const stuckAfter = 2 * time.Minute

// toBeDeleted is the taint that the cluster autoscaler sets on a node before deleting it.
const toBeDeleted = "ToBeDeletedByClusterAutoscaler"

// Report is the health of a proxy. A program that is not a proxy may fill in a Report
// itself.
type Report struct {
	// Synced reports whether every sink has programmed all services, except failing ones.
	Synced bool
	// Stuck reports whether a sink with pending work has made no progress for two
	// minutes.
	Stuck bool
	// NodeEligible reports whether load balancers may send traffic to this node. It is false
	// until the source has synced, and while the Node object does not exist, is about to be
	// deleted, or is being deleted (KEP-3836).
	NodeEligible bool

	lastUpdated time.Time
}

// Of returns the report of a proxy with these sinks. The node is the Node object of the
// proxy's node. It is nil until the source has synced, and if the Node object does not
// exist. For a source without Node objects, the caller passes an empty Node.
func Of(sinks []sink.Status, node *api.Node) Report {
	now := time.Now()
	r := Report{Synced: len(sinks) > 0, NodeEligible: isEligible(node)}
	for i, s := range sinks {
		r.Synced = r.Synced && s.Passes > 0
		r.Stuck = r.Stuck || s.StuckFor(now) > stuckAfter
		if i == 0 || s.LastSync.Before(r.lastUpdated) {
			r.lastUpdated = s.LastSync
		}
	}
	return r
}

func isEligible(node *api.Node) bool {
	return node != nil && !node.Deleting && !slices.ContainsFunc(node.Taints, func(t api.Taint) bool { return t.Key == toBeDeleted })
}

// response is the JSON body of every response.
type response struct {
	// LastUpdated is the end of the last acknowledged Sync. With several sinks, it is the
	// earliest of these times. It is the zero time until every sink has acknowledged a Sync.
	// In a response with status 200, it is CurrentTime, as in kube-proxy.
	LastUpdated  time.Time `json:"lastUpdated"`
	CurrentTime  time.Time `json:"currentTime"`
	Synced       bool      `json:"synced"`
	Stuck        bool      `json:"stuck"`
	NodeEligible bool      `json:"nodeEligible"`
}

// Handler returns a handler of all paths that end in /livez, /healthz or /readyz. The
// response is the report as JSON. The status is 200 if the check succeeds, else 503:
//
//   - /livez: the proxy is not stuck.
//   - /healthz: in addition, the source has synced and the node is eligible for traffic
//     from load balancers, as in kube-proxy.
//   - /readyz: in addition to both, every service was programmed once.
//
// The handler calls report for each request, possibly concurrently.
func Handler(report func() Report) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if report == nil {
			http.Error(w, "health.Handler has no function", http.StatusInternalServerError)
			return
		}
		r := report()
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
		body := response{r.lastUpdated, time.Now(), r.Synced, r.Stuck, r.NodeEligible}
		if ok {
			body.LastUpdated = body.CurrentTime
		} else {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		json.NewEncoder(w).Encode(body)
	})
}
