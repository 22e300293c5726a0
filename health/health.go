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

// Report is the JSON body of every response.
type Report struct {
	// LastUpdated is the end of the last acknowledged Sync. With several sinks, it is the
	// earliest of these times. It is the zero time until every sink has acknowledged a Sync.
	// In a response with status 200, it is CurrentTime, as in kube-proxy.
	LastUpdated time.Time `json:"lastUpdated"`
	CurrentTime time.Time `json:"currentTime"`
	// Synced reports whether every sink has programmed all services, except failing ones.
	Synced bool `json:"synced"`
	// Stuck reports whether a sink with pending work has made no progress for two
	// minutes.
	Stuck bool `json:"stuck"`
	// NodeEligible reports whether load balancers may send traffic to this node. It is false
	// until the source has synced, and while the Node object does not exist, is about to be
	// deleted, or is being deleted (KEP-3836). See [Source] for sources without Nodes.
	NodeEligible bool `json:"nodeEligible"`
}

// Source describes what the source of a proxy has delivered.
type Source struct {
	// Synced reports whether the source has delivered the whole state once.
	Synced bool
	// Node is the Node object of the proxy's node, or nil if it does not exist.
	Node *api.Node
	// NodeOptional reports that the node is eligible without a Node object. Set it for
	// manifests that never had this Node, because manifests may contain no Nodes.
	NodeOptional bool
}

// Of returns the report of a proxy from the statuses of its sinks and the state of its
// source.
func Of(sinks []sink.Status, source Source) Report {
	r := Report{CurrentTime: time.Now(), Synced: len(sinks) > 0, NodeEligible: source.eligible()}
	for i, s := range sinks {
		r.Synced = r.Synced && s.Passes > 0
		r.Stuck = r.Stuck || s.StuckFor(r.CurrentTime) > stuckAfter
		if i == 0 || s.LastSync.Before(r.LastUpdated) {
			r.LastUpdated = s.LastSync
		}
	}
	return r
}

func (s *Source) eligible() bool {
	switch {
	case !s.Synced:
		return false
	case s.Node == nil:
		return s.NodeOptional
	}
	return !s.Node.Deleting && !slices.ContainsFunc(s.Node.Taints, func(t api.Taint) bool { return t.Key == toBeDeleted })
}

// Handler responds to all paths that end in /livez, /healthz or /readyz. The response is
// the report as JSON. The status is 200 if the check succeeds, else 503:
//
//   - /livez: the proxy is not stuck.
//   - /healthz: in addition, the source has synced and the node is eligible for traffic
//     from load balancers, as in kube-proxy.
//   - /readyz: in addition to both, every service was programmed once.
//
// ServeHTTP calls the Handler function for each request, possibly concurrently.
type Handler func() Report

// ServeHTTP implements [http.Handler].
func (h Handler) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if h == nil {
		http.Error(w, "health.Handler is nil", http.StatusInternalServerError)
		return
	}
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
	if ok {
		r.LastUpdated = r.CurrentTime
	} else {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	json.NewEncoder(w).Encode(r)
}
