// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package backendtest has code that the tests of several backends share. Importing it
// defines the flags -patience and -report.
package backendtest

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/conformance"
	"github.com/kpng-project/kpng/internal/backendoptions"
	"github.com/kpng-project/kpng/internal/conntrack"
	"github.com/kpng-project/kpng/internal/healthcheck"
	"github.com/kpng-project/kpng/internal/nodeaddrs"
	"github.com/kpng-project/kpng/internal/nodesinks"
	"github.com/kpng-project/kpng/internal/ownership"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
)

// Patience is a value for conformance.Options.Patience.
var Patience = flag.Duration("patience", 20*time.Second, "how long the conformance kit waits, longer on a slow machine")

// Report is a value for conformance.Options.Report.
var Report = flag.String("report", "", "`file` to which the conformance kit writes its results as YAML")

// NewSink returns a backend together with a health-check server, as on a node. If the
// site has loopback addresses for node ports, node ports are served on localhost, too.
// The function newBackend makes the backend from the source of node-port addresses and
// from a conntrack.Reconciler.
func NewSink(site conformance.Site, newBackend func(nodeaddr.Source, sink.Sink) (sink.Sink, error)) (sink.Sink, error) {
	addrs, err := nodeaddrs.New(nodeaddrs.Options{Selection: Selection(site)})
	if err != nil {
		return nil, err
	}
	backend, err := newBackend(addrs, conntrack.New(conntrack.Options{NodeAddresses: addrs}))
	if err != nil {
		return nil, err
	}
	n := &nodeSink{backend: backend, health: healthcheck.New(healthcheck.Options{NodeAddresses: addrs})}
	if _, ok := sink.As[backendoptions.Sharer](backend); ok { // the backend userspace serves loopback addresses itself
		node, err := nodesinks.New(nodesinks.Options{Addresses: addrs})
		if err != nil {
			return nil, err
		}
		if n.localhost, err = node.Localhost(); err != nil {
			return nil, err
		}
	}
	return n, nil
}

// Selection returns the addresses of a site at which node ports are served.
func Selection(site conformance.Site) (s nodeaddr.Selection) {
	for _, cidr := range site.NodePortCIDRs {
		s = append(s, cidr.String())
	}
	return s
}

type nodeSink struct {
	backend   sink.Sink
	health    healthcheck.Server
	localhost sink.Sink // or nil
}

func (n *nodeSink) Unwrap() sink.Sink { return n.backend }

func (n *nodeSink) Start(ctx context.Context) error {
	var err error
	if s, ok := sink.As[sink.Starter](n.backend); ok {
		err = s.Start(ctx)
	}
	if s, ok := n.localhost.(sink.Starter); ok {
		err = errors.Join(err, s.Start(ctx))
	}
	return errors.Join(err, n.health.Start(ctx))
}

func (n *nodeSink) Sync(ctx context.Context, c *sink.Changes) error {
	if err := n.health.Sync(ctx, c); err != nil {
		return err
	}
	err := n.backend.Sync(ctx, c)
	if err == nil && n.localhost != nil {
		err = n.localhost.Sync(ctx, c)
	}
	return err
}

func (n *nodeSink) Stop(ctx context.Context) error {
	err := n.health.Stop(ctx)
	if s, ok := n.localhost.(sink.Stopper); ok {
		err = errors.Join(err, s.Stop(ctx))
	}
	if s, ok := sink.As[sink.Stopper](n.backend); ok {
		err = errors.Join(err, s.Stop(ctx))
	}
	return err
}

// View returns the view that a node has of a service with TCP port 80, these cluster IPs,
// and endpoints at port 8080. The prefix "!" marks an endpoint on the node, and the
// prefix "~" marks a draining endpoint. Each function in edits modifies the service. A
// nil function does nothing.
func View(node *api.Node, name string, ips, endpoints []string, edits ...func(*api.Service)) *api.View {
	svc := sinktest.Service(name, strings.Join(ips, " ")+" 80>8080")
	svc.IPFamilies = []api.Family{api.IPv4, api.IPv6}
	for _, edit := range edits {
		if edit != nil {
			edit(svc)
		}
	}
	var words []string
	for _, text := range endpoints {
		addr, here := strings.CutPrefix(text, "!")
		addr, drains := strings.CutPrefix(addr, "~")
		word := addr + "@elsewhere"
		if here {
			word = addr + "@" + node.Name
		}
		if drains {
			word += "~draining"
		}
		words = append(words, word)
	}
	slices := sinktest.Slices(svc, strings.Join(words, " "))
	for _, slice := range slices {
		for i := range slice.Ports {
			slice.Ports[i].Port = 8080 // also of ports that edits added
		}
	}
	return nodeview.View(&api.ServiceState{Service: svc, Slices: slices}, node)
}

var owners sync.Map // the last argument owner of TakeOver for each key

// TakeOver releases the objects of the owner in the last call with this key. The kernel
// does the same when a process is killed. Call it before a backend starts in place of
// another one that did not stop. The key identifies the objects.
func TakeOver(owner *ownership.Owner, key ...any) {
	if last, ok := owners.Swap(fmt.Sprint(key...), owner); ok {
		last.(*ownership.Owner).Release()
	}
}
