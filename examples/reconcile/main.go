// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command reconcile is the backend of docs/build/backend.md: a small service proxy that
// uses package reconcile. It writes only differences to its nftables table, and repairs what
// other programs change. It does not serve node ports, all-ports services and load-balancer
// IPs with source ranges.
package main

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"fmt"
	"os/exec"
	"regexp"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/reconcile"
)

// dataplane is an nftables table. It has a chain of rules for each frontend, and maps that lead
// to the chains. The key of a chain is the IP family and the element of the map.
type dataplane struct{ table string }

// chain has the rules of a frontend. List knows only their digest.
type chain struct{ rules, digest string }

// skeleton is the table without frontends.
//
//go:embed table.nft
var skeleton string

// Plan emits the chain of each frontend.
func (dataplane) Plan(view *api.View, emit func(string, chain)) error {
	for f := range nodeview.Frontends(view) {
		if f.Kind == nodeview.NodePort || f.Port == 0 || f.Sources.Restricted {
			continue // not supported
		}
		ip := map[api.Family]string{api.IPv4: "ip", api.IPv6: "ip6"}[f.Family]
		protocol := strings.ToLower(f.Protocol.String())
		rules := traffic("fib saddr type local meta l4proto "+protocol, ip, f.Node, f.Masquerade != nodeview.MasqueradeIfConfigured)
		rules += traffic("meta l4proto "+protocol, ip, f.Elsewhere, f.Masquerade == nodeview.MasqueradeAll)
		emit(fmt.Sprintf("%s %s . %s . %d", ip, f.Addr, protocol, f.Port), chain{rules, fmt.Sprintf("%x", sha256.Sum256([]byte(rules)))})
	}
	return nil
}

// traffic returns the rules for the part of the traffic to a frontend that match selects.
func traffic(match, ip string, t nodeview.Traffic, masquerade bool) (rules string) {
	mark := "meta mark set meta mark | 0x8000" // chain postrouting masquerades such packets
	others := map[bool]string{true: mark}[masquerade]
	for i, e := range t.Endpoints {
		// Each rule matches one in n of the packets that reach it. The source of a packet from
		// the endpoint itself is always replaced.
		rule := fmt.Sprintf("%s %s saddr %%s %s numgen random mod %d 0 %%s dnat %[2]s to %[5]s\n", match, ip, e.Addr, len(t.Endpoints)-i, e.AddrPort())
		rules += fmt.Sprintf(rule, "==", mark) + fmt.Sprintf(rule, "!=", others)
	}
	return rules + match + map[bool]string{true: " drop\n", false: " reject\n"}[t.Verdict == nodeview.Drop]
}

// List creates the table if it does not exist.
func (d dataplane) List(ctx context.Context, emit func(string, chain)) error {
	out, err := nft(ctx, "list table inet "+d.table)
	if err != nil {
		_, err = nft(ctx, fmt.Sprintf(skeleton, d.table))
	}
	for _, m := range element.FindAllStringSubmatch(out, -1) {
		emit(m[3]+" "+m[1], chain{digest: m[2]})
	}
	return err
}

var element = regexp.MustCompile(`(\S+ \. \w+ \. \d+) comment "(\w+)" : goto (\w+)`)

// Apply writes one script, which the kernel applies completely or not at all.
func (d dataplane) Apply(ctx context.Context, ops []reconcile.Op[string, chain]) error {
	var s strings.Builder
	for _, op := range ops {
		ip, match, _ := strings.Cut(op.Key, " ")
		name := strings.NewReplacer(" . ", "-", " ", "-", ":", "_").Replace(op.Key)
		if op.Old != nil {
			fmt.Fprintf(&s, "delete element inet %s frontends_%s { %s }\n", d.table, ip, match)
		}
		fmt.Fprintf(&s, "add chain inet %[1]s %[2]s\nflush chain inet %[1]s %[2]s\n", d.table, name)
		if op.New == nil {
			fmt.Fprintf(&s, "delete chain inet %s %s\n", d.table, name)
		} else {
			fmt.Fprintf(&s, "table inet %s {\nchain %s {\n%s}\n}\n", d.table, name, op.New.rules)
			fmt.Fprintf(&s, "add element inet %s frontends_%s { %s comment %q : goto %s }\n", d.table, ip, match, op.New.digest, name)
		}
	}
	_, err := nft(ctx, s.String())
	return err
}

// Cleanup deletes the table.
func (d dataplane) Cleanup(ctx context.Context) error {
	_, err := nft(ctx, fmt.Sprintf("add table inet %[1]s\ndelete table inet %[1]s\n", d.table))
	return err
}

// nft runs a script. It does not write the script to a pipe: if this process were killed, nft
// would run a part of the script. A script that is too long is refused, and so divided.
func nft(ctx context.Context, script string) (string, error) {
	out, err := exec.CommandContext(ctx, "nft", strings.SplitAfter(script, "\n")...).CombinedOutput()
	if err != nil && ctx.Err() == nil { // the kernel has changed nothing
		err = reconcile.Refused(fmt.Errorf("run nft: %w: %.500s", err, out))
	}
	return string(out), err
}

func equal(is, want chain) bool { return is.digest == want.digest }

func main() {
	app.Main(reconcile.New(dataplane{"reconcile"}, reconcile.Options[string, chain]{Equal: equal}))
}
