// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command dns-cache redirects DNS questions from the cluster's DNS service to a DNS cache
// on the node. While the cache does not answer, the questions go to the service. dns-cache
// does the work of the iptables rules of NodeLocal DNSCache, with nftables. README.md
// describes it.
package main

import (
	"context"
	_ "embed"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// table is the whole table. Each write replaces it in one transaction.
//
//go:embed table.nft
var table string

const (
	interval = 100 * time.Millisecond // between two probes of a cache
	patience = 500 * time.Millisecond // for the answer to a probe
	refresh  = time.Second            // between two refreshes of elements, which expire after 5 s
)

// redirection redirects the frontends of a service.
type redirection struct {
	table, service string
	caches         []net.IP // one per family

	mu        sync.Mutex
	frontends []nodeview.FrontendKey
	healthy   map[api.Family]bool
	written   time.Time
}

// Start probes the caches until ctx ends.
func (r *redirection) Start(ctx context.Context) error {
	r.healthy = map[api.Family]bool{}
	for _, ip := range r.caches {
		cache, _ := netip.AddrFromSlice(ip)
		go r.watch(ctx, cache.Unmap())
	}
	return nil
}

// SyncState remembers the frontends of the service.
func (r *redirection) SyncState(ctx context.Context, _ *api.Node, services []*api.View) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.frontends = nil
	for _, view := range services {
		if view.Key().String() != r.service {
			continue
		}
		for f := range nodeview.Frontends(view) {
			if f.Kind == nodeview.ClusterIP && f.Port == 53 {
				r.frontends = append(r.frontends, f.FrontendKey)
			}
		}
	}
	return r.write(ctx)
}

func (r *redirection) watch(ctx context.Context, cache netip.Addr) {
	family := api.FamilyOf(cache)
	for ctx.Err() == nil {
		healthy := probe(cache)
		r.mu.Lock()
		changed := healthy != r.healthy[family]
		if r.healthy[family] = healthy; changed || time.Since(r.written) > refresh {
			if err := r.write(ctx); err != nil {
				klog.FromContext(ctx).Error(err, "Table not written; retrying")
			}
		}
		r.mu.Unlock()
		if changed {
			klog.FromContext(ctx).Info("Cache changed", "cache", cache, "healthy", healthy)
		}
		if changed && !healthy { // the next packet of a client begins a new flow, to the service
			f := netlink.InetFamily(map[api.Family]int{api.IPv4: unix.AF_INET, api.IPv6: unix.AF_INET6}[family])
			if _, err := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, f, flowsTo(cache)); err != nil {
				klog.FromContext(ctx).Error(err, "Connection-tracking entries not deleted")
			}
		}
		time.Sleep(interval)
	}
}

// probe reports whether a cache answers a question for the name servers of the root.
func probe(cache netip.Addr) bool {
	c, err := net.Dial("udp", netip.AddrPortFrom(cache, 53).String())
	if err != nil {
		return false
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	question := []byte("\x7e\x57\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\x01")
	answer := make([]byte, 4096)
	if _, err := c.Write(question); err != nil {
		return false
	}
	n, err := c.Read(answer)
	return err == nil && n >= 12 && slices.Equal(answer[:2], question[:2])
}

// flowsTo matches the flows that are redirected to a cache.
type flowsTo netip.Addr

func (cache flowsTo) MatchConntrackFlow(f *netlink.ConntrackFlow) bool {
	return !f.Forward.DstIP.Equal(f.Reverse.SrcIP) && f.Reverse.SrcIP.Equal(net.IP(netip.Addr(cache).AsSlice()))
}

// write writes the table with the redirections to healthy caches.
func (r *redirection) write(ctx context.Context) error {
	redirections, caches := map[api.Family][]string{}, map[api.Family][]string{}
	for _, cache := range r.caches {
		family := map[bool]api.Family{true: api.IPv4, false: api.IPv6}[cache.To4() != nil]
		caches[family] = append(caches[family], cache.String())
		for _, f := range r.frontends {
			if f.Family == family && r.healthy[family] {
				redirections[family] = append(redirections[family], fmt.Sprintf("%s . %d . %d timeout 5s : %s", f.Addr, f.Protocol.Number(), f.Port, cache))
			}
		}
	}
	list := func(elements []string) string {
		if len(elements) == 0 {
			return ""
		}
		return "elements = { " + strings.Join(elements, ", ") + " }"
	}
	r.written = time.Now()
	return nft(ctx, fmt.Sprintf(table, r.table, list(redirections[api.IPv4]), list(redirections[api.IPv6]), list(caches[api.IPv4]), list(caches[api.IPv6])))
}

// Cleanup deletes the table.
func (r *redirection) Cleanup(ctx context.Context) error {
	return nft(ctx, fmt.Sprintf("add table inet %[1]s\ndelete table inet %[1]s\n", r.table))
}

// nft runs a script as one transaction. It does not use a pipe, which could break.
func nft(ctx context.Context, script string) error {
	if out, err := exec.CommandContext(ctx, "nft", script).CombinedOutput(); err != nil {
		return fmt.Errorf("run nft: %w: %.500s", err, out)
	}
	return nil
}

func main() {
	r := &redirection{}
	cmd := app.Command(app.Options{Name: "dns-cache", Sink: sink.FullStateOf(r), PortsOnly: true})
	cmd.Flags().StringVar(&r.table, "table", "kpng-dns-cache", "the `name` of the nftables table")
	cmd.Flags().StringVar(&r.service, "service", "kube-system/kube-dns", "the DNS `service`")
	cmd.Flags().IPSliceVar(&r.caches, "cache", []net.IP{net.IPv4(169, 254, 20, 10)}, "the `addresses` of the cache on the node, one for each family")
	app.Execute(cmd)
}
