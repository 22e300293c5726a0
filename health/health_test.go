// SPDX-License-Identifier: Apache-2.0

package health_test

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/health"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
)

func TestHealthResponses(t *testing.T) {
	now := time.Now()
	done := sink.Status{Passes: 1, LastSync: now.Add(-time.Hour)}
	tainted := func(key string) *api.Node { return &api.Node{Taints: []api.Taint{{Key: key, Effect: "NoSchedule"}}} }
	for _, test := range []struct {
		name                   string
		sinks                  []sink.Status
		node                   *api.Node
		livez, healthz, readyz int
	}{
		{"everything is programmed", []sink.Status{done}, &api.Node{}, 200, 200, 200},
		{"other taints do not matter", []sink.Status{done}, tainted("other"), 200, 200, 200},
		{"the node does not exist", []sink.Status{done}, nil, 200, 503, 503},
		{"the node is about to be deleted", []sink.Status{done}, tainted("ToBeDeletedByClusterAutoscaler"), 200, 503, 503},
		{"the node is being deleted", []sink.Status{done}, &api.Node{Deleting: true}, 200, 503, 503},
		{"the source has not synced", []sink.Status{{}}, nil, 200, 503, 503},
		{"one sink has not programmed everything", []sink.Status{done, {WaitingSince: now}}, &api.Node{}, 200, 200, 503},
		{"one sink is stuck", []sink.Status{done, {Passes: 1, WaitingSince: now.Add(-3 * time.Minute)}}, &api.Node{}, 503, 503, 503},
		{"the proxy has not been started", nil, nil, 200, 503, 503},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := health.Handler(func() health.Report { return health.Of(test.sinks, test.node) })
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
	synctest.Test(t, func(t *testing.T) {
		last := time.Now().UTC()
		report := health.Of([]sink.Status{{Passes: 1, LastSync: last.Add(time.Minute)}, {Passes: 1, LastSync: last}}, &api.Node{})
		time.Sleep(time.Hour)
		now := last.Add(time.Hour).Format(time.RFC3339)
		for _, test := range []struct {
			stuck       bool
			lastUpdated string
		}{
			{false, now}, // the present time, as in kube-proxy
			{true, last.Format(time.RFC3339)},
		} {
			report.Stuck = test.stuck
			w := httptest.NewRecorder()
			health.Handler(func() health.Report { return report }).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/healthz", nil))
			var got map[string]any
			if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
				t.Fatal(err)
			}
			for _, key := range []string{"lastUpdated", "currentTime"} {
				at, err := time.Parse(time.RFC3339, got[key].(string))
				if err != nil {
					t.Fatal(err)
				}
				got[key] = at.UTC().Format(time.RFC3339)
			}
			want := map[string]any{
				"lastUpdated": test.lastUpdated, "currentTime": now,
				"synced": true, "stuck": test.stuck, "nodeEligible": true,
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("response, stuck %t (-want +got):\n%s", test.stuck, diff)
			}
		}
	})
}

func TestNilHandlerIsAnError(t *testing.T) {
	w := httptest.NewRecorder()
	health.Handler(nil).ServeHTTP(w, httptest.NewRequest("GET", "/livez", nil))
	if w.Code != http.StatusInternalServerError {
		t.Errorf("status %d", w.Code)
	}
}

// A step of the wall clock must not change the result of StuckFor. Times of the driver have
// a monotonic reading, which decides in the methods Sub and After.
func TestStuckForIgnoresTheWallClock(t *testing.T) {
	src := sinktest.NewSource()
	defer src.Close()
	src.MarkSynced()
	reading, release := make(chan struct{}), make(chan struct{})
	d := sink.NewDriver(src, sink.Func(func(_ context.Context, c *sink.Changes) error {
		for range c.Services { // progress
		}
		close(reading)
		<-release
		return nil
	}), sink.Options{Once: true})
	src.Set(&api.View{Service: &api.Service{Namespace: "ns", Name: "a"}})
	ended := make(chan error)
	go func() { ended <- d.Run(t.Context()) }()
	<-reading
	s := d.Status()
	for name, at := range map[string]time.Time{
		"WaitingSince": s.WaitingSince, "SyncingSince": s.SyncingSince, "LastProgress": s.LastProgress,
	} {
		if at == at.Round(0) { // Round(0) removes the monotonic reading
			t.Errorf("%s has no monotonic reading: %v", name, at)
		}
	}
	close(release)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if s := d.Status(); s.LastPass == s.LastPass.Round(0) || s.LastSync == s.LastSync.Round(0) {
		t.Errorf("without a monotonic reading: %v, %v", s.LastPass, s.LastSync)
	}
}
