// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/conformance/internal/world"
	"github.com/kpng-project/kpng/sink"
	corev1 "k8s.io/api/core/v1"
)

// NewSink makes the sink under test for a site. It is called in a process of its
// own, in the network namespace of the site's node, and again in another one to
// clean up, where the sink is a sink.Cleaner.
type NewSink func(site Site) (sink.Sink, error)

// Options say what is tested. The zero value tests everything.
type Options struct {
	// Unsupported are the features that the proxy does not have, each with the
	// reason, which the matrix shows.
	Unsupported map[Feature]string
	// Exceptions are cases, by their names, that the proxy is known not to do
	// although they are about no feature that it lacks as a whole, each with the
	// reason. They count as not supported.
	Exceptions map[string]string
	// Cases selects the cases whose section or name it matches. Without it, -test.run
	// selects as it does for any subtests. Default: all.
	Cases *regexp.Regexp
	// Patience is how long the kit waits for what has to happen: for something to be
	// programmed, and for an answer to come. Default: 20 s.
	Patience time.Duration
	// BatchSize is the driver's sink.Options.BatchSize, for Run. A small one makes passes of
	// many batches. Default: the driver's.
	BatchSize int
	// Matrix is the file to which the matrix is written as Markdown. Default: none.
	Matrix string
	// Setup is called when the world stands and before the first process is
	// started, for what a subject needs on the node. Default: nothing.
	Setup func(t *testing.T, site Site)
}

// Run tests a sink. See the package comment.
func Run(t *testing.T, newSink NewSink, opts Options) Matrix {
	t.Helper()
	return RunSubject(t, newSinkSubject(t, newSink, opts), opts)
}

// RunSubject tests a proxy. See the package comment.
func RunSubject(t *testing.T, subject Subject, opts Options) Matrix {
	t.Helper()
	if !slices.ContainsFunc(sections, func(s section) bool { return len(s.selected(opts.Cases)) > 0 }) {
		t.Fatalf("no case matches %s", opts.Cases)
	}
	for name := range opts.Exceptions {
		if !slices.ContainsFunc(sections, func(s section) bool { return s.has(name) }) {
			t.Errorf("there is no case %q to make an exception of", name)
		}
	}
	k := newKit(t, subject, opts)
	var matrix Matrix
	for _, section := range sections {
		cases := section.selected(opts.Cases)
		if len(cases) == 0 {
			continue
		}
		t.Run(section.name, func(t *testing.T) {
			for _, c := range cases {
				t.Run(c.name, func(t *testing.T) {
					results := k.try(t.Context(), section.name, c)
					for _, r := range results {
						if r.Outcome == Failed {
							t.Errorf("%s%s", r.where(), r.Reason)
						}
					}
					matrix = append(matrix, results...)
				})
			}
		})
	}
	if err := k.kill(); err != nil {
		t.Error(err)
	}
	t.Logf("conformance:\n%s", matrix)
	if opts.Matrix != "" {
		file, err := os.Create(opts.Matrix)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(matrix.WriteMarkdown(file), file.Close()); err != nil {
			t.Fatalf("writing the matrix: %v", err)
		}
	}
	return matrix
}

// kit is one run.
type kit struct {
	world   *world.World
	subject Subject
	opts    Options
	// site is that of the proxy that all cases are about, and process its process,
	// nil while none runs.
	site    Site
	process Process
	// before is what there was on the node before the proxy came.
	before string
	// allocated counts addresses and ports that were handed out, none of them twice.
	allocated int
	marker    int
	// scenes counts the cases in each family.
	scenes int
}

