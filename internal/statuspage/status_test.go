// SPDX-License-Identifier: Apache-2.0

package statuspage_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/health"
	"github.com/kpng-project/kpng/internal/report"
	"github.com/kpng-project/kpng/internal/statuspage"
	"github.com/kpng-project/kpng/internal/updates"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"k8s.io/apimachinery/pkg/types"
)

const here = "worker-1"

// write writes a service with endpoints. The first endpoint is on the node "here".
func write(tx *cluster.Tx, namespace, name string, i, endpoints int) {
	svc := sinktest.Service(namespace+"/"+name, fmt.Sprintf("10.%d.%d.%d http=80>8080", i>>16, i>>8&255, i&255))
	words := ""
	for e := range endpoints {
		node, n := "worker-2", i*16+e
		if e == 0 {
			node = here
		}
		words += fmt.Sprintf(" 11.%d.%d.%d@%s", n>>16, n>>8&255, n&255, node)
	}
	tx.SetService(svc)
	for _, slice := range sinktest.Slices(svc, words) {
		tx.SetSlice(slice)
	}
}

// newState returns a synced state with services default/web-00000 and so on.
func newState(services, endpoints int) *cluster.State {
	state := cluster.New(cluster.Options{Resumable: true})
	state.Update(func(tx *cluster.Tx) {
		for i := range services {
			write(tx, "default", fmt.Sprintf("web-%05d", i), i, endpoints)
		}
		tx.SetNode(&api.Node{Name: here, Labels: map[string]string{"topology.kubernetes.io/zone": "zone-a"}})
	})
	state.SetSynced()
	return state
}

