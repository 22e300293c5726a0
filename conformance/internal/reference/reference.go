// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package reference is a proxy for tests of the conformance kit. It is complete and
// simple, but slow, because it rewrites its whole nftables table for every change. A test
// can give it a deliberate fault.
package reference

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"syscall"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// Options configure a Proxy.
type Options struct {
	// Table is the name of the proxy's nftables table.
	Table string
	// NodePortCIDRs contain the node addresses at which node ports are served.
	NodePortCIDRs []netip.Prefix
	// ClusterCIDRs contain the addresses of all pods.
	ClusterCIDRs []netip.Prefix
	// PodInterfaces is the prefix of the names of interfaces to pods.
	PodInterfaces string
	// MasqueradeOutside enables masquerading of traffic from outside ClusterCIDRs to cluster
	// IPs. MasqueradeAll enables masquerading of all traffic to cluster IPs.
	MasqueradeOutside, MasqueradeAll bool
	// Fault is the deliberate fault, or empty for a correct proxy.
	Fault Fault
}

// Proxy is a sink.Sink.
type Proxy struct {
	opts     Options
	node     *api.Node
	services map[types.NamespacedName]*api.View
	// passing is true while a pass is in progress. During a pass, the proxy collects
	// services and does not change the table.
	passing bool
	// written contains the objects of the table. It is nil if the table does not
	// exist.
	written *ruleset
	flows   flowCleaner
	health  healthServer
	// localhost serves node ports at loopback addresses.
	localhost localhostServer
	counters  counters
}

// New returns a Proxy.
func New(opts Options) *Proxy {
	p := &Proxy{health: healthServer{cidrs: opts.NodePortCIDRs, fault: opts.Fault}, localhost: localhostServer{fault: opts.Fault}}
	rules := opts
	rules.NodePortCIDRs = nil
	for _, cidr := range opts.NodePortCIDRs {
		if cidr.Addr().IsLoopback() {
			p.localhost.cidrs = append(p.localhost.cidrs, cidr)
		} else {
			rules.NodePortCIDRs = append(rules.NodePortCIDRs, cidr)
		}
	}
	p.opts = rules
	return p
}

// Sync implements sink.Sink.
func (p *Proxy) Sync(ctx context.Context, c *sink.Changes) error {
	p.node = c.Node
	if c.First {
		p.services = map[types.NamespacedName]*api.View{}
	}
	for s := range c.Services {
		if s.New == nil || p.opts.Fault == LosesRenamed && portsRenamed(s) {
			delete(p.services, s.Key)
		} else {
			p.services[s.Key] = p.opts.Fault.apply(s.New)
		}
	}
	p.passing = (p.passing || c.First) && !c.Last
	if p.passing {
		return nil // the table changes only at the end of the pass
	}
	var services []*api.View
	for _, view := range p.services {
		services = append(services, view)
	}
	slices.SortFunc(services, func(a, b *api.View) int { return ordering.Keys(a.Key(), b.Key()) })
	if p.opts.Fault == IgnoresClaims {
		slices.Reverse(services)
	}
	if p.opts.Fault == RefusesSCTP && slices.ContainsFunc(services, hasSCTP) {
		return errors.New("SCTP is not supported")
	}
	if p.opts.Fault == HealthFirst {
		if err := p.health.serve(services); err != nil {
			return errors.Join(errors.New("no other changes were made"), err)
		}
	}
	rules := render(&p.opts, p.node, services)
	if p.written == nil {
		p.written = readTable(p.opts.Table)
	}
	if p.opts.Fault == Flushes {
		if err := p.Cleanup(ctx); err != nil {
			return err
		}
		p.written = nil
	}
	if err := load(rules.script(p.written)); err != nil {
		return err
	}
	p.written = rules
	if err := p.counters.set(&p.opts, rules, services); err != nil {
		return err
	}
	if p.opts.Fault != KeepsFlows {
		if err := p.flows.reconcile(&p.opts, services); err != nil {
			return err
		}
	}
	if err := resetLost(&p.opts, services); err != nil {
		return err
	}
	if err := p.localhost.serve(services); err != nil {
		return err
	}
	return p.health.serve(services)
}

// Honours implements backends.Capable.
func (p *Proxy) Honours() nodeview.Parameters {
	return nodeview.Parameters{Algorithm: true, Weights: true, Resets: true, NodePortSources: true}
}

// Stop implements sink.Stopper.
func (p *Proxy) Stop(context.Context) error {
	p.health.close()
	p.localhost.close()
	return nil
}

// Cleanup implements sink.Cleaner.
func (p *Proxy) Cleanup(context.Context) error {
	if p.opts.Fault == LeavesTable {
		return nil
	}
	return load(fmt.Sprintf("add table inet %[1]s\ndelete table inet %[1]s\n", p.opts.Table))
}

// load runs nft with a script in a file. It uses no pipe: if this process were killed
// while writing to a pipe, nft would run only a part of the script.
func load(script string) error {
	file, err := os.CreateTemp("", "kpng-reference-")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name())
	defer file.Close()
	if _, err := file.WriteString(script); err != nil {
		return err
	}
	if out, err := nft("-f", file.Name()); err != nil {
		return fmt.Errorf("nft: %w: %.500s", err, out)
	}
	return nil
}

// nft runs the command nft. If this process ends, the kernel kills the command.
func nft(args ...string) ([]byte, error) {
	runtime.LockOSThread() // Pdeathsig kills nft when the thread that started it ends
	defer runtime.UnlockOSThread()
	cmd := exec.Command(netnstest.Program("nft"), args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd.CombinedOutput()
}

// objectLine matches the first line of a chain, set or counter in nft's output.
var objectLine = regexp.MustCompile(`(?m)^\t(chain|set|counter) (\S+) \{$`)

// readTable returns the chains, sets and counters of an existing table. If the table does not
// exist, it returns nil. The proxy needs the names of these objects, so that it can
// change the table instead of replacing it. If a transaction deletes and creates a table,
// a packet may find neither the old rules nor the new ones.
func readTable(table string) *ruleset {
	text, err := nft("list", "table", "inet", table)
	if err != nil {
		return nil
	}
	r := &ruleset{chains: map[string]string{}, sets: map[string]string{}, counters: map[string]string{}}
	for _, m := range objectLine.FindAllSubmatch(text, -1) {
		map[string]map[string]string{"chain": r.chains, "set": r.sets, "counter": r.counters}[string(m[1])][string(m[2])] = ""
	}
	return r
}