func newKit(t *testing.T, subject Subject, opts Options) *kit {
	t.Helper()
	if opts.Patience == 0 {
		opts.Patience = 20 * time.Second
	}
	w, err := world.New()
	if err != nil {
		t.Fatalf("making a world to test in: %v", err)
	}
	t.Cleanup(w.Close)
	k := &kit{world: w, subject: subject, opts: opts, site: Site{
		NodeName:      nodeNames[0],
		Instance:      "kpng-conform",
		NodePortCIDRs: both(world.NodeCIDRs),
		ClusterCIDRs:  both(world.ClusterCIDRs),
		PodCIDRs:      both(world.PodCIDRs),
		PodInterfaces: world.PodInterfaces,
		host:          w.Node,
	}}
	if _, err := k.nft(foreignRules, "-f", "-"); err != nil {
		t.Fatal(err)
	}
	if k.before, err = k.inventory(); err != nil {
		t.Fatal(err)
	}
	if opts.Setup != nil {
		opts.Setup(t, k.site)
	}
	if err := k.publish(t.Context(), &Objects{}); err != nil {
		t.Fatal(err)
	}
	if err := k.start(t.Context(), k.site); err != nil {
		t.Fatal(err)
	}
	return k
}

// nodeNames are the names of the node under test and of the other one.
var nodeNames = []string{"kpng-node", "kpng-node2"}

// zone is where the node under test is; the other one is elsewhere.
const zone = "here"

func both(cidrs map[api.Family]netip.Prefix) []netip.Prefix {
	return []netip.Prefix{cidrs[api.IPv4], cidrs[api.IPv6]}
}

// families are those that the proxy supports.
func (k *kit) families() []api.Family {
	var families []api.Family
	for family, feature := range map[api.Family]Feature{api.IPv4: IPv4, api.IPv6: IPv6} {
		if _, lacks := k.opts.Unsupported[feature]; !lacks {
			families = append(families, family)
		}
	}
	slices.Sort(families)
	return families
}

// start starts the proxy as site says, and waits until it has programmed what is
// published.
func (k *kit) start(ctx context.Context, site Site) error {
	process, err := k.subject.Start(ctx, site)
	if err != nil {
		return fmt.Errorf("starting the proxy: %w", err)
	}
	k.process = process
	return k.settle(ctx)
}

// kill kills the proxy, if it runs.
func (k *kit) kill() error {
	if k.process == nil {
		return nil
	}
	process := k.process
	k.process = nil
	if err := process.Kill(); err != nil {
		return fmt.Errorf("%w\n%s", err, process.Output())
	}
	return nil
}

// settle waits until what was published is programmed.
func (k *kit) settle(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, k.opts.Patience)
	defer cancel()
	await := k.awaitMarker
	if settler, ok := k.subject.(Settler); ok {
		await = settler.Settle
	}
	err := await(ctx)
	if err != nil && k.process != nil {
		if output := k.process.Output(); output != "" {
			return fmt.Errorf("%w; the proxy has printed:\n%s", err, output)
		}
	}
	return err
}

// publish publishes objects, besides the nodes and the marker.
func (k *kit) publish(ctx context.Context, objects *Objects) error {
	all := &Objects{Nodes: objects.Nodes, Services: slices.Clone(objects.Services), Slices: slices.Clone(objects.Slices)}
	if len(all.Nodes) == 0 {
		all.Nodes = k.nodes()
	}
	if _, ok := k.subject.(Settler); !ok {
		k.addMarker(all)
	}
	if err := k.subject.Publish(ctx, all); err != nil {
		return fmt.Errorf("publishing: %w", err)
	}
	return nil
}

// nodes returns the nodes as they are unless a case says otherwise.
func (k *kit) nodes() []*corev1.Node {
	var nodes []*corev1.Node
	for i, host := range []*world.Host{k.world.Node, k.world.Node2} {
		node := &corev1.Node{}
		node.Name = nodeNames[i]
		node.Labels = map[string]string{corev1.LabelHostname: node.Name, corev1.LabelTopologyZone: []string{zone, "elsewhere"}[i]}
		for _, family := range []api.Family{api.IPv4, api.IPv6} {
			node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: host.Addr(family).String()})
			node.Spec.PodCIDRs = append(node.Spec.PodCIDRs, world.NodePodCIDR(i, family).String())
		}
		node.Spec.PodCIDR = node.Spec.PodCIDRs[0]
		nodes = append(nodes, node)
	}
	return nodes
}

