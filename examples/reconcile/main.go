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
// to the chains.
type dataplane struct{ table string }

// chain is an object: the rules of one frontend. Its key is the IP family and the element of the
// map, for example "ip 10.96.0.80 . tcp . 80". List knows only the digest of the rules.
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
		ip := "ip"
		if f.Family == api.IPv6 {
			ip = "ip6"
		}
		protocol := strings.ToLower(f.Protocol.String())
		fromNode := "fib saddr type local meta l4proto " + protocol
		fromElsewhere := "meta l4proto " + protocol // the rules for the node are before these
		rules := traffic(fromNode, ip, f.Node, f.Masquerade != nodeview.MasqueradeIfConfigured)
		rules += traffic(fromElsewhere, ip, f.Elsewhere, f.Masquerade == nodeview.MasqueradeAll)
		key := fmt.Sprintf("%s %s . %s . %d", ip, f.Addr, protocol, f.Port)
		emit(key, chain{rules, fmt.Sprintf("%x", sha256.Sum256([]byte(rules)))})
	}
	return nil
}

// masquerade marks a packet. The chain postrouting of table.nft replaces the source address of
// such packets. kube-proxy uses the bit 0x4000, and old kubelets drop packets with 0x8000.
const masquerade = "meta mark set meta mark | 0x2000"

// traffic returns rules for traffic to a frontend. The argument match selects this traffic.
func traffic(match, ip string, t nodeview.Traffic, masqueradeAll bool) string {
	var rules strings.Builder
	for i, e := range t.Endpoints {
		// The rule for the first of 3 endpoints matches 1 in 3 connections, the next rule 1 in 2
		// of the others, and the last rule all others.
		random := fmt.Sprintf("numgen random mod %d 0", len(t.Endpoints)-i)
		dnat := fmt.Sprintf("dnat %s to %s", ip, e.AddrPort())
		if masqueradeAll {
			fmt.Fprintln(&rules, match, random, masquerade, dnat)
			continue
		}
		fmt.Fprintln(&rules, match, ip, "saddr ==", e.Addr, random, masquerade, dnat) // hairpin
		fmt.Fprintln(&rules, match, ip, "saddr !=", e.Addr, random, dnat)
	}
	if t.Verdict == nodeview.Drop {
		fmt.Fprintln(&rules, match, "drop")
	} else {
		fmt.Fprintln(&rules, match, "reject") // after endpoints, no connection gets here
	}
	return rules.String()
}

// element matches an element of a map in the output of nft.
var element = regexp.MustCompile(`(\S+ \. \w+ \. \d+) comment "(\w+)" : goto (ip6?)-`)

// List emits the objects that exist. It creates the table if it does not exist.
func (d dataplane) List(ctx context.Context, emit func(string, chain)) error {
	out, err := nft(ctx, "list table inet "+d.table)
	if err != nil {
		_, err = nft(ctx, fmt.Sprintf(skeleton, d.table))
	}
	for _, m := range element.FindAllStringSubmatch(out, -1) {
		match, digest, ip := m[1], m[2], m[3]
		emit(ip+" "+match, chain{digest: digest})
	}
	return err
}

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
// would run a part of the script. A script that is too long is refused, so it is divided.
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
