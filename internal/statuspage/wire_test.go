// SPDX-License-Identifier: Apache-2.0

package statuspage_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/health"
	"github.com/kpng-project/kpng/internal/report"
	"github.com/kpng-project/kpng/internal/statuspage"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// complete returns a handler whose reports have all fields.
func complete() *statuspage.Handler {
	state := cluster.New(cluster.Options{Resumable: true, MaxElements: 10})
	first := uint64(1)
	for i, name := range []string{"deleted", "older", "web", "web-2"} {
		state.Update(func(tx *cluster.Tx) { write(tx, "default", name, min(i, 2), 1) })
	}
	state.Update(func(tx *cluster.Tx) { write(tx, "default", "web", 1, 20) }) // too large
	state.Update(func(tx *cluster.Tx) {
		key := types.NamespacedName{Namespace: "default", Name: "deleted"}
		tx.DeleteService(key)
		tx.DeleteSlice(types.NamespacedName{Namespace: "default", Name: "deleted-ipv4"})
		slice := &api.EndpointSlice{
			Namespace: "default", Name: "older-2", ServiceName: "older", Family: api.IPv4,
			Ports: []api.EndpointPort{{Name: "http", Protocol: api.TCP, Port: 8080}},
		}
		slice.Endpoints = append(slice.Endpoints, api.SliceEndpoint{
			Addr: netip.MustParseAddr("11.0.0.99"), Conditions: api.Conditions{Serving: true, Terminating: true},
		})
		tx.SetSlice(slice)
	})
	state.SetSynced()
	now, key := time.Now(), types.NamespacedName{Namespace: "default", Name: "web"}
	return &statuspage.Handler{
		Program: "v1", Source: "manifests", NodeName: here, State: state,
		Health: func() health.Report { return health.Report{} },
		Sinks: func() []sink.Status {
			return []sink.Status{{
				Name: "nftables", Failures: 1, Err: errors.New("no"), NodeErr: errors.New("no"),
				LastPass: now, LastSync: now, LastProgress: now, WaitingSince: now, SyncingSince: now, NextAttempt: now,
				Pending: 1, PendingServices: []types.NamespacedName{key}, Failing: []sink.FailingService{{Key: key, Err: errors.New("no")}},
			}}
		},
		Traffic: func(_ context.Context, yield func(types.NamespacedName, report.Traffic) bool) error {
			yield(key, report.Traffic{TrafficID: report.TrafficID{Port: "http", Protocol: "TCP", Endpoint: netip.MustParseAddrPort("11.0.0.16:80")}})
			return nil
		},
		Clients: func(add func(string, string, time.Time, uint64)) { add("n", "p", now, first) },
	}
}

// paths adds the paths of all values in v. It does not look into explanations,
// failures and traffic, which have tables of their own.
func paths(to map[string]bool, path string, v any) {
	switch v := v.(type) {
	case map[string]any:
		if path == "explanation" || strings.HasSuffix(path, "failingServices[]") || path == "failures[]" || strings.HasSuffix(path, "traffic[]") {
			break
		}
		for key, value := range v {
			paths(to, strings.TrimPrefix(path+"."+key, "."), value)
		}
		return
	case []any:
		for _, value := range v {
			paths(to, path+"[]", value)
		}
		return
	}
	to[path] = true
}

// documented returns the first column of the table in docs/reference/wire.md whose first
// heading is given.
func documented(t *testing.T, heading string) []string {
	t.Helper()
	text, err := os.ReadFile("../../docs/reference/wire.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, found := strings.Cut(string(text), "\n| "+heading+" | type | meaning |\n|---|---|---|\n")
	if !found {
		t.Fatalf("no table of %q", heading)
	}
	table, _, _ = strings.Cut(table, "\n\n")
	var fields []string
	for row := range strings.Lines(table) {
		field, _, _ := strings.Cut(strings.TrimPrefix(row, "| "), " |")
		fields = append(fields, field)
	}
	return slices.Sorted(slices.Values(fields))
}

func TestJSONIsDocumented(t *testing.T) {
	h := complete()
	served := func(query ...string) (report map[string]any) {
		return decode[map[string]any](t, get(h, append(query, "output", "json")...))
	}
	whole, service := served("limit", "2"), served("service", "default/web")
	traffic := service["traffic"]
	h.Traffic = func(context.Context, func(types.NamespacedName, report.Traffic) bool) error { return errors.New("no") }
	unread := served("service", "default/web")
	for heading, value := range map[string]any{
		"field": []any{whole, served()}, "field of a service": []any{service, unread},
		"field of a failure": service["failures"], "field of traffic": traffic,
	} {
		got := map[string]bool{}
		for _, v := range value.([]any) {
			paths(got, "", v)
		}
		if diff := cmp.Diff(documented(t, heading), slices.Sorted(maps.Keys(got))); diff != "" {
			text, err := json.MarshalIndent(value, "", " ")
			t.Errorf("table of %q in docs/reference/wire.md (-documented +served):\n%s\nserved %s, error %v", heading, diff, text, err)
		}
	}
	if s := fmt.Sprint(served("service", "default/web")["refused"]); !strings.HasPrefix(s, "too large: it needs") {
		t.Errorf("refused %q", s)
	}
}