// try tries a case in each family.
func (k *kit) try(ctx context.Context, section string, c testCase) []Result {
	families := k.families()
	if c.once {
		families = []api.Family{0}
	}
	var results []Result
	for _, family := range families {
		start := time.Now()
		err := k.play(ctx, c, family)
		r := Result{Section: section, Case: c.name, Family: family, Took: time.Since(start)}
		lacks, supported := k.lacks(c)
		var missing unavailableError
		switch {
		case errors.As(err, &missing):
			r.Outcome, r.Reason = Unavailable, missing.Error()
		case err == nil && supported:
			r.Outcome = Passed
		case err == nil:
			r.Outcome, r.Reason = UnsupportedPassed, lacks
		case supported:
			r.Outcome, r.Reason = Failed, err.Error()
		default:
			r.Outcome, r.Reason = Unsupported, lacks
		}
		results = append(results, r)
	}
	return results
}

// lacks returns why the proxy does not support a case, if so.
func (k *kit) lacks(c testCase) (reason string, supported bool) {
	needs := c.needs
	if c.once {
		needs = append(slices.Clone(needs), IPv4, IPv6)
	}
	for _, feature := range needs {
		if reason, lacks := k.opts.Unsupported[feature]; lacks {
			return fmt.Sprintf("%s: %s", feature, reason), false
		}
	}
	if reason, excepted := k.opts.Exceptions[c.name]; excepted {
		return reason, false
	}
	return "", true
}

// play plays a case and, whatever comes of it, leaves the proxy running with
// nothing published.
func (k *kit) play(ctx context.Context, c testCase, family api.Family) error {
	patience := k.opts.Patience
	if _, supported := k.lacks(c); !supported {
		patience = min(patience, time.Second)
	}
	k.opts.Patience, patience = patience, k.opts.Patience
	defer func() { k.opts.Patience = patience }()
	s := newScene(ctx, k, family)
	done := make(chan struct{})
	go func() { // so that failing ends it
		defer close(done)
		defer s.leave()
		c.run(s)
	}()
	<-done
	return s.err
}

// testCase is something that a proxy has to do.
type testCase struct {
	// name says it in a sentence.
	name string
	// needs are the features that it takes.
	needs []Feature
	// once says that it is not about one family.
	once bool
	run  func(*scene)
}

// section is the cases about a section of docs/semantics.md.
type section struct {
	name  string
	cases []testCase
}

// has reports whether the section has a case of that name.
func (s section) has(name string) bool {
	return slices.ContainsFunc(s.cases, func(c testCase) bool { return c.name == name })
}

// selected returns the cases that match.
func (s section) selected(pattern *regexp.Regexp) []testCase {
	if pattern == nil || pattern.MatchString(s.name) {
		return s.cases
	}
	return slices.DeleteFunc(slices.Clone(s.cases), func(c testCase) bool { return !pattern.MatchString(c.name) })
}

// sections are all cases.
var sections = []section{
	{"Cluster IPs", clusterIPCases},
	{"Ports", portCases},
	{"Dual stack", dualStackCases},
	{"External addresses", externalCases},
	{"Source ranges", sourceRangeCases},
	{"Endpoints", endpointCases},
	{"Topology", topologyCases},
	{"Traffic policies", policyCases},
	{"Source addresses", sourceAddressCases},
	{"Session affinity", affinityCases},
	{"Connections that are there already", connectionCases},
	{"All-ports services", allPortsCases},
	{"Health checks", healthCases},
	{"Restart, neighbours and clean-up", lifeCases},
}

// unavailableError says what the kernel lacks.
type unavailableError struct{ what string }

func (e unavailableError) Error() string { return e.what }
