// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command reconcile is a small service proxy, made with package reconcile. It writes only
// differences to its nftables table, and repairs what other programs change. It serves only
// IPv4, without node ports, traffic policies and connections of endpoints to themselves.
package main

import (
	"context"
	"crypto/sha256"
	"fmt"
	"os/exec"
	"regexp"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/reconcile"
)

// dataplane is an nftables table. It has a chain for each frontend, and a map that leads to
// the chains. The comment of an element of the map is a digest of the chain's rules. So List
// need not read the rules.
type dataplane struct{ table string }

type chain struct{ rules, digest string }

func (dataplane) Plan(view *api.View, emit func(string, chain)) error {
	for f := range nodeview.Frontends(view) {
		if f.Kind == nodeview.NodePort || f.Port == 0 || f.Family != api.IPv4 {
			continue
		}
		protocol, rules := strings.ToLower(f.Protocol.String()), ""
		for i, e := range f.Elsewhere.Endpoints {
			rules += fmt.Sprintf("meta l4proto %s numgen random mod %d 0 dnat ip to %s\n", protocol, len(f.Elsewhere.Endpoints)-i, e.AddrPort())
		}
		emit(fmt.Sprintf("%s . %s . %d", f.Addr, protocol, f.Port), chain{rules + "reject\n", fmt.Sprintf("%x", sha256.Sum256([]byte(rules)))})
	}
	return nil
}

func (d dataplane) Apply(ctx context.Context, ops []reconcile.Op[string, chain]) error {
	var s strings.Builder
	for _, op := range ops {
		name := strings.NewReplacer(" . ", "-", ".", "-").Replace("to-" + op.Key)
		if op.Old != nil {
			fmt.Fprintf(&s, "delete element inet %s frontends { %s }\n", d.table, op.Key)
		}
		fmt.Fprintf(&s, "add chain inet %[1]s %[2]s\nflush chain inet %[1]s %[2]s\n", d.table, name)
		if op.New == nil {
			fmt.Fprintf(&s, "delete chain inet %s %s\n", d.table, name)
			continue
		}
		for rule := range strings.Lines(op.New.rules) {
			fmt.Fprintf(&s, "add rule inet %s %s %s", d.table, name, rule)
		}
		fmt.Fprintf(&s, "add element inet %s frontends { %s comment %q : goto %s }\n", d.table, op.Key, op.New.digest, name)
	}
	_, err := nft(ctx, s.String())
	if err != nil && ctx.Err() == nil {
		return reconcile.Refused(err) // nft has changed nothing
	}
	return err
}

var element = regexp.MustCompile(`(\S+ \. \w+ \. \d+) comment "(\w+)" : goto`)

// List creates the table if it does not exist.
func (d dataplane) List(ctx context.Context, emit func(string, chain)) error {
	out, err := nft(ctx, fmt.Sprintf("list map inet %s frontends", d.table))
	if err != nil {
		_, err = nft(ctx, fmt.Sprintf(`table inet %s {
			map frontends { type ipv4_addr . inet_proto . inet_service : verdict; }
			chain lead { ip daddr . meta l4proto . th dport vmap @frontends; }
			chain prerouting { type nat hook prerouting priority -100; jump lead; }
			chain output { type nat hook output priority -100; jump lead; }
		}`, d.table))
	}
	for _, m := range element.FindAllStringSubmatch(out, -1) {
		emit(m[1], chain{digest: m[2]})
	}
	return err
}

func (d dataplane) Cleanup(ctx context.Context) error {
	_, err := nft(ctx, fmt.Sprintf("add table inet %[1]s\ndelete table inet %[1]s\n", d.table))
	return err
}

func nft(ctx context.Context, script string) (string, error) {
	cmd := exec.CommandContext(ctx, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(script)
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("run nft: %w: %.500s", err, out)
	}
	return string(out), err
}

func main() {
	app.Main(reconcile.New(dataplane{"reconcile"}, reconcile.Options[string, chain]{Equal: func(is, want chain) bool { return is.digest == want.digest }}))
}
