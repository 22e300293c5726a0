// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package reference is a proxy to try the conformance kit on: complete, short and
// slow. It writes all of its nftables table anew for every change, and does wrong
// what it is told to.
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
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// Options set a Proxy up.
type Options struct {
	// Table is the name of its table.
	Table string
	// NodePortCIDRs are the addresses with node ports.
	NodePortCIDRs []netip.Prefix
	// ClusterCIDRs have all pods.
	ClusterCIDRs []netip.Prefix
	// PodInterfaces is how the names of interfaces to pods begin.
	PodInterfaces string
	// MasqueradeOutside and MasqueradeAll say which traffic to cluster IPs gets the
	// node's address: that from outside ClusterCIDRs, or all.
	MasqueradeOutside, MasqueradeAll bool
	// Fault is what it does wrong.
	Fault Fault
}

// Proxy is a sink.Sink.
type Proxy struct {
	opts     Options
	node     *api.Node
	services map[types.NamespacedName]*api.ServiceEndpoints
	// passing says that a pass has begun and not ended. The services of earlier
	// passes are forgotten then, and the table stays as it is.
	passing bool
	// written is what the table has besides rules, nil if it is not there.
	written *ruleset
	flows   flows
	health  health
}

// New returns a Proxy.
func New(opts Options) *Proxy {
	return &Proxy{opts: opts, health: health{cidrs: opts.NodePortCIDRs, fault: opts.Fault}}
}

// Sync implements sink.Sink.
func (p *Proxy) Sync(ctx context.Context, c *sink.Changes) error {
	p.node = c.Node
	if c.First {
		p.services = map[types.NamespacedName]*api.ServiceEndpoints{}
	}
	for s := range c.Services {
		if s.New == nil || p.opts.Fault == LosesRenamed && renamed(s) {
			delete(p.services, s.Key)
		} else {
			p.services[s.Key] = p.opts.Fault.apply(s.New)
		}
	}
	p.passing = (p.passing || c.First) && !c.Last
	if p.passing {
		return nil // the table is written as a whole
	}
	var services []*api.ServiceEndpoints
	for _, se := range p.services {
		services = append(services, se)
	}
	slices.SortFunc(services, func(a, b *api.ServiceEndpoints) int { return api.CompareKeys(a.Key(), b.Key()) })
	if p.opts.Fault == IgnoresClaims {
		slices.Reverse(services)
	}
	if p.opts.Fault == RefusesSCTP && slices.ContainsFunc(services, hasSCTP) {
		return errors.New("SCTP is unheard of")
	}
	if p.opts.Fault == HealthFirst {
		if err := p.health.serve(services); err != nil {
			return errors.Join(errors.New("nothing else is done"), err)
		}
	}
	rules := render(&p.opts, p.node, services)
	if p.written == nil {
		p.written = installed(p.opts.Table)
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
	if p.opts.Fault != KeepsFlows {
		if err := p.flows.reconcile(&p.opts, services); err != nil {
			return err
		}
	}
	return p.health.serve(services)
}

// Stop implements sink.Stopper.
func (p *Proxy) Stop(context.Context) error {
	p.health.close()
	return nil
}

// Cleanup implements sink.Cleaner.
func (p *Proxy) Cleanup(context.Context) error {
	if p.opts.Fault == LeavesTable {
		return nil
	}
	return load(fmt.Sprintf("add table inet %[1]s\ndelete table inet %[1]s\n", p.opts.Table))
}

// load has nft load a script. That goes by a file, as a script that comes by a
// pipe may be cut off by the end of this process.
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

// nft runs nft, which dies with this process: what is killed programs no more.
func nft(args ...string) ([]byte, error) {
	runtime.LockOSThread() // whose end is what the child dies of
	defer runtime.UnlockOSThread()
	cmd := exec.Command("nft", args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd.CombinedOutput()
}

// object is a line of nft's with which a chain or a set begins.
var object = regexp.MustCompile(`(?m)^\t(chain|set) (\S+) \{$`)

// installed returns the chains and sets of a table that another process has left,
// or nil if there is none. To delete the table and to make it anew, in one step,
// would not do: a packet could pass the new chains just before they have rules, and
// the old ones just after.
func installed(table string) *ruleset {
	text, err := nft("list", "table", "inet", table)
	if err != nil {
		return nil
	}
	r := &ruleset{chains: map[string]string{}, sets: map[string]string{}}
	for _, m := range object.FindAllSubmatch(text, -1) {
		map[string]map[string]string{"chain": r.chains, "set": r.sets}[string(m[1])][string(m[2])] = ""
	}
	return r
}
