// SPDX-License-Identifier: Apache-2.0

// Package status serves a page about a running proxy over HTTP. People get HTML without
// JavaScript, and programs get JSON. A program adds the handler to its own server:
//
//	mux.Handle("GET /status", status.Handler(proxy)) // a *kpng.Proxy or *node.Proxy
//
// The command kpng status --address reads a page with the path /status.
//
// The handler computes each response from the present state. It keeps nothing itself, so
// a page that is not requested costs nothing. The page has no authentication. It contains
// the names and addresses of services, so the program decides which clients may see it.
//
// These parameters of the query select what the response contains:
//
//   - output=json: JSON instead of HTML; docs/reference/json.md describes it
//   - service=[NAMESPACE/]NAME: an explanation of this service, see [nodeview.Explain]
//   - match=TEXT: only services whose namespace and name contain the text
//   - after=NAMESPACE/NAME: only services after this one
//   - limit=NUMBER: at most this number of services; default and maximum are 1,000
package status

import (
	"net/http"
	"os"
	"path/filepath"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/health"
	"github.com/kpng-project/kpng/internal/statuspage"
	"github.com/kpng-project/kpng/sink"
)

// Handler returns a handler that serves the page about a proxy, usually a *kpng.Proxy. It
// calls the methods of proxy for each request, possibly concurrently. For the methods, see
// kpng.Proxy. If proxy is also a [backends.Counter], the page shows the traffic that its
// dataplane counts. Package node has an example of such a proxy.
func Handler(proxy interface {
	NodeName() string
	State() *cluster.State
	Status() []sink.Status
	Health() health.Report
}) http.Handler {
	h := &statuspage.Handler{
		Program:  filepath.Base(os.Args[0]),
		NodeName: proxy.NodeName(), State: proxy.State(), Sinks: proxy.Status, Health: proxy.Health,
	}
	if c, ok := proxy.(backends.Counter); ok {
		h.Traffic = statuspage.TrafficOf(c)
	}
	return h
}
