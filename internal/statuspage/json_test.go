// SPDX-License-Identifier: Apache-2.0

package statuspage_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	gotypes "go/types"
	"maps"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/health"
	"github.com/kpng-project/kpng/internal/report"
	"github.com/kpng-project/kpng/internal/statuspage"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

var update = flag.Bool("update", false, "write the tables of docs/reference/json.md")

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
	state.SetSourceError(errors.New("no"))
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

// paths adds the paths of all values in v. It skips the fields of explanations, failures
// and traffic, because other tables describe them.
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

// fields appends rows for the fields of a struct of package report to a table. The names
// of the fields begin with prefix. If a type has a table of its own, fields does not
// append the type's fields.
func fields(structs map[string]*ast.StructType, table, prefix, name string) string {
	kinds := map[string]string{
		"int": "number", "int64": "number", "uint64": "number", "float64": "number", "bool": "boolean",
		"time.Time": "time", "Failure": "failure", "Traffic": "traffic", "nodeview.Explanation": "object",
	}
	for _, f := range structs[name].Fields.List {
		kind := gotypes.ExprString(f.Type)
		if f.Tag == nil { // embedded
			table = fields(structs, table, prefix, kind)
			continue
		}
		key, _, _ := strings.Cut(reflect.StructTag(strings.Trim(f.Tag.Value, "`")).Get("json"), ",")
		path := prefix + key
		if strings.HasPrefix(kind, "[]") {
			path += "[]"
		}
		kind = strings.TrimLeft(kind, "[]*")
		text := strings.Join(strings.Fields(f.Comment.Text()), " ")
		if doc := strings.Join(strings.Fields(f.Doc.Text()), " "); doc != "" {
			text = strings.ToLower(doc[:1]) + strings.TrimSuffix(doc[1:], ".")
		}
		inner := structs[kind] != nil && kinds[kind] == ""
		if inner {
			kinds[kind] = "object"
		}
		if !inner || text != "" {
			table += fmt.Sprintf("| %s | %s | %s |\n", path, cmp.Or(kinds[kind], "string"), text)
		}
		if inner {
			table = fields(structs, table, path+".", kind)
		}
	}
	return table
}

// tables returns the tables of docs/reference/json.md about the status page. The key of a
// table is the type that it describes.
func tables(t *testing.T) map[string]string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "../report/report.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	structs := map[string]*ast.StructType{}
	ast.Inspect(file, func(n ast.Node) bool {
		if spec, ok := n.(*ast.TypeSpec); ok {
			structs[spec.Name.Name], _ = spec.Type.(*ast.StructType)
		}
		return true
	})
	return map[string]string{
		"field": fields(structs, "", "", "Report"), "field of a service": fields(structs, "", "", "ServiceReport"),
		"field of a failure": fields(structs, "", "", "Failure"), "field of traffic": fields(structs, "", "", "Traffic"),
	}
}

// TestJSONIsDocumented compares docs/reference/json.md with the comments of package report,
// and compares these comments with the JSON that the page serves. This command writes the
// tables of the page:
//
//	go test ./internal/statuspage -run TestJSONIsDocumented -update
func TestJSONIsDocumented(t *testing.T) {
	const file = "../../docs/reference/json.md"
	page, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	fresh, all := string(page), tables(t)
	for heading, table := range all {
		before, rest, found := strings.Cut(fresh, "\n| "+heading+" | type | meaning |\n|---|---|---|\n")
		_, after, found2 := strings.Cut(rest, "\n\n")
		if !found || !found2 {
			t.Fatalf("%s has no table of %q", file, heading)
		}
		fresh = before + "\n| " + heading + " | type | meaning |\n|---|---|---|\n" + table + "\n" + after
	}
	if *update {
		if err := os.WriteFile(file, []byte(fresh), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if diff := gocmp.Diff(string(page), fresh); diff != "" {
		t.Errorf("%s is not fresh; write it with: go test ./internal/statuspage -run TestJSONIsDocumented -update\n%s", file, diff)
	}

	h := complete()
	served := func(query ...string) (report map[string]any) {
		return decode[map[string]any](t, get(h, append(query, "output", "json")...))
	}
	whole, service := served("limit", "2"), served("service", "default/web")
	traffic := service["traffic"]
	h.Traffic = func(context.Context, func(types.NamespacedName, report.Traffic) bool) error { return errors.New("no") }
	h.State.Update(func(tx *cluster.Tx) { tx.SetNode(&api.Node{Name: "other"}) }) // this node may be misnamed
	unread := served("service", "default/web")
	for heading, value := range map[string]any{
		"field": []any{whole, served()}, "field of a service": []any{service, unread},
		"field of a failure": service["failures"], "field of traffic": traffic,
	} {
		got := map[string]bool{}
		for _, v := range value.([]any) {
			paths(got, "", v)
		}
		var documented []string
		for row := range strings.Lines(all[heading]) {
			if cells := strings.Split(row, " | "); cells[1] != "object" || cells[0] == "| explanation" {
				documented = append(documented, strings.TrimPrefix(cells[0], "| "))
			}
		}
		slices.Sort(documented)
		if diff := gocmp.Diff(documented, slices.Sorted(maps.Keys(got))); diff != "" {
			text, err := json.MarshalIndent(value, "", " ")
			t.Errorf("table of %q (-documented +served):\n%s\nserved %s, error %v", heading, diff, text, err)
		}
	}
	if s := fmt.Sprint(served("service", "default/web")["refused"]); !strings.HasPrefix(s, "too large: it needs") {
		t.Errorf("refused %q", s)
	}
}
