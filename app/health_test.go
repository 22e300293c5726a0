// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/sink"
)

// answers returns the status of each path.
func answers(h Health) map[string]int {
	mux := http.NewServeMux()
	h.register(mux)
	got := map[string]int{}
	for _, path := range []string{"/livez", "/healthz", "/readyz"} {
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequest("GET", path, nil))
		got[path] = w.Code
	}
	return got
}

func TestHealth(t *testing.T) {
	const (
		plain    = "apiVersion: v1\nkind: Node\nmetadata: {name: n}\n"
		tainted  = plain + "spec: {taints: [{key: ToBeDeletedByClusterAutoscaler, effect: NoSchedule}]}\n"
		other    = plain + "spec: {taints: [{key: other, effect: NoSchedule}]}\n"
		deleting = "apiVersion: v1\nkind: Node\nmetadata: {name: n, deletionTimestamp: \"2026-01-01T00:00:00Z\"}\n"
		unknown  = "apiVersion: v1\nkind: Node\nmetadata: {name: another}\n"
	)
	for _, test := range []struct {
		name    string
		node    string
		blocked bool
		later   time.Duration
		want    map[string]int
	}{
		{"all is well", plain, false, 0, map[string]int{"/livez": 200, "/healthz": 200, "/readyz": 200}},
		{"any other taint does not count", other, false, 0, map[string]int{"/livez": 200, "/healthz": 200, "/readyz": 200}},
		{"a node that is not known is no reason to fail", unknown, false, 0, map[string]int{"/livez": 200, "/healthz": 200, "/readyz": 200}},
		{"the node is about to be taken away", tainted, false, 0, map[string]int{"/livez": 200, "/healthz": 503, "/readyz": 503}},
		{"the node is being deleted", deleting, false, 0, map[string]int{"/livez": 200, "/healthz": 503, "/readyz": 503}},
		{"the first sync still runs", plain, true, 0, map[string]int{"/livez": 200, "/healthz": 200, "/readyz": 503}},
		{"the sink is stuck", plain, true, 3 * time.Minute, map[string]int{"/livez": 503, "/healthz": 503, "/readyz": 503}},
		{"a proxy with nothing to do is not stuck", plain, false, time.Hour, map[string]int{"/livez": 200, "/healthz": 200, "/readyz": 200}},
	} {
		t.Run(test.name, func(t *testing.T) {
			manifest := filepath.Join(t.TempDir(), "node.yaml")
			if err := os.WriteFile(manifest, []byte(test.node), 0o600); err != nil {
				t.Fatal(err)
			}
			proxy, err := kpng.New(kpng.Options{Manifests: manifest, NodeName: "n"})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			entered, ended := make(chan struct{}), make(chan error)
			go func() {
				ended <- proxy.Run(ctx, sink.Func(func(ctx context.Context, _ *sink.Changes) error {
					close(entered)
					if test.blocked {
						<-ctx.Done()
					}
					return nil
				}))
			}()
			<-entered
			if !test.blocked {
				if err := proxy.WaitApplied(ctx); err != nil {
					t.Fatal(err)
				}
			}
			h := healthOf(proxy, func() time.Time { return time.Now().Add(test.later) })
			for path, got := range answers(h) {
				if got != test.want[path] {
					t.Errorf("%s says %d, want %d", path, got, test.want[path])
				}
			}
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
	}
}

func TestAProxyThatDoesNotRunYetIsNotReady(t *testing.T) {
	proxy, err := kpng.New(kpng.Options{Manifests: "none.yaml", NodeName: "n"})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]int{"/livez": 200, "/healthz": 200, "/readyz": 503}
	for path, got := range answers(healthOf(proxy, time.Now)) {
		if got != want[path] {
			t.Errorf("%s says %d, want %d", path, got, want[path])
		}
	}
}
