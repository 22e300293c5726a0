// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// Report is the JSON response about the whole program.
type Report struct {
	Program string    `json:"program,omitempty"`
	Time    time.Time `json:"time"`
	Node    string    `json:"node,omitempty"`
	Health  *Health   `json:"health,omitempty"`
	// Problems says what is wrong, in one sentence each. It is empty if all is well.
	Problems []string `json:"problems"`
	Source   Source   `json:"source"`
	Sinks    []Sink   `json:"sinks,omitempty"`
	// Clients is nil if the program is not a server.
	Clients *Clients `json:"clients,omitempty"`
	// Changes are the latest changes of services, at most 50, latest first. They are missing
	// if the program has only views. So are deletions that no sink or client needs any more.
	Changes []Change `json:"changes,omitempty"`
	// Services are the services that the query selects. If more services follow, Next is the
	// value of the parameter "after" that selects them.
	Services []Service `json:"services,omitempty"`
	Next     string    `json:"next,omitempty"`
}

// Health is the health of the program, see [health.Report].
type Health struct {
	Synced       bool `json:"synced"`
	Stuck        bool `json:"stuck"`
	NodeEligible bool `json:"nodeEligible"`
}

// Source is the state of the program's source.
type Source struct {
	Name string `json:"name,omitempty"`
	// Synced reports whether the source has delivered the whole state once.
	Synced bool `json:"synced"`
	// Stale reports whether the source has lost its connection long ago.
	Stale    bool   `json:"stale"`
	Revision uint64 `json:"revision"`
	// LastChange is the time of the last change. It is zero if it is not known.
	LastChange time.Time `json:"lastChange,omitzero"`
	Services   int       `json:"services"`
	// Slices and Nodes count EndpointSlices and Nodes. They are 0 if the program has only
	// views.
	Slices int `json:"slices"`
	Nodes  int `json:"nodes"`
	// Refused is the number of services that need too many elements. Report.Problems names
	// the first of them.
	Refused int `json:"refused"`
}

// Sink is the state of a sink, as in [sink.Status].
type Sink struct {
	Name         string    `json:"name,omitempty"`
	Revision     uint64    `json:"revision"`
	Passes       uint64    `json:"passes"`
	Syncs        uint64    `json:"syncs"`
	LastPass     time.Time `json:"lastPass,omitzero"`
	LastSync     time.Time `json:"lastSync,omitzero"`
	LastProgress time.Time `json:"lastProgress,omitzero"`
	WaitingSince time.Time `json:"waitingSince,omitzero"`
	SyncingSince time.Time `json:"syncingSince,omitzero"`
	// Error is the error of the last Sync if it failed as a whole. Failures counts such
	// failures in a row.
	Error       string    `json:"error,omitempty"`
	Failures    int       `json:"failures,omitempty"`
	NextAttempt time.Time `json:"nextAttempt,omitzero"`
	// NodeError is the error of the sink if it refuses the present Node object.
	NodeError string `json:"nodeError,omitempty"`
	// Pending is the number of services that the sink has not acknowledged. PendingServices
	// are the first of them, see [sink.Status].
	Pending         int      `json:"pending"`
	PendingServices []string `json:"pendingServices,omitempty"`
	// Failing is the number of services that the sink fails to program. FailingServices are
	// the first 1,000 of them.
	Failing         int       `json:"failing"`
	FailingServices []Failure `json:"failingServices,omitempty"`
}

// Failure is the failure of a service in a sink.
type Failure struct {
	Sink      string    `json:"sink,omitempty"`
	Service   string    `json:"service"`
	Error     string    `json:"error"`
	Failures  int       `json:"failures"`
	NextRetry time.Time `json:"nextRetry"`
}

// Clients summarizes the clients of a server.
type Clients struct {
	Streams int `json:"streams"`
	// Nodes is the number of different nodes of the clients.
	Nodes int `json:"nodes"`
	// Behind is the number of streams that do not have all changes. BehindSeconds is the
	// maximum of these streams.
	Behind        int     `json:"behind"`
	BehindSeconds float64 `json:"behindSeconds"`
	// Slowest are at most 50 clients, those with the lowest revision first.
	Slowest []Client `json:"slowest,omitempty"`
}

