// SPDX-License-Identifier: Apache-2.0

package health_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/health"
	"github.com/kpng-project/kpng/sink"
)

func TestHealthResponses(t *testing.T) {
	now := time.Now()
	done := sink.Status{Passes: 1, LastSync: now.Add(-time.Hour)}
	tainted := func(key string) *api.Node { return &api.Node{Taints: []api.Taint{{Key: key, Effect: "NoSchedule"}}} }
	for _, test := range []struct {
		name                   string
		sinks                  []sink.Status
		node                   *api.Node
		known                  bool
		livez, healthz, readyz int
	}{
		{"everything is programmed", []sink.Status{done}, &api.Node{}, true, 200, 200, 200},
		{"other taints do not matter", []sink.Status{done}, tainted("other"), true, 200, 200, 200},
		{"a node that never existed does not fail the check", []sink.Status{done}, nil, false, 200, 200, 200},
		{"a known node was removed", []sink.Status{done}, nil, true, 200, 503, 503},
		{"the node is about to be deleted", []sink.Status{done}, tainted("ToBeDeletedByClusterAutoscaler"), true, 200, 503, 503},
		{"the node is being deleted", []sink.Status{done}, &api.Node{Deleting: true}, true, 200, 503, 503},
		{"one sink has not programmed everything", []sink.Status{done, {WaitingSince: now}}, nil, false, 200, 200, 503},
		{"one sink is stuck", []sink.Status{done, {Passes: 1, WaitingSince: now.Add(-3 * time.Minute)}}, nil, false, 503, 503, 503},
		{"the proxy has not been started", nil, nil, false, 200, 200, 503},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := health.Handler(func() health.Report { return health.Of(test.sinks, test.node, test.known) })
			want := map[string]int{"/livez": test.livez, "/healthz": test.healthz, "/readyz": test.readyz, "/proxy/livez": test.livez, "/else": 404}
			got := map[string]int{}
			for path := range want {
				w := httptest.NewRecorder()
				h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
				got[path] = w.Code
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("response (-want +got):\n%s", diff)
			}
		})
	}
}

func TestResponseContainsReport(t *testing.T) {
	last := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	w := httptest.NewRecorder()
	health.Handler(func() health.Report {
		r := health.Of([]sink.Status{{Passes: 1, LastSync: last.Add(time.Hour)}, {Passes: 1, LastSync: last}}, nil, false)
		r.CurrentTime = last
		return r
	}).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/healthz", nil))
	var got any
	if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"lastUpdated": "2026-01-02T03:04:05Z", "currentTime": "2026-01-02T03:04:05Z",
		"synced": true, "stuck": false, "nodeEligible": true,
	}
	if diff := cmp.Diff(any(want), got); diff != "" {
		t.Errorf("response (-want +got):\n%s", diff)
	}
}
