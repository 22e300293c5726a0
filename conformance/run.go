// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/conformance/internal/world"
	"github.com/kpng-project/kpng/sink"
	corev1 "k8s.io/api/core/v1"
)

// NewSink creates the sink under test for a site. The kit calls it in a separate process,
// in the network namespace of the site's node. If the sink is a sink.Cleaner, the kit
// creates it once more in another process, to clean up.
type NewSink func(site Site) (sink.Sink, error)

// Options configure a test. The zero value tests everything.
type Options struct {
	// Unsupported has the features that the proxy lacks, each with the reason that the
	// matrix shows.
	Unsupported map[Feature]string
	// Exceptions maps names of cases to reasons. The proxy fails these cases although it has
	// the required features. They count as unsupported.
	Exceptions map[string]string
	// Cases selects the cases whose section or name the expression matches. Each case is a
	// subtest, so the flag -test.run selects cases, too. Default: all.
	Cases *regexp.Regexp
	// Patience limits each wait of the kit: for the programming of services or for an
	// answer. Default: 20 s.
	Patience time.Duration
	// BatchSize is the sink.Options.BatchSize of the driver that Run uses. With a small
	// size, a pass consists of many batches. Default: the driver's default.
	BatchSize int
	// Cgroup makes a cgroup for the node and its pods, see [Site.Cgroup]. It is for proxies
	// that attach programs to cgroups. Default: there is no cgroup.
	Cgroup bool
	// SoftwareChecksums makes all hosts compute the checksums of the packets that they send.
	// Switches in user space need this. Default: hosts leave checksums to the interfaces.
	SoftwareChecksums bool
	// Matrix is the file to which the matrix is written as Markdown. Default: none.
	Matrix string
	// Report is the file to which the results are written as YAML, for publication. See
	// docs/reference/conformance.md for its format. Default: none.
	Report string
	// Proxy is the name and version of the proxy, for the report. Default: empty.
	Proxy string
	// Setup may prepare the node. For example, it may connect the node's interfaces to a
	// switch. The kit calls Setup after it has built the test world and before it starts a
	// proxy. Default: none.
	Setup func(t *testing.T, site Site)
}

// Run tests a sink. See the package comment. If the sink does not declare a traffic
// parameter as backends.Capable, Run declares the parameter's feature as unsupported. If the
// sink is not a backends.Counter, Run declares counters as unsupported.
func Run(t *testing.T, newSink NewSink, opts Options) Matrix {
	t.Helper()
	return RunSubject(t, newSinkSubject(t, newSink, opts), opts)
}