// Change is the last change of a service.
type Change struct {
	Service  string `json:"service"`
	Revision uint64 `json:"revision"`
	// Time is the time of the change. It is zero if the program no longer knows it.
	Time    time.Time `json:"time,omitzero"`
	Deleted bool      `json:"deleted,omitempty"`
}

// Service is a service in the node's view.
type Service struct {
	Service string          `json:"service"`
	Type    api.ServiceType `json:"type"`
	// Addresses are cluster IPs, load-balancer IPs and external IPs, in this order. Of many
	// addresses or ports, the lists have the first 100, and an element such as "7 more".
	Addresses []string `json:"addresses,omitempty"`
	Ports     []string `json:"ports,omitempty"`
	// Endpoints counts the endpoints that the node uses, Local those on the node itself,
	// and Draining those with existing connections only.
	Endpoints int `json:"endpoints"`
	Local     int `json:"local"`
	Draining  int `json:"draining,omitempty"`
	// Lost counts addresses and ports that another service has.
	Lost int `json:"lost,omitempty"`
	// Failing reports whether a sink fails to program the service.
	Failing bool `json:"failing,omitempty"`
}

// ServiceReport is the JSON response for one service.
type ServiceReport struct {
	Service string `json:"service"`
	// Explanation is what the node does with the service. It has no reasons if the program
	// has only views. It is nil if the service is not known.
	Explanation *nodeview.Explanation `json:"explanation"`
	// Text is the explanation for people.
	Text string `json:"text,omitempty"`
	// If the present version of the service is refused, Refused is the reason. The fields
	// above are about the last accepted version.
	Refused string `json:"refused,omitempty"`
	// Failures are the failures of the service in sinks.
	Failures []Failure `json:"failures,omitempty"`
}

// Limits of lists in a report.
const (
	maxChanges = 50
	maxClients = 50
	maxRefused = 20
)

// present is the state of the cluster at the time of a request.
type present struct {
	synced   bool
	stale    bool
	snapshot *cluster.Snapshot // nil if the program has only views
	commits  commits
	update   *sink.Update // nil if the program has a state, or no views yet
	node     *api.Node
	refused  map[types.NamespacedName]string // the reasons
}

func (h *Handler) present() present {
	p := present{node: &api.Node{Name: h.NodeName}}
	switch {
	case h.State != nil:
		p.synced = h.State.IsSynced()
		p.snapshot, p.commits = h.State.Snapshot(), h.State.Commits()
		p.stale = p.snapshot.Stale
		p.refused = maps.Collect(p.snapshot.Refused.All())
		if node, ok := p.snapshot.Nodes.Get(h.NodeName); ok {
			p.node = node
		}
	case h.Views != nil:
		p.update = h.Views()
		p.synced = p.update != nil
		p.stale = h.Stale != nil && h.Stale()
		if h.Refused != nil {
			p.refused = h.Refused()
		}
	}
	return p
}

// viewsAfter yields the node's view of all services after key. A view is computed when
// the caller calls the function of its service.
func (p *present) viewsAfter(key types.NamespacedName) iter.Seq2[types.NamespacedName, func() *api.View] {
	return func(yield func(types.NamespacedName, func() *api.View) bool) {
		switch {
		case p.snapshot != nil:
			for key, state := range p.snapshot.States.After(key) {
				if !yield(key, func() *api.View { return nodeview.View(state, p.node) }) {
					return
				}
			}
		case p.update != nil:
			for key, view := range p.update.After(key) {
				if !yield(key, view.Get) {
					return
				}
			}
		}
	}
}

