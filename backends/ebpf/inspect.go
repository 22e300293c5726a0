// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
)

// Inspect implements [backends.Inspector]. Its lines are the endpoints that the maps have for
// the frontend. If the programs cannot handle the frontend, a line says why. If the other
// sink is an Inspector, its description follows.
func (b *backend) Inspect(ctx context.Context, addr netip.Addr, protocol api.Protocol, port int32, view *api.View) (string, error) {
	var out strings.Builder
	fmt.Fprintf(&out, "maps %s\n", b.opts.directory())
	if err := b.inspect(&out, addr, protocol, port, view); err != nil {
		return "", err
	}
	if proxy, ok := sink.As[backends.Inspector](b.proxy); ok {
		text, err := proxy.Inspect(ctx, addr, protocol, port, view)
		if err != nil {
			return "", err
		}
		out.WriteString(text)
	}
	return out.String(), nil
}

func (b *backend) inspect(out *strings.Builder, addr netip.Addr, protocol api.Protocol, port int32, view *api.View) error {
	key, is, err := b.endpointsOf(toFrontend(addr, protocol, port))
	if err != nil {
		return err
	}
	var should []string
	if view != nil {
		p := b.planner()
		for f := range nodeview.Frontends(view) {
			here := f.Addr == addr || f.Kind == nodeview.NodePort && f.Family == api.FamilyOf(addr)
			if here && f.Protocol == protocol && f.Port == port {
				if reason := p.unsuitable(view, &f); reason != "" {
					fmt.Fprintf(out, "  not handled by eBPF: %s\n", reason)
				}
			}
		}
		all, tooLarge := p.plan(view)
		if tooLarge != "" {
			fmt.Fprintf(out, "  not handled by eBPF: %s\n", tooLarge)
		}
		for _, w := range all {
			if w.frontend == key {
				for i, a := range w.endpoints {
					var other address
					if w.others != nil {
						other = w.others[i]
					}
					should = append(should, slotLine(i, a, other))
				}
			}
		}
	}
	if len(is) == 0 && len(should) == 0 {
		out.WriteString("  nothing leads to it\n")
	}
	for i := range max(len(is), len(should)) {
		switch {
		case i < len(is) && i < len(should) && is[i] == should[i] || view == nil:
			fmt.Fprintf(out, "  %s\n", is[i])
		default:
			if i < len(is) {
				fmt.Fprintf(out, "+ %s\n", is[i])
			}
			if i < len(should) {
				fmt.Fprintf(out, "- %s\n", should[i])
			}
		}
	}
	return nil
}

// endpointsOf returns the key of the frontend at an address and port, and a line for each
// of its slots. The key may be the key of a node port.
func (b *backend) endpointsOf(at frontendKey) (key frontendKey, lines []string, err error) {
	frontends, err := b.openMap("frontends")
	if errors.Is(err, fs.ErrNotExist) {
		return at, nil, nil // without the map, no frontend has a slot
	}
	if err != nil {
		return at, nil, err
	}
	defer frontends.Close()
	slots, err := b.openMap("slots")
	if err != nil {
		return at, nil, err
	}
	defer slots.Close()
	nodeIPs, err := b.openMap("node_ips")
	if err != nil {
		return at, nil, err
	}
	defer nodeIPs.Close()
	key, l, err := find(frontends, nodeIPs, at)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return key, nil, nil
	} else if err != nil {
		return key, nil, fmt.Errorf("read map frontends: %w", err)
	}
	for i := range l.Count {
		var a, other address
		err := slots.Lookup(slotKey{List: l.ID, Index: i}, &a)
		if err == nil && a.Other != 0 {
			err = slots.Lookup(slotKey{List: l.ID, Index: othersFrom + i}, &other)
		}
		if err != nil {
			return key, nil, fmt.Errorf("read slot %d of list %d: %w", i, l.ID, err)
		}
		lines = append(lines, slotLine(int(i), a, other))
	}
	return key, lines, nil
}

// slotLine describes a slot: its endpoint and, if weights differ, its other endpoint.
func slotLine(i int, a, other address) string {
	if a.Other == 0 {
		return fmt.Sprintf("slot %d: %s", i, a)
	}
	return fmt.Sprintf("slot %d: %s, or %s for %.2f %%", i, a, other, float64(a.Other)/(1<<16)*100)
}

func (b *backend) openMap(name string) (*ebpf.Map, error) {
	m, err := ebpf.LoadPinnedMap(filepath.Join(b.opts.directory(), name), &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("open map %s: %w", name, err)
	}
	return m, nil
}
