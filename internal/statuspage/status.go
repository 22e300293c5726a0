// SPDX-License-Identifier: Apache-2.0

// Package statuspage implements package status, with more fields for the commands of
// kpng. If the program has no node, a query may contain node=NAME. Then the response
// explains the view of this node.
package statuspage

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/health"
	"github.com/kpng-project/kpng/internal/report"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// Handler serves the page. All fields are optional. A handler calls the functions in its
// fields for each request, possibly concurrently.
type Handler struct {
	// Program is the name and version of the program.
	Program string
	// Source describes where the program gets the state of the cluster.
	Source string
	// NodeName is the name of the node whose view of services the page shows. For a
	// server of many nodes, it is empty. Then the page shows the view of a node without
	// endpoints, and the reader may select a node for explanations.
	NodeName string
	// State is the state of the cluster.
	State *cluster.State
	// Client is a *remote.Client, if State is nil. A client has only views, without the
	// reasons for them.
	Client interface {
		Source() sink.Source
		Stale() bool
		UsesFallback() bool
		Refused() map[types.NamespacedName]string
	}
	// Health returns the report for health checks.
	Health func() health.Report
	// Sinks returns the state of each sink.
	Sinks func() []sink.Status
	// Problems return problems that the fields above do not contain, in one sentence each.
	Problems []func() []string
	// Traffic calls yield with the traffic of each endpoint of each service port, possibly
	// in parts, until yield returns false. Default: the program does not count traffic.
	Traffic func(ctx context.Context, yield func(types.NamespacedName, report.Traffic) bool) error

	// The function Clients calls add for each open stream of a server. See remote.Server.Streams.
	Clients func(add func(node, peer string, since time.Time, revision uint64))

	pages pageTraffic
}

// ServeHTTP implements [http.Handler].
func (h *Handler) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	q, err := parseQuery(req.URL.Query())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	header := w.Header()
	header.Set("Cache-Control", "no-store")
	header.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'")
	header.Set("Referrer-Policy", "no-referrer")
	header.Set("X-Content-Type-Options", "nosniff")
	if q.about.Service().Name == "" {
		r := h.report(req.Context(), q)
		write(w, q, http.StatusOK, r, func() []byte { return pageOf(r, q.match) })
		return
	}
	s := h.service(req.Context(), q)
	code := http.StatusOK
	if s.Explanation == nil && s.Refused == "" {
		code = http.StatusNotFound
	}
	write(w, q, code, s, func() []byte { return servicePage(s, q.node, h.NodeName == "" && h.State != nil) })
}

// SourceState returns three facts about the source: whether it has delivered the whole
// state once, whether it lost its connection long ago, and how many services are refused.
func (h *Handler) SourceState() (synced, stale bool, refused int) {
	p := h.present(h.NodeName)
	return p.synced, p.stale, len(p.refused)
}

// write writes a report, either as JSON or as a page.
func write(w http.ResponseWriter, q query, code int, report any, page func() []byte) {
	contentType, body := "text/html; charset=utf-8", []byte(nil)
	if q.json {
		var err error
		if body, err = json.Marshal(report); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		contentType, body = "application/json", append(body, '\n')
	} else {
		body = page()
	}
	w.Header().Set("Content-Type", contentType)
	w.WriteHeader(code)
	w.Write(body)
}
