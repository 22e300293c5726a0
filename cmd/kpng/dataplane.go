// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/nodeaddr"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/cobra"
)

// inspector is a sink that tells what the dataplane of this machine has for a
// frontend, beside what the view says it should have.
type inspector interface {
	sink.Sink
	Dataplane(ctx context.Context, addr netip.Addr, protocol api.Protocol, port int32, view *api.ServiceEndpoints) (string, error)
}

// newInspector returns the backend of that name, which has to be an inspector.
func newInspector(name, instance string) (inspector, error) {
	var known []string
	for _, b := range backends() {
		cmd := &cobra.Command{}
		newSink := b.new(cmd)
		if b.name == name && instance != "" {
			if err := cmd.Flags().Set("instance", instance); err != nil {
				return nil, fmt.Errorf("--instance of the backend %s: %w", name, err)
			}
		}
		s, err := newSink()
		if err != nil {
			return nil, err
		}
		i, ok := s.(inspector)
		if !ok {
			continue
		}
		if b.name == name {
			return i, nil
		}
		known = append(known, b.name)
	}
	if len(known) == 0 {
		return nil, fmt.Errorf("--dataplane %q: no backend on this platform tells what it has programmed", name)
	}
	return nil, fmt.Errorf("--dataplane %q is not a backend that tells what it has programmed: %s", name, strings.Join(known, ", "))
}

// inspect prints what the dataplane has for each of the explained frontends. asked
// is the address that the question was about, if it was about one.
func inspect(ctx context.Context, w io.Writer, i inspector, e *nodeview.Explanation, node *api.Node, asked netip.Addr) error {
	for _, f := range e.Frontends {
		for _, addr := range addressesOf(f.FrontendKey, node, asked) {
			text, err := i.Dataplane(ctx, addr, f.Protocol, f.Port, e.View)
			if err != nil {
				return fmt.Errorf("look at the dataplane for %s of %s: %w", f.FrontendKey, e.Service, err)
			}
			at := f.FrontendKey.String()
			if f.Kind == nodeview.NodePort {
				at += " at " + addr.String()
			}
			if _, err := fmt.Fprintf(w, "\nDataplane for %s:\n  %s\n", at, strings.ReplaceAll(strings.TrimRight(text, "\n"), "\n", "\n  ")); err != nil {
				return err
			}
		}
	}
	return nil
}

// addressesOf returns where a frontend is looked for: a node port is at the
// address asked for, or at the node's own.
func addressesOf(f nodeview.FrontendKey, node *api.Node, asked netip.Addr) []netip.Addr {
	switch {
	case f.Addr.IsValid():
		return []netip.Addr{f.Addr}
	case asked.IsValid():
		return []netip.Addr{asked}
	}
	var addrs []netip.Addr
	for _, a := range nodeaddr.OfNode(node) {
		if api.FamilyOf(a) == f.Family {
			addrs = append(addrs, a)
		}
	}
	return addrs
}
