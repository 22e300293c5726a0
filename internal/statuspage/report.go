// SPDX-License-Identifier: Apache-2.0

package statuspage

import (
	"cmp"
	"context"
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
	"github.com/kpng-project/kpng/internal/elements"
	"github.com/kpng-project/kpng/internal/explain"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/internal/report"
	"github.com/kpng-project/kpng/internal/revstore"
	"github.com/kpng-project/kpng/internal/updates"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// Limits of lists in a report.
const (
	maxChanges = 50
	maxClients = 50
	maxNamed   = 20 // services with the same kind of problem
)

// present is the state of the cluster at the time of a request.
type present struct {
	synced   bool
	stale    bool
	err      error             // of the source
	snapshot *cluster.Snapshot // nil if the program has only views
	commits  commits
	update   *updates.Update // nil if the program has a state, or has no views yet
	node     *api.Node
	isOwn    bool                            // true if the field node is a real Node object
	refused  map[types.NamespacedName]string // the reasons
	lost     lostClaims
}

// lostClaims describes the services that lack addresses and ports because of other services.
type lostClaims struct {
	services int
	problems []string // about the first services
}

// add adds a service. The function first returns its first lost claim, with the winner.
func (l *lostClaims) add(key types.NamespacedName, lost []api.LostClaim, first func() api.LostClaim) {
	if len(lost) == 0 {
		return
	}
	if l.services++; l.services > maxNamed {
		return
	}
	claim, owner := first(), "another service"
	if claim.Winner.Name != "" {
		owner = claim.Winner.String()
	}
	problem := fmt.Sprintf("service %s does not have %s: %s owns it", key, explain.ClaimText(claim.Claim), owner)
	if more := len(lost) - 1; more > 0 {
		problem += fmt.Sprintf("; other services own %d more of its addresses and ports", more)
	}
	l.problems = append(l.problems, problem)
}

// present reads the state for the node with this name.
func (h *Handler) present(nodeName string) present {
	p := present{node: &api.Node{Name: nodeName}}
	switch {
	case h.State != nil:
		p.synced = h.State.IsSynced()
		p.snapshot = h.State.Snapshot()
		p.commits = statesOf(p.snapshot).Revisions().Commits()
		p.stale, p.err = p.snapshot.Stale, h.State.SourceError()
		p.refused = maps.Collect(p.snapshot.Refused.All())
		if node, ok := p.snapshot.Nodes.Get(nodeName); ok {
			p.node, p.isOwn = node, true
		}
	case h.Client != nil:
		p.update, p.stale, p.refused = updates.Read(h.Client.Source()), h.Client.Stale(), h.Client.Refused()
		p.synced = p.update != nil
	}
	return p
}

// viewsAfter yields all services after key, each with a function that computes the node's
// view of the service.
func (p *present) viewsAfter(key types.NamespacedName) iter.Seq2[types.NamespacedName, func() *api.View] {
	return func(yield func(types.NamespacedName, func() *api.View) bool) {
		switch {
		case p.snapshot != nil:
			for key, state := range statesOf(p.snapshot).After(key) {
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

func (h *Handler) report(ctx context.Context, q query) *report.Report {
	p := h.present(h.NodeName)
	r := &report.Report{Program: h.Program, Time: time.Now(), Node: h.NodeName, Stats: h.Traffic != nil}
	if h.Health != nil {
		health := h.Health()
		r.Health = &report.Health{Synced: health.Synced, Stuck: health.Stuck, NodeEligible: health.NodeEligible}
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
	listed := map[types.NamespacedName]int{} // the index in r.Services, by name
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
			_, refused := p.refused[key]
			listed[key] = len(r.Services)
			r.Services = append(r.Services, newService(name, view, failing[name], refused))
		}
	}
	r.Problems = problems(r, &p)
	if problem := p.misnamed(); problem != "" {
		r.Problems = append(r.Problems, problem)
	}
	if h.Client != nil && h.Client.UsesFallback() {
		r.Problems = append(r.Problems, "no kpng server answers; this program reads the API server itself")
	}
	for _, more := range h.Problems {
		r.Problems = append(r.Problems, more()...)
	}
	if r.Stats && len(listed) > 0 {
		traffic, err := h.trafficOfPage(ctx, q.after == types.NamespacedName{}, r.Next == "")
		if err != nil {
			r.StatsError = err.Error()
			r.Problems = append(r.Problems, "the counters of the dataplane cannot be read: "+r.StatsError)
		}
		for key, i := range listed {
			list := traffic[key]
			r.Services[i].Traffic = list[:min(len(list), maxListed)]
		}
	}
	return r
}

// misnamed returns a sentence if Node objects exist, but no Node object of the node. The
// node's name may be wrong. If there are no Node objects, the health report decides.
func (p *present) misnamed() string {
	if !p.synced || p.snapshot == nil || p.node.Name == "" || p.isOwn || p.snapshot.Nodes.Len() == 0 {
		return ""
	}
	return fmt.Sprintf("the source has other Node objects, but none of %s, so its zone is unknown; is the name of the node right?", p.node.Name)
}

func problems(r *report.Report, p *present) []string {
	problems := []string{} // not nil, so that the JSON form is a list
	add := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	reason := ""
	if r.Source.Error != "" {
		reason = ": " + r.Source.Error
	}
	switch {
	case !r.Source.Synced:
		add("the source has not delivered the whole state yet%s", reason)
	case r.Source.Stale:
		add("the source lost its connection; the state may be old%s", reason)
	case reason != "":
		add("the source delivers no changes%s", reason)
	}
	for i, key := range slices.SortedFunc(maps.Keys(p.refused), ordering.Keys) {
		if i == maxNamed {
			add("%s not served as written", report.Number(len(p.refused)-maxNamed, "more service is", "more services are"))
			break
		}
		add("service %s is not served as written: %s", key, p.refused[key])
	}
	problems = append(problems, p.lost.problems...)
	if more := p.lost.services - len(p.lost.problems); more > 0 {
		add("%s not have some addresses and ports, because other services own them", report.Number(more, "more service does", "more services do"))
	}
	for i := range r.Sinks {
		s := &r.Sinks[i]
		switch {
		case s.Error != "":
			add("sink %s fails: %s", s.Name, s.Error)
		case s.Failing > 0:
			add("sink %s fails to program %s", s.Name, report.Number(s.Failing, "service", "services"))
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

// source describes the source, and finds the lost claims.
func (h *Handler) source(p *present) report.Source {
	s := report.Source{Name: h.Source, Synced: p.synced, Stale: p.stale, Refused: len(p.refused)}
	if p.err != nil {
		s.Error = p.err.Error()
	}
	switch {
	case p.snapshot != nil:
		s.Revision = p.snapshot.Revision
		s.LastChange, _ = p.commits.timeOf(p.snapshot.Revision)
		s.Nodes = p.snapshot.Nodes.Len()
		for key, state := range p.snapshot.States.All() {
			if state.Service != nil {
				s.Services++
			}
			s.Slices += len(state.Slices)
			p.lost.add(key, state.Lost, func() api.LostClaim {
				return p.snapshot.WithWinners(&api.ServiceState{Lost: state.Lost[:1]}).Lost[0]
			})
		}
	case p.update != nil:
		s.Revision = p.update.Revision
		for key, view := range p.update.After(types.NamespacedName{}) {
			s.Services++
			if view := view.Get(); view != nil {
				p.lost.add(key, view.Lost, func() api.LostClaim { return view.Lost[0] })
			}
		}
	}
	return s
}

func newSink(s sink.Status) report.Sink {
	r := report.Sink{
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

func newFailure(sink string, f sink.FailingService) report.Failure {
	return report.Failure{Sink: sink, Service: f.Key.String(), Error: f.Err.Error(), Failures: f.Failures, NextRetry: f.NextRetry}
}

func (h *Handler) clients(p *present, now time.Time) *report.Clients {
	var all []report.Client
	h.Clients(func(node, peer string, since time.Time, revision uint64) {
		all = append(all, report.Client{Node: node, Peer: peer, Since: since, Revision: revision})
	})
	c := &report.Clients{Streams: len(all)}
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
	slices.SortFunc(all, func(a, b report.Client) int {
		return cmp.Or(cmp.Compare(a.Revision, b.Revision), cmp.Compare(a.Node, b.Node), cmp.Compare(a.Peer, b.Peer))
	})
	c.Slowest = all[:min(len(all), maxClients)]
	return c
}

// Behind returns the number of streams that lack changes. It also returns the age in
// seconds of the oldest change that any stream lacks.
func (h *Handler) Behind() (streams int, seconds float64) {
	p := h.present(h.NodeName)
	c := h.clients(&p, time.Now())
	return c.Behind, c.BehindSeconds
}

func (p *present) changes() []report.Change {
	var changes []report.Change
	for key, revision := range statesOf(p.snapshot).Latest() {
		state, exists := p.snapshot.States.Get(key)
		if exists && state.Service == nil {
			continue // only EndpointSlices: the service may belong to another proxy
		}
		c := report.Change{Service: key.String(), Revision: revision}
		if at, known := p.commits.timeOf(revision); known {
			c.Time = at
		}
		c.Deleted = !exists
		changes = append(changes, c)
		if len(changes) == maxChanges {
			break
		}
	}
	return changes
}

func statesOf(s *cluster.Snapshot) *revstore.Snapshot[types.NamespacedName, *api.ServiceState] {
	return (*revstore.Snapshot[types.NamespacedName, *api.ServiceState])(s.States)
}

// commits are the last commits of a state, oldest first.
type commits []revstore.Commit

// timeOf returns the time of the commit that made the change with this revision. If that
// commit is older than all commits in the list, known is false and the result at is the
// time of the oldest commit in the list.
func (c commits) timeOf(revision uint64) (at time.Time, known bool) {
	i := sort.Search(len(c), func(i int) bool { return c[i].Last >= revision })
	if i == len(c) {
		return at, false
	}
	return c[i].Time, c[i].First <= revision
}

// service returns the report about one service.
func (h *Handler) service(ctx context.Context, q query) *report.ServiceReport {
	p := h.present(cmp.Or(h.NodeName, q.node))
	key := q.about.Service()
	s := &report.ServiceReport{Service: key.String(), Refused: p.refused[key], NodeError: p.misnamed(), Stats: h.Traffic != nil}
	if s.Stats {
		traffic, err := h.traffic(ctx, true, func(service types.NamespacedName) bool { return service == key })
		if err != nil {
			s.StatsError = err.Error()
		}
		s.Traffic = traffic[key]
	}
	var answers iter.Seq2[*nodeview.Explanation, error]
	switch {
	case p.snapshot != nil:
		answers = q.about.Explain(p.snapshot, p.node)
	case p.update != nil:
		answers = q.about.ExplainViews(p.update, cmp.Or(p.update.Node, p.node))
	default:
		return s
	}
	for e, err := range answers {
		if err == nil {
			s.Explanation, s.Text = e, e.String()
		}
	}
	if s.Explanation == nil && p.snapshot != nil {
		if state, ok := p.snapshot.States.Get(key); ok { // the service has only EndpointSlices
			s.Explanation = nodeview.Explain(state, p.node)
			s.Text = s.Explanation.String()
		}
	}
	if h.Sinks == nil {
		return s
	}
	for _, status := range h.Sinks() {
		for _, f := range status.Failing {
			if f.Key == key {
				s.Failures = append(s.Failures, newFailure(status.Name, f))
			}
		}
	}
	return s
}

func newService(name string, view *api.View, failing, refused bool) report.Service {
	s := report.Service{
		Service: name, Type: view.Service.Type, Failing: failing, Refused: refused,
		Endpoints: len(view.Endpoints), Local: report.LocalEndpoints(view), Draining: len(view.Draining), Lost: len(view.Lost),
	}
	var addrs []netip.Addr
	for _, family := range [...]api.Family{api.IPv4, api.IPv6} {
		for _, ips := range elements.Addresses(view.Service, family) {
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

// maxListed limits the addresses, the ports, and the ports with traffic that a report
// lists for each service. A report has many services.
const maxListed = 100

// firstOf returns the texts of the first elements of list, and the number of further
// elements.
func firstOf[T any](list []T, text func(T) string) (texts []string) {
	for _, v := range list[:min(len(list), maxListed)] {
		texts = append(texts, text(v))
	}
	if more := len(list) - maxListed; more > 0 {
		texts = append(texts, fmt.Sprintf("%d more", more))
	}
	return texts
}