// RunSubject tests a proxy. See the package comment.
func RunSubject(t *testing.T, subject Subject, opts Options) Matrix {
	t.Helper()
	if !slices.ContainsFunc(sections, func(s section) bool { return len(s.matchingCases(opts.Cases)) > 0 }) {
		t.Fatalf("no case matches %s", opts.Cases)
	}
	for name := range opts.Exceptions {
		if !slices.ContainsFunc(sections, func(s section) bool { return s.hasCase(name) }) {
			t.Errorf("exception %q is not the name of a case", name)
		}
	}
	started := time.Now()
	k := newKit(t, subject, opts)
	var matrix Matrix
	for _, section := range sections {
		cases := section.matchingCases(opts.Cases)
		if len(cases) == 0 {
			continue
		}
		t.Run(section.name, func(t *testing.T) {
			for _, c := range cases {
				t.Run(c.name, func(t *testing.T) {
					results := k.runFamilies(t, section.name, c)
					for _, r := range results {
						if r.Outcome == Failed {
							t.Errorf("%s%s", r.familyPrefix(), r.Reason)
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
	for _, o := range outcomes {
		t.Attr(strings.ReplaceAll(o.String(), " ", "-"), strconv.Itoa(matrix.Count(o)))
	}
	if opts.Matrix != "" {
		file, err := os.Create(opts.Matrix)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(matrix.WriteMarkdown(file), file.Close()); err != nil {
			t.Fatalf("write matrix: %v", err)
		}
	}
	if opts.Report != "" {
		if err := matrix.writeReport(k.opts, started); err != nil {
			t.Fatalf("write report: %v", err)
		}
	}
	return matrix
}

// kit is the state of one run of the cases.
type kit struct {
	world   *world.World
	subject Subject
	opts    Options
	// site is the configuration of the proxy under test. The field process is nil while the
	// proxy does not run.
	site    Site
	process Process
	// initialInventory is the node's state from the time before the proxy started.
	initialInventory string
	// allocations is the number of allocated addresses and ports. Each of them is used only
	// once.
	allocations int
	marker      int
	// localhost is true while the proxy serves node ports on localhost.
	localhost bool
	// scenes counts the scenes. A case has one scene per family.
	scenes int
	// output has the last lines that the proxy had written when a case failed most recently.
	// Only the first failed case with output logs it. After that, logged is true.
	output string
	logged bool
}

func newKit(t *testing.T, subject Subject, opts Options) *kit {
	t.Helper()
	if opts.Patience == 0 {
		opts.Patience = 20 * time.Second
	}
	w, err := world.New(world.Options{Cgroup: opts.Cgroup, SoftwareChecksums: opts.SoftwareChecksums})
	if err != nil {
		t.Fatalf("make test world: %v", err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	k := &kit{world: w, subject: subject, opts: opts, site: Site{
		NodeName:      nodeNames[0],
		Instance:      "kpng-conform",
		NodePortCIDRs: both(world.NodeCIDRs),
		ClusterCIDRs:  both(world.ClusterCIDRs),
		PodCIDRs:      both(world.PodCIDRs),
		PodInterfaces: world.PodInterfaces,
		host:          w.Node,
	}}
	if w.Cgroup != nil {
		k.site.Cgroup = w.Cgroup.Dir
	}
	if _, err := k.nft(foreignRules, "-f", "-"); err != nil {
		t.Fatal(err)
	}
	if opts.Setup != nil {
		opts.Setup(t, k.site)
	}
	if k.initialInventory, err = k.inventory(); err != nil {
		t.Fatal(err)
	}
	if err := k.publish(t.Context(), &Objects{}); err != nil {
		t.Fatal(err)
	}
	if err := k.start(t.Context(), k.site); err != nil {
		t.Fatal(err)
	}
	if s, ok := subject.(interface{ unsupported() map[Feature]string }); ok {
		lacks := s.unsupported()
		maps.Copy(lacks, opts.Unsupported)
		k.opts.Unsupported = lacks
	}
	return k
}

// nodeNames are the names of the node under test and of the other node.
var nodeNames = []string{"kpng-node", "kpng-node2"}

// zone is the zone of the node under test. The other node is in another zone.
const zone = "here"

func both(cidrs map[api.Family]netip.Prefix) []netip.Prefix {
	return []netip.Prefix{cidrs[api.IPv4], cidrs[api.IPv6]}
}

// families returns the families that the proxy supports.
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

// start starts the proxy for site and waits until it has programmed the published
// objects.
func (k *kit) start(ctx context.Context, site Site) error {
	process, err := k.subject.Start(ctx, site)
	if err != nil {
		return fmt.Errorf("start proxy: %w", err)
	}
	k.process = process
	return k.awaitProgrammed(ctx)
}

// kill kills the proxy if it runs.
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

// awaitProgrammed waits until the published objects are programmed.
func (k *kit) awaitProgrammed(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, k.opts.Patience)
	defer cancel()
	await := k.awaitMarker
	if settler, ok := k.subject.(Settler); ok {
		await = settler.Settle
	}
	err := await(ctx)
	if err != nil && k.process != nil {
		if output := lastLines(k.process.Output()); output != "" {
			return fmt.Errorf("%w; output of the proxy:\n%s", err, output)
		}
	}
	return err
}

// lastLines returns the last 20 lines of a text.
func lastLines(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(len(lines)-20, 0):], "\n")
}

// publish publishes objects. If objects has no nodes, it adds the default nodes. If the
// subject is not a Settler, it adds a marker.
func (k *kit) publish(ctx context.Context, objects *Objects) error {
	all := &Objects{Nodes: objects.Nodes, Services: slices.Clone(objects.Services), Slices: slices.Clone(objects.Slices)}
	if len(all.Nodes) == 0 {
		all.Nodes = k.nodes()
	}
	if _, ok := k.subject.(Settler); !ok {
		k.addMarker(all)
	}
	if err := k.subject.Publish(ctx, all); err != nil {
		return fmt.Errorf("publish objects: %w", err)
	}
	return nil
}

// nodes returns the default nodes.
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

// runFamilies runs a case for each IP family. For the first failed case, it logs the last
// output of the proxy.
func (k *kit) runFamilies(t *testing.T, section string, c testCase) []Result {
	families := k.families()
	if c.runsOnce {
		families = []api.Family{0}
	}
	var results []Result
	for _, family := range families {
		start := time.Now()
		err := k.runCase(t.Context(), c, family)
		r := Result{Section: section, Case: c.name, Family: family, Took: time.Since(start)}
		lacks, supported := k.supports(c)
		var missing unavailableError
		switch {
		case errors.As(err, &missing):
			r.Outcome, r.Reason = Unavailable, missing.Error()
		case err == nil && supported:
			r.Outcome = Passed
		case err == nil:
			r.Outcome, r.Reason = UnsupportedPassed, lacks
		case supported:
			r.Outcome, r.Reason = Failed, c.needed()+err.Error()
			if !k.logged && k.output != "" && !strings.Contains(r.Reason, k.output) {
				t.Logf("%slast output of the proxy:\n%s", r.familyPrefix(), k.output)
			}
			k.logged = k.logged || k.output != ""
		default:
			r.Outcome, r.Reason = Unsupported, lacks
		}
		results = append(results, r)
	}
	return results
}

// supports reports whether the proxy supports a case. If not, it also returns the reason.
func (k *kit) supports(c testCase) (reason string, supported bool) {
	needs := c.needs
	if c.runsOnce {
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

// runCase runs a case. When it returns, the proxy runs and the objects of the case are
// removed.
func (k *kit) runCase(ctx context.Context, c testCase, family api.Family) error {
	patience := k.opts.Patience
	if _, supported := k.supports(c); !supported {
		patience = min(patience, time.Second)
	}
	k.opts.Patience, patience = patience, k.opts.Patience
	defer func() { k.opts.Patience = patience }()
	s := newScene(ctx, k, family)
	if slices.Contains(c.needs, UDP) {
		s.protocols = []api.Protocol{api.TCP, api.UDP} // test UDP, even if the proxy does not support it
	}
	done := make(chan struct{})
	go func() { // a goroutine of its own, because a failed check ends the goroutine
		defer close(done)
		defer s.cleanUp()
		c.run(s)
	}()
	<-done
	return s.err
}

// testCase checks a required behavior.
type testCase struct {
	// name is a sentence that describes the behavior.
	name string
	// needs lists the features that the case requires.
	needs []Feature
	// runsOnce is true for a case that does not depend on the IP family.
	runsOnce bool
	run      func(*scene)
}

// needed lists the required features, for the message of a failure. A proxy that lacks one
// of them declares it in Options.Unsupported.
func (c testCase) needed() string {
	if len(c.needs) == 0 {
		return ""
	}
	var names []string
	for _, feature := range c.needs {
		names = append(names, string(feature))
	}
	return fmt.Sprintf("(needs: %s) ", strings.Join(names, ", "))
}

// section contains the cases for a section of docs/reference/semantics.md.
type section struct {
	name  string
	cases []testCase
}

// hasCase reports whether the section has a case with that name.
func (s section) hasCase(name string) bool {
	return slices.ContainsFunc(s.cases, func(c testCase) bool { return c.name == name })
}

// matchingCases returns the cases whose name or section matches pattern.
func (s section) matchingCases(pattern *regexp.Regexp) []testCase {
	if pattern == nil || pattern.MatchString(s.name) {
		return s.cases
	}
	return slices.DeleteFunc(slices.Clone(s.cases), func(c testCase) bool { return !pattern.MatchString(c.name) })
}

// sections contains all cases.
var sections = []section{
	{"Cluster IPs", clusterIPCases},
	{"Ports", portCases},
	{"Dual stack", dualStackCases},
	{"External addresses", externalCases},
	{"Node ports on localhost", localhostCases},
	{"Source ranges", sourceRangeCases},
	{"Options of source ranges", rangeOptionCases},
	{"Endpoints", endpointCases},
	{"Topology", topologyCases},
	{"Traffic policies", policyCases},
	{"Source addresses", sourceAddressCases},
	{"Session affinity", affinityCases},
	{"Weights", weightCases},
	{"Stable hashing", hashingCases},
	{"Existing connections", connectionCases},
	{"Resets", resetCases},
	{"Wrong traffic parameters", wrongParameterCases},
	{"Counters", counterCases},
	{"All-ports services", allPortsCases},
	{"Health checks", healthCases},
	{"Restart, neighbours and clean-up", lifeCases},
}

// unavailableError is the error of a case for which the kernel lacks a feature.
type unavailableError struct{ what string }

func (e unavailableError) Error() string { return e.what }