func (h *Handler) report(q query) *Report {
	p := h.present()
	r := &Report{Program: h.Program, Time: time.Now(), Node: h.NodeName}
	if h.Health != nil {
		report := h.Health()
		r.Health = &Health{report.Synced, report.Stuck, report.NodeEligible}
	}
	r.Source = h.source(&p)
	failing := map[string]bool{}
	if h.Sinks != nil {
		for _, s := range h.Sinks() {
			r.Sinks = append(r.Sinks, newSink(s))
			for _, f := range s.Failing {
				failing[f.Key.String()] = true
			}
		}
	}
	if h.Clients != nil {
		r.Clients = h.clients(&p, r.Time)
	}
	if p.snapshot != nil {
		r.Changes = p.changes()
	}
	for key, view := range p.viewsAfter(q.after) {
		name := key.String()
		if !strings.Contains(name, q.match) {
			continue
		}
		if len(r.Services) == q.limit {
			if n := len(r.Services); n > 0 {
				r.Next = r.Services[n-1].Service
			}
			break
		}
		if view := view(); view != nil {
			r.Services = append(r.Services, newService(name, view, failing[name]))
		}
	}
	r.Problems = r.problems(p.refused)
	if h.Problems != nil {
		r.Problems = append(r.Problems, h.Problems()...)
	}
	return r
}

func (r *Report) problems(refused map[types.NamespacedName]string) []string {
	problems := []string{} // not nil, so that the JSON form is a list
	add := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	if !r.Source.Synced {
		add("the source has not delivered the whole state yet")
	}
	if r.Source.Stale {
		add("the source lost its connection; the state may be old")
	}
	for i, key := range slices.SortedFunc(maps.Keys(refused), api.CompareKeys) {
		if i == maxRefused {
			add("%d more services are too large", len(refused)-maxRefused)
			break
		}
		add("service %s is too large: %s", key, refused[key])
	}
	for i := range r.Sinks {
		s := &r.Sinks[i]
		switch {
		case s.Error != "":
			add("sink %s fails: %s", s.Name, s.Error)
		case s.Failing > 0:
			add("sink %s fails to program %d services", s.Name, s.Failing)
		case s.Passes == 0:
			add("sink %s has not programmed all services yet", s.Name)
		}
		if s.NodeError != "" {
			add("sink %s refuses the Node object: %s", s.Name, s.NodeError)
		}
	}
	if h := r.Health; h != nil && h.Stuck {
		add("changes wait, but there was no progress for two minutes")
	}
	if h := r.Health; h != nil && r.Source.Synced && !h.NodeEligible {
		add("node %s does not exist or is about to be deleted, so load balancers should not use it", r.Node)
	}
	return problems
}

func (h *Handler) source(p *present) Source {
	s := Source{Name: h.Source, Synced: p.synced, Stale: p.stale, Refused: len(p.refused)}
	switch {
	case p.snapshot != nil:
		s.Revision = p.snapshot.Revision
		s.LastChange, _ = p.commits.timeOf(p.snapshot.Revision)
		s.Nodes = p.snapshot.Nodes.Len()
		for _, state := range p.snapshot.States.All() {
			if state.Service != nil {
				s.Services++
			}
			s.Slices += len(state.Slices)
		}
	case p.update != nil:
		s.Revision = p.update.Revision
		for range p.update.After(types.NamespacedName{}) {
			s.Services++
		}
	}
	return s
}

func newSink(s sink.Status) Sink {
	r := Sink{
		Name: s.Name, Revision: s.Revision, Passes: s.Passes, Syncs: s.Syncs,
		LastPass: s.LastPass, LastSync: s.LastSync, LastProgress: s.LastProgress,
		WaitingSince: s.WaitingSince, SyncingSince: s.SyncingSince,
		Failures: s.Failures, NextAttempt: s.NextAttempt, Pending: s.Pending, Failing: len(s.Failing),
	}
	if s.Err != nil {
		r.Error = s.Err.Error()
	}
	if s.NodeErr != nil {
		r.NodeError = s.NodeErr.Error()
	}
	for _, key := range s.PendingServices {
		r.PendingServices = append(r.PendingServices, key.String())
	}
	for _, f := range s.Failing[:min(len(s.Failing), maxServices)] {
		r.FailingServices = append(r.FailingServices, newFailure("", f))
	}
	return r
}

func newFailure(sink string, f sink.FailingService) Failure {
	return Failure{sink, f.Key.String(), f.Err.Error(), f.Failures, f.NextRetry}
}

