// SPDX-License-Identifier: Apache-2.0

package status_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/status"
	"k8s.io/apimachinery/pkg/types"
)

// counting is a dataplane that counts connections.
type counting struct{ sink.Sink }

func (counting) Stats(_ context.Context, yield func(backends.Stats) bool) error {
	yield(backends.Stats{Service: types.NamespacedName{Namespace: "default", Name: "web"}, Connections: 4711})
	return nil
}

func TestPageNamesTheProgramAndShowsTraffic(t *testing.T) {
	dataplane := counting{sink.FullState(func(context.Context, []*api.View) error { return nil })}
	proxy, err := kpng.New(kpng.Options{
		Manifests: "../examples/demo.yaml", NodeName: "vm-002",
		Sinks: []kpng.Sink{{Sink: dataplane, Options: sink.Options{Once: true}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := proxy.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	counted := struct {
		*kpng.Proxy
		backends.Counter
	}{proxy, dataplane}
	for _, h := range []struct {
		page  string
		stats bool
	}{{body(status.Handler(proxy)), false}, {body(status.Handler(counted)), true}} {
		if !strings.Contains(h.page, `"program":"`+filepath.Base(os.Args[0])+`"`) {
			t.Errorf("the page does not name the program: %s", h.page)
		}
		if got := strings.Contains(h.page, "4711"); got != h.stats {
			t.Errorf("the page shows traffic: %t, want %t: %s", got, h.stats, h.page)
		}
	}
}

func body(h http.Handler) string {
	answer := httptest.NewRecorder()
	h.ServeHTTP(answer, httptest.NewRequest("GET", "/status?output=json", nil))
	return answer.Body.String()
}