func get(h http.Handler, query ...string) *httptest.ResponseRecorder {
	values := url.Values{}
	for i := 0; i < len(query); i += 2 {
		values.Set(query[i], query[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/status?"+values.Encode(), nil))
	return w
}

func decode[T any](t *testing.T, w *httptest.ResponseRecorder) (value T) {
	t.Helper()
	if w.Code != http.StatusOK || w.Header().Get("Content-Type") != "application/json" {
		t.Fatalf("status %d, content type %s: %s", w.Code, w.Header().Get("Content-Type"), w.Body)
	}
	if err := json.Unmarshal(w.Body.Bytes(), &value); err != nil {
		t.Fatal(err)
	}
	return value
}

// client has the methods of a client of a kpng server.
type client struct {
	update  *updates.Update
	refused map[types.NamespacedName]string
}

func (c *client) Source() sink.Source                      { return c }
func (c *client) Changed() <-chan struct{}                 { return nil }
func (c *client) Next() (*updates.Update, error)           { return c.update, nil }
func (c *client) Advance(*updates.Update)                  {}
func (c *client) Reset()                                   {}
func (c *client) Close()                                   {}
func (c *client) Stale() bool                              { return false }
func (c *client) UsesFallback() bool                       { return false }
func (c *client) Refused() map[types.NamespacedName]string { return c.refused }

// serviceReport has the fields of a report.ServiceReport that the tests read.
type serviceReport struct {
	Service, Text, Refused string
	Failures               []report.Failure
	Traffic                []report.Traffic
	Explanation            *struct {
		Node, Zone       string
		Lists, Frontends []any
	}
}

func TestReportOfProxy(t *testing.T) {
	state := newState(3, 2)
	state.Update(func(tx *cluster.Tx) { tx.DeleteService(types.NamespacedName{Namespace: "default", Name: "web-00000"}) })
	state.Update(func(tx *cluster.Tx) { write(tx, "default", "web-00001", 1, 5) })
	now := time.Now()
	failing := sink.FailingService{
		Key: types.NamespacedName{Namespace: "default", Name: "web-00002"}, Err: errors.New("no space"), Failures: 3, NextRetry: now,
	}
	h := &statuspage.Handler{
		Program: "v1", Source: "manifests", NodeName: here, State: state,
		Health: func() health.Report { return health.Report{Synced: true, NodeEligible: true} },
		Sinks: func() []sink.Status {
			return []sink.Status{{Name: "nftables", Passes: 1, Syncs: 7, Pending: 2, PendingServices: []types.NamespacedName{failing.Key}, Failing: []sink.FailingService{failing}}}
		},
	}
	r := decode[report.Report](t, get(h, "output", "json"))
	if r.Program != "v1" || r.Node != here || r.Health == nil || !r.Health.Synced {
		t.Errorf("report %+v", r)
	}
	if s := r.Source; s.Name != "manifests" || !s.Synced || s.Stale || s.Services != 2 || s.Slices != 3 || s.Nodes != 1 || s.Revision != state.Snapshot().Revision || now.Sub(s.LastChange).Abs() > time.Minute {
		t.Errorf("source %+v", s)
	}
	if len(r.Sinks) != 1 || r.Sinks[0].Syncs != 7 || r.Sinks[0].Pending != 2 || !slices.Equal(r.Sinks[0].PendingServices, []string{"default/web-00002"}) || r.Sinks[0].Failing != 1 || r.Sinks[0].FailingServices[0].Error != "no space" {
		t.Errorf("sinks %+v", r.Sinks)
	}
	if len(r.Problems) != 1 || !strings.Contains(r.Problems[0], "nftables fails to program 1 service") {
		t.Errorf("problems %q", r.Problems)
	}
	var changes []string
	for _, c := range r.Changes {
		if c.Time.IsZero() {
			t.Errorf("change %+v has no time", c)
		}
		changes = append(changes, fmt.Sprint(c.Service, " ", c.Deleted))
	}
	// The deleted service still has an EndpointSlice. A service of another proxy may have
	// EndpointSlices, too.
	if got, want := strings.Join(changes, ", "), "default/web-00001 false, default/web-00002 false"; got != want {
		t.Errorf("changes %s, want %s", got, want)
	}
	if len(r.Services) != 2 {
		t.Fatalf("services %+v", r.Services)
	}
	if s := r.Services[0]; s.Service != "default/web-00001" || s.Endpoints != 5 || s.Local != 1 || s.Failing || s.Addresses[0] != "10.0.0.1" || s.Ports[0] != "80/TCP" {
		t.Errorf("service %+v", s)
	}
	if s := r.Services[1]; !s.Failing {
		t.Errorf("service %+v does not fail", s)
	}

	s := decode[serviceReport](t, get(h, "output", "json", "service", "default/web-00002"))
	if s.Service != "default/web-00002" || len(s.Failures) != 1 || s.Failures[0].Sink != "nftables" || s.Explanation == nil || s.Explanation.Zone != "zone-a" || len(s.Explanation.Frontends) != 1 {
		t.Errorf("service %+v", s)
	}
	page := get(h, "service", "default/web-00002").Body.String()
	known, _ := state.Snapshot().States.Get(failing.Key)
	node, _ := state.Snapshot().Nodes.Get(here)
	if want := nodeview.Explain(known, node).String(); !strings.Contains(page, want) || !strings.Contains(page, "no space") {
		t.Errorf("the page of a service does not contain the error and the explanation\n%s\nbut\n%s", want, page)
	}
}

// TestPagesReadTrafficOnce reads a list page by page. Only its first page reads the counters.
func TestPagesReadTrafficOnce(t *testing.T) {
	reads := 0
	h := &statuspage.Handler{NodeName: here, State: newState(3, 2), Traffic: func(_ context.Context, yield func(types.NamespacedName, report.Traffic) bool) error {
		reads++
		for i := range 3 {
			yield(types.NamespacedName{Namespace: "default", Name: fmt.Sprintf("web-%05d", i)}, report.Traffic{Connections: int64(reads)})
		}
		return nil
	}}
	for list := range int64(2) {
		after := ""
		for page := range 3 {
			r := decode[report.Report](t, get(h, "output", "json", "limit", "1", "after", after))
			if len(r.Services) != 1 || len(r.Services[0].Traffic) != 1 || r.Services[0].Traffic[0].Connections != list+1 {
				t.Fatalf("list %d, page %d has %+v", list, page, r.Services)
			}
			after = r.Next
		}
	}
	if reads != 2 {
		t.Errorf("two lists read the counters %d times", reads)
	}
}

func TestTrafficOfServices(t *testing.T) {
	var err error
	h := &statuspage.Handler{NodeName: here, State: newState(2, 2), Traffic: func(_ context.Context, yield func(types.NamespacedName, report.Traffic) bool) error {
		for _, s := range []struct {
			service, port, endpoint string
			connections             int64
		}{
			{"web-00000", "https", "11.0.0.1:443", 7}, {"web-00000", "http", "11.0.0.2:80", 5}, {"web-00000", "http", "11.0.0.1:80", 2},
			{"web-00000", "http", "11.0.0.1:80", 1}, {"web-00001", "http", "11.0.0.16:80", 1}, {"deleted", "http", "11.0.0.1:80", 9},
		} {
			yield(types.NamespacedName{Namespace: "default", Name: s.service}, report.Traffic{
				TrafficID:   report.TrafficID{Port: s.port, Protocol: "TCP", Endpoint: netip.MustParseAddrPort(s.endpoint)},
				Connections: s.connections, Active: 1, FromClients: -1, ToClients: -1,
			})
		}
		return err
	}}
	of := func(port, endpoint string, connections, active int64) report.Traffic {
		id := report.TrafficID{Port: port, Protocol: "TCP"}
		if endpoint != "" {
			id.Endpoint = netip.MustParseAddrPort(endpoint)
		}
		return report.Traffic{TrafficID: id, Connections: connections, Active: active, FromClients: -1, ToClients: -1}
	}
	type traffic = []report.Traffic
	r := decode[report.Report](t, get(h, "output", "json"))
	if !r.Stats || len(r.Services) != 2 ||
		!slices.Equal(r.Services[0].Traffic, traffic{of("http", "", 8, 3), of("https", "", 7, 1)}) || !slices.Equal(r.Services[1].Traffic, traffic{of("http", "", 1, 1)}) {
		t.Errorf("report %+v", r)
	}
	s := decode[serviceReport](t, get(h, "output", "json", "service", "default/web-00000"))
	if !slices.Equal(s.Traffic, traffic{of("http", "11.0.0.1:80", 3, 2), of("http", "11.0.0.2:80", 5, 1), of("https", "11.0.0.1:443", 7, 1)}) {
		t.Errorf("service %+v", s)
	}
	for _, test := range []struct{ service, row string }{
		{"", "default/web-00000</a><td>http/TCP<td>8<td>3<td>-<td>-\n"},
		{"default/web-00000", "<tr><td>11.0.0.1:80<td>http/TCP<td>3<td>2<td>-<td>-\n"},
	} {
		if page := get(h, "service", test.service).Body.String(); !strings.Contains(page, test.row) {
			t.Errorf("the page of %q lacks the row %q:\n%s", test.service, test.row, page)
		}
	}
	err = errors.New("the dataplane is <busy>")
	if r := decode[report.Report](t, get(h, "output", "json")); r.StatsError == "" || len(r.Services) != 2 || r.Services[0].Traffic != nil || !strings.Contains(fmt.Sprint(r.Problems), "is <busy>") {
		t.Errorf("report after a failure %+v", r)
	}
	if page := get(h, "service", "default/web-00000").Body.String(); !strings.Contains(page, "is &lt;busy&gt;") {
		t.Errorf("page after a failure:\n%s", page)
	}
	h.Traffic = nil
	if r := decode[report.Report](t, get(h, "output", "json")); r.Stats || r.StatsError != "" {
		t.Errorf("report without counters %+v", r)
	}
}

func TestReportBeforeSync(t *testing.T) {
	h := &statuspage.Handler{
		NodeName: here, State: cluster.New(cluster.Options{}),
		Sinks: func() []sink.Status {
			return []sink.Status{{Name: "a"}, {Name: "b", Passes: 1, Err: errors.New("no permission")}}
		},
		Health: func() health.Report { return health.Report{Stuck: true} },
	}
	r := decode[report.Report](t, get(h, "output", "json"))
	for i, want := range []string{"has not delivered", "sink a has not programmed", "sink b fails: no permission", "no progress"} {
		if i >= len(r.Problems) || !strings.Contains(r.Problems[i], want) {
			t.Errorf("problems %q, want %q at %d", r.Problems, want, i)
		}
	}
	if len(r.Problems) != 4 {
		t.Errorf("problems %q: nothing is known about the node yet", r.Problems)
	}
}

// A write of one large object may take long.
func TestPageDoesNotWaitForAnUpdate(t *testing.T) {
	state := newState(2, 1)
	h := &statuspage.Handler{NodeName: here, State: state}
	begun, release, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		state.Update(func(tx *cluster.Tx) {
			write(tx, "default", "web-00002", 2, 1)
			close(begun)
			<-release
		})
	}()
	<-begun
	if r := decode[report.Report](t, get(h, "output", "json")); len(r.Services) != 2 {
		t.Errorf("services %+v, want those before the update", r.Services)
	}
	if w := get(h, "service", "default/web-00001"); w.Code != 200 {
		t.Errorf("status %d of a service", w.Code)
	}
	close(release)
	<-ended
	if r := decode[report.Report](t, get(h, "output", "json")); len(r.Services) != 3 {
		t.Errorf("services %+v, want that of the update, too", r.Services)
	}
}

func TestReportHasProblemsOfProgram(t *testing.T) {
	h := &statuspage.Handler{NodeName: here, State: newState(1, 1), Problems: []func() []string{func() []string { return []string{"rules of another proxy"} }}}
	if r := decode[report.Report](t, get(h, "output", "json")); len(r.Problems) != 1 || r.Problems[0] != "rules of another proxy" {
		t.Errorf("problems %q", r.Problems)
	}
}

func TestReportOfIneligibleNode(t *testing.T) {
	h := &statuspage.Handler{NodeName: here, State: newState(1, 1), Health: func() health.Report { return health.Report{Synced: true} }}
	if r := decode[report.Report](t, get(h, "output", "json")); len(r.Problems) != 1 || !strings.Contains(r.Problems[0], here+" does not exist or is about to be deleted") {
		t.Errorf("problems %q", r.Problems)
	}
}

func TestReportOfStaleSource(t *testing.T) {
	state := newState(1, 1)
	state.Update(func(tx *cluster.Tx) { tx.SetStale(true) })
	r := decode[report.Report](t, get(&statuspage.Handler{State: state}, "output", "json"))
	if !r.Source.Stale || len(r.Problems) != 1 || !strings.Contains(r.Problems[0], "lost its connection") {
		t.Errorf("report %+v", r)
	}
}

func TestReportHasErrorOfSource(t *testing.T) {
	refused := errors.New("list services at API server 10.0.0.1: connection refused")
	for _, test := range []struct {
		synced, stale bool
		want          string
	}{
		{false, false, "the source has not delivered the whole state yet: "},
		{true, true, "the source lost its connection; the state may be old: "},
		{true, false, "the source delivers no changes: "},
	} {
		state := cluster.New(cluster.Options{})
		state.Update(func(tx *cluster.Tx) { tx.SetStale(test.stale) })
		if test.synced {
			state.SetSynced()
		}
		state.SetSourceError(refused)
		h := &statuspage.Handler{State: state}
		r := decode[report.Report](t, get(h, "output", "json"))
		if want := []string{test.want + refused.Error()}; !slices.Equal(r.Problems, want) || r.Source.Error != refused.Error() {
			t.Errorf("problems %q and error %q, want %q", r.Problems, r.Source.Error, want)
		}
		state.SetSourceError(nil)
		if r := decode[report.Report](t, get(h, "output", "json")); r.Source.Error != "" {
			t.Errorf("error %q of a source that works again", r.Source.Error)
		}
	}
}

func TestReportOfNodeWithoutObject(t *testing.T) {
	for _, test := range []struct {
		nodes   []string
		name    string
		problem bool
	}{
		{nil, here, false}, // manifests need no Node objects
		{[]string{"vm-1", "vm-2"}, "vm-3", true},
		{[]string{"vm-1", "vm-2"}, "vm-2", false},
		{[]string{"vm-1"}, "", false}, // a server
	} {
		state := cluster.New(cluster.Options{})
		state.Update(func(tx *cluster.Tx) {
			for _, name := range test.nodes {
				tx.SetNode(&api.Node{Name: name})
			}
		})
		state.SetSynced()
		r := decode[report.Report](t, get(&statuspage.Handler{NodeName: test.name, State: state}, "output", "json"))
		if found := strings.Contains(strings.Join(r.Problems, " "), "none of "+test.name+","); found != test.problem {
			t.Errorf("node %q of %q: problems %q", test.name, test.nodes, r.Problems)
		}
		page := get(&statuspage.Handler{NodeName: test.name, State: state}, "service", "default/web").Body.String()
		if found := strings.Contains(page, "none of "+test.name+","); found != test.problem {
			t.Errorf("node %q of %q: page of a service %s", test.name, test.nodes, page)
		}
	}
}

func TestReportOfRefusedServices(t *testing.T) {
	state := cluster.New(cluster.Options{MaxElements: 4})
	key := func(i int) types.NamespacedName {
		return types.NamespacedName{Namespace: "default", Name: fmt.Sprintf("web-%05d", i)}
	}
	state.Update(func(tx *cluster.Tx) { write(tx, "default", key(0).Name, 0, 2) })
	state.Update(func(tx *cluster.Tx) {
		for i := range 25 {
			write(tx, "default", key(i).Name, i, 3)
		}
		large := &api.Service{Namespace: "default", Name: "large", Type: api.ClusterIP}
		for i := range 5 {
			large.IPs.ClusterIPs.Add(netip.AddrFrom4([4]byte{10, 1, 0, byte(i)}))
		}
		tx.SetService(large)
	})
	state.SetSynced()
	for _, test := range []struct {
		name    string
		handler *statuspage.Handler
	}{
		{"a state", &statuspage.Handler{State: state}},
		{"views", &statuspage.Handler{
			Client: &client{update: updateOf(t, state), refused: maps.Collect(state.Snapshot().Refused.All())},
		}},
	} {
		h := test.handler
		r := decode[report.Report](t, get(h, "output", "json"))
		if n := len(r.Problems); r.Source.Refused != 26 || n != 21 || !strings.HasPrefix(r.Problems[0], "service default/large is not served as written: too large: it needs 5 elements") || r.Problems[20] != "6 more services are not served as written" {
			t.Errorf("%s: source %+v, problems %q", test.name, r.Source, r.Problems)
		}
		s := decode[serviceReport](t, get(h, "output", "json", "service", key(0).String()))
		if !strings.HasPrefix(s.Refused, "too large: it needs 5") || s.Explanation == nil || len(s.Explanation.Frontends) != 1 {
			t.Errorf("%s: service %+v", test.name, s)
		}
		// This service has no accepted version.
		if s := decode[serviceReport](t, get(h, "output", "json", "service", "default/large")); !strings.HasPrefix(s.Refused, "too large: it needs 5") {
			t.Errorf("%s: service %+v", test.name, s)
		}
		if page := get(h, "service", "default/large").Body.String(); !strings.Contains(page, "is not served as written: too large: it needs 5") || strings.Contains(page, "No such service") {
			t.Errorf("%s: page %s", test.name, page)
		}
		if synced, stale, refused := h.SourceState(); !synced || stale || refused != 26 {
			t.Errorf("%s: SourceState %v %v %d", test.name, synced, stale, refused)
		}
	}
}

// Services with the same external IP compete for it: the oldest one wins.
func TestReportOfLostClaims(t *testing.T) {
	state := cluster.New(cluster.Options{})
	state.Update(func(tx *cluster.Tx) {
		for i := range 25 {
			svc := sinktest.Service(fmt.Sprintf("default/web-%05d", i), fmt.Sprintf("10.0.0.%d http=80>8080", i+1))
			svc.IPs.ExternalIPs.Add(netip.MustParseAddr("192.0.2.1"))
			svc.Ports[0].NodePort = 30080
			svc.Created = time.Unix(int64(i), 0)
			tx.SetService(svc)
		}
		port := sinktest.Service("default/a", "10.0.1.1 http=443>8080")
		port.Ports[0].NodePort, port.Created = 30080, time.Unix(100, 0)
		tx.SetService(port)
	})
	state.SetSynced()
	for name, h := range map[string]*statuspage.Handler{
		"a state": {State: state, NodeName: here}, "a server": {State: state}, "views": {Client: &client{update: updateOf(t, state)}, NodeName: here},
	} {
		for _, limit := range []string{"0", "1000"} {
			p := decode[report.Report](t, get(h, "output", "json", "limit", limit)).Problems
			if len(p) != 21 ||
				p[0] != "service default/a does not have node port 30080/TCP: default/web-00000 owns it" ||
				p[1] != "service default/web-00001 does not have node port 30080/TCP: default/web-00000 owns it; other services own 1 more of its addresses and ports" ||
				p[20] != "5 more services do not have some addresses and ports, because other services own them" {
				t.Errorf("%s: problems %q", name, p)
			}
		}
	}
	state.Update(func(tx *cluster.Tx) {
		for i := range 24 {
			tx.DeleteService(types.NamespacedName{Namespace: "default", Name: fmt.Sprintf("web-%05d", i)})
		}
	})
	if p := decode[report.Report](t, get(&statuspage.Handler{State: state}, "output", "json")).Problems; len(p) != 1 || !strings.Contains(p[0], "default/web-00024 owns it") {
		t.Errorf("problems %q, want only that of the node port with a new owner", p)
	}
}

func TestReportOfViewsOnly(t *testing.T) {
	var c client
	h := &statuspage.Handler{NodeName: here, Client: &c}
	if r := decode[report.Report](t, get(h, "output", "json")); r.Source.Synced || len(r.Services) > 0 {
		t.Errorf("before sync: %+v", r)
	}
	state := newState(2, 2)
	c.update = updateOf(t, state)
	r := decode[report.Report](t, get(h, "output", "json"))
	if !r.Source.Synced || r.Source.Services != 2 || len(r.Services) != 2 || r.Services[1].Service != "default/web-00001" || r.Services[1].Endpoints != 2 || len(r.Problems) > 0 {
		t.Errorf("report %+v", r)
	}
	s := decode[serviceReport](t, get(h, "output", "json", "service", "default/web-00001"))
	if s.Explanation == nil || len(s.Explanation.Frontends) != 1 || len(s.Explanation.Lists) > 0 {
		t.Errorf("explanation %+v", s.Explanation)
	}
}

func TestReportOfServer(t *testing.T) {
	state := newState(1, 2)
	first := state.Snapshot().Revision
	state.Update(func(tx *cluster.Tx) { write(tx, "default", "web-00000", 0, 3) })
	last := state.Snapshot().Revision
	since := time.Now().Add(-time.Hour)
	h := &statuspage.Handler{State: state, Clients: func(add func(string, string, time.Time, uint64)) {
		add("worker-1", "a", since, last)
		add("worker-1", "b", since, last)
		add("worker-2", "c", since, first)
		add("", "relay", since, 0)
	}}
	r := decode[report.Report](t, get(h, "output", "json"))
	c := r.Clients
	if c == nil || c.Streams != 4 || c.Nodes != 2 || c.Behind != 2 {
		t.Fatalf("clients %+v", c)
	}
	// The relay has no revision, so it has waited since its first request.
	if s := c.Slowest; len(s) != 4 || s[0].Peer != "relay" || s[0].BehindSeconds < 3599 || s[1].Peer != "c" || s[1].BehindSeconds <= 0 || s[1].BehindSeconds > 600 || s[2].BehindSeconds != 0 {
		t.Errorf("slowest clients %+v", s)
	}
	if c.BehindSeconds != c.Slowest[0].BehindSeconds {
		t.Errorf("behind %v", c.BehindSeconds)
	}
	for node, want := range map[string]string{"": "", here: "zone-a", "unknown": ""} {
		s := decode[serviceReport](t, get(h, "output", "json", "service", "default/web-00000", "node", node))
		if s.Explanation == nil || s.Explanation.Node != node || s.Explanation.Zone != want {
			t.Errorf("explanation for node %q: %+v", node, s.Explanation)
		}
	}
}

func TestClientThatMissesManyChanges(t *testing.T) {
	state := newState(1, 1)
	first := state.Snapshot().Revision
	for i := range 600 { // more commits than the state remembers
		state.Update(func(tx *cluster.Tx) { write(tx, "default", "web-00000", 0, 1+i%2) })
	}
	h := &statuspage.Handler{State: state, Clients: func(add func(string, string, time.Time, uint64)) {
		add("n", "", time.Time{}, first)
	}}
	if c := decode[report.Report](t, get(h, "output", "json")).Clients; c.Behind != 1 || c.BehindSeconds <= 0 || c.BehindSeconds > 600 {
		t.Errorf("clients %+v", c)
	}
}

func TestServicesArePaged(t *testing.T) {
	h := &statuspage.Handler{NodeName: here, State: newState(2500, 1)}
	var after string
	var sizes []int
	seen := map[string]bool{}
	for page := true; page; page = after != "" {
		r := decode[report.Report](t, get(h, "output", "json", "after", after))
		sizes = append(sizes, len(r.Services))
		for _, s := range r.Services {
			seen[s.Service] = true
		}
		after = r.Next
	}
	if fmt.Sprint(sizes) != "[1000 1000 500]" || len(seen) != 2500 {
		t.Errorf("pages of %d services with %d different services", sizes, len(seen))
	}
	if r := decode[report.Report](t, get(h, "output", "json", "limit", "0")); len(r.Services) > 0 || r.Source.Services != 2500 {
		t.Errorf("with limit 0: %d services of %d", len(r.Services), r.Source.Services)
	}
	if r := decode[report.Report](t, get(h, "output", "json", "match", "0249")); len(r.Services) != 11 || r.Next != "" {
		t.Errorf("with match: %d services", len(r.Services))
	}
	if page := get(h, "match", "web-0").Body.String(); !strings.Contains(page, `href="?after=default%2Fweb-00999&amp;match=web-0"`) {
		t.Errorf("no link to the next services")
	}
}

// If only EndpointSlices of a service are known, its page says so.
func TestServiceWithSlicesOnly(t *testing.T) {
	state := newState(1, 1)
	state.Update(func(tx *cluster.Tx) {
		tx.SetSlice(&api.EndpointSlice{Namespace: "default", Name: "other-1", ServiceName: "other", Family: api.IPv4})
	})
	w := get(&statuspage.Handler{NodeName: here, State: state}, "service", "other", "output", "json")
	if w.Code != 200 || !strings.Contains(w.Body.String(), "not selected, but slices refer to it") {
		t.Errorf("status %d: %s", w.Code, w.Body)
	}
}

func TestInvalidQueries(t *testing.T) {
	h := &statuspage.Handler{State: newState(1, 1)}
	for _, test := range []struct {
		key, value string
		code       int
	}{
		{"output", "xml", 400}, {"limit", "-1", 400}, {"limit", "x", 400}, {"after", "x", 400},
		{"service", "10.0.0.1:80", 400}, {"service", "/web", 400}, {"service", "default/none", 404}, {"service", "none", 404},
	} {
		if w := get(h, test.key, test.value); w.Code != test.code || w.Body.Len() == 0 {
			t.Errorf("%s=%s: status %d, want %d: %s", test.key, test.value, w.Code, test.code, w.Body)
		}
	}
}

// Text from outside, such as the node names of clients, errors and the query, must not
// become markup.
func TestPageEscapesText(t *testing.T) {
	const evil = `"><script>alert(1)</script>`
	key := types.NamespacedName{Namespace: "default", Name: evil}
	state := newState(1, 1)
	state.Update(func(tx *cluster.Tx) { write(tx, "default", evil, 77, 1) })
	h := &statuspage.Handler{
		Program: evil, Source: evil, State: state,
		Sinks: func() []sink.Status {
			return []sink.Status{{Name: evil, Passes: 1, Err: errors.New(evil), Failing: []sink.FailingService{{Key: key, Err: errors.New(evil)}}}}
		},
		Clients: func(add func(string, string, time.Time, uint64)) { add(evil, evil, time.Time{}, 0) },
	}
	for _, query := range [][]string{
		{"match", evil}, {"service", key.String(), "node", evil}, {"service", "a/" + evil}, {"output", evil},
		{"output", "json", "match", evil}, {"output", "json", "service", key.String()},
	} {
		w := get(h, query...)
		if html := strings.HasPrefix(w.Header().Get("Content-Type"), "text/html"); html && strings.Contains(w.Body.String(), "<script") {
			t.Errorf("%q: the page contains the script:\n%s", query, w.Body)
		}
		if w.Header().Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%q: browsers may guess the content type", query)
		}
	}
	if csp := get(h).Header().Get("Content-Security-Policy"); !strings.Contains(csp, "default-src 'none'") {
		t.Errorf("content security policy %q", csp)
	}
}

// A report has up to 1,000 services, so it does not list all addresses and ports of each.
func TestReportListsFirstAddressesAndPorts(t *testing.T) {
	state := cluster.New(cluster.Options{})
	state.Update(func(tx *cluster.Tx) {
		large := &api.Service{Namespace: "default", Name: "large", Type: api.ClusterIP}
		for i := range 150 {
			large.IPs.ClusterIPs.Add(netip.AddrFrom4([4]byte{10, 1, 0, byte(i)}))
			large.Ports = append(large.Ports, api.PortMapping{Name: fmt.Sprint(i), Protocol: api.TCP, Port: int32(i + 1)})
		}
		tx.SetService(large)
	})
	state.SetSynced()
	r := decode[report.Report](t, get(&statuspage.Handler{State: state, NodeName: here}, "output", "json"))
	for name, list := range map[string][]string{"addresses": r.Services[0].Addresses, "ports": r.Services[0].Ports} {
		if len(list) != 101 || list[100] != "50 more" {
			t.Errorf("%s: %d elements, %q", name, len(list), list)
		}
	}
}