func (h *Handler) clients(p *present, now time.Time) *Clients {
	all := h.Clients()
	c := &Clients{Streams: len(all)}
	nodes := map[string]struct{}{}
	for i := range all {
		client := &all[i]
		if client.Node != "" {
			nodes[client.Node] = struct{}{}
		}
		if p.snapshot == nil || client.Revision >= p.snapshot.Revision {
			continue
		}
		c.Behind++
		since := client.Since // a new client has waited since its first request
		if client.Revision > 0 {
			since, _ = p.commits.timeOf(client.Revision + 1)
		}
		client.BehindSeconds = max(now.Sub(since), 0).Seconds()
		c.BehindSeconds = max(c.BehindSeconds, client.BehindSeconds)
	}
	c.Nodes = len(nodes)
	slices.SortFunc(all, func(a, b Client) int {
		return cmp.Or(cmp.Compare(a.Revision, b.Revision), cmp.Compare(a.Node, b.Node), cmp.Compare(a.Peer, b.Peer))
	})
	c.Slowest = all[:min(len(all), maxClients)]
	return c
}

func (p *present) changes() []Change {
	var changes []Change
	for key, revision := range p.snapshot.States.Latest() {
		c := Change{Service: key.String(), Revision: revision}
		if at, known := p.commits.timeOf(revision); known {
			c.Time = at
		}
		_, exists := p.snapshot.States.Get(key)
		c.Deleted = !exists
		changes = append(changes, c)
		if len(changes) == maxChanges {
			break
		}
	}
	return changes
}

// commits are the last commits of a state, oldest first.
type commits []cluster.Commit

// timeOf returns the time of the commit that made the change with this revision. If that
// commit is older than all in the list, known is false and at is the time of the oldest
// commit in the list.
func (c commits) timeOf(revision uint64) (at time.Time, known bool) {
	i := sort.Search(len(c), func(i int) bool { return c[i].Last >= revision })
	if i == len(c) {
		return at, false
	}
	return c[i].Time, c[i].First <= revision
}

// service returns the report about one service.
func (h *Handler) service(q query) *ServiceReport {
	s := &ServiceReport{Service: q.service.String()}
	p := h.present()
	s.Refused = p.refused[q.service]
	switch {
	case p.snapshot != nil:
		node := p.node
		if h.NodeName == "" {
			node = &api.Node{Name: q.node}
			if known, ok := p.snapshot.Nodes.Get(q.node); ok {
				node = known
			}
		}
		if state, ok := p.snapshot.States.Get(q.service); ok {
			s.Explanation = nodeview.Explain(p.snapshot.WithWinners(state), node)
		}
	case p.update != nil:
		if view := p.update.View(q.service); view != nil {
			s.Explanation = nodeview.ExplainView(view, cmp.Or(p.update.Node, p.node))
		}
	}
	if s.Explanation != nil {
		s.Text = s.Explanation.String()
	}
	if h.Sinks == nil {
		return s
	}
	for _, status := range h.Sinks() {
		for _, f := range status.Failing {
			if f.Key == q.service {
				s.Failures = append(s.Failures, newFailure(status.Name, f))
			}
		}
	}
	return s
}

func newService(name string, view *api.View, failing bool) Service {
	s := Service{
		Service: name, Type: view.Service.Type, Failing: failing,
		Endpoints: len(view.Endpoints), Local: view.LocalEndpoints(), Draining: len(view.Draining), Lost: len(view.Lost),
	}
	var addrs []netip.Addr
	for _, family := range [...]api.Family{api.IPv4, api.IPv6} {
		for _, ips := range view.Service.FrontendIPs(family) {
			addrs = append(addrs, ips...)
		}
	}
	s.Addresses = firstOf(addrs, netip.Addr.String)
	if view.Service.AllPorts {
		s.Ports = []string{"all"}
	}
	s.Ports = append(s.Ports, firstOf(view.Service.Ports, func(p api.PortMapping) string { return fmt.Sprintf("%d/%s", p.Port, p.Protocol) })...)
	return s
}

// maxListed is the maximum number of addresses, and of ports, that a report lists for a
// service. A report has many services.
const maxListed = 100

// firstOf returns the texts of the first elements of list, and the number of the others.
func firstOf[T any](list []T, text func(T) string) (texts []string) {
	for _, v := range list[:min(len(list), maxListed)] {
		texts = append(texts, text(v))
	}
	if more := len(list) - maxListed; more > 0 {
		texts = append(texts, fmt.Sprintf("%d more", more))
	}
	return texts
}
