// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/google/nftables/expr"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/nftrule"
	"golang.org/x/sys/unix"
)

// feature is a kernel feature that this package needs.
type feature struct {
	// name describes the feature. The name may contain the kernel module or the first Linux
	// version that has the feature.
	name string
	// addMessage adds one message that only a kernel with the feature accepts.
	addMessage func(*wire)
}

// features lists all needed features. One netlink message tests each feature. The first
// two messages create the table and the chain that later messages use.
var features = []feature{
	{"tables of family inet (CONFIG_NF_TABLES_INET)", (*wire).newTable},
	{"chains", func(w *wire) { w.newChain("probe", hook{}) }},
	{"chains of type nat in tables of family inet (Linux 5.2, module nft_chain_nat)", func(w *wire) {
		w.newChain("probe-nat", nat(unix.NF_INET_PRE_ROUTING, 0))
	}},
	{"maps", func(w *wire) { w.newSet(mapID{kind: kindEndpoints, family: api.IPv4}.layout()) }},
	{"expression fib (module nft_fib_inet)", withRule(nftrule.StartsHere())},
	{"expression numgen (module nft_numgen)", withRule([]expr.Any{&expr.Numgen{Register: nftrule.Reg(0), Modulus: 2, Type: unix.NFT_NG_RANDOM}})},
	{"expression ct (module nft_ct)", withRule([]expr.Any{&expr.Ct{Register: nftrule.Reg(0), Key: expr.CtKeySTATUS}})},
	{"expression hash (module nft_hash)", withRule(clientKey(api.IPv4, 1))},
	{"expression nat (module nft_nat)", withRule(nftrule.NewKey(api.IPv4).Destination().FollowedBy(nftrule.DNATTo(api.IPv4, 0, 0)))},
	{"expression masq (module nft_masq)", withRule([]expr.Any{&expr.Masq{FullyRandom: true}})},
	{"expression reject (module nft_reject_inet)", withRule([]expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_PORT_UNREACH}})},
}

// withRule returns a function that adds a rule to the chain "probe".
func withRule(rule []expr.Any) func(*wire) {
	return func(w *wire) { w.rule("probe", encodeRules(rule)[0]) }
}

// probeTable is the name of a table that never exists. No instance can have a table of
// this name.
const probeTable = "kpng/probe"

// checkKernel returns an error that names all missing kernel features. The kernel
// discards the messages after the test, but may load modules, see [netfilter.Conn.Check].
func (c *conn) checkKernel(ctx context.Context, features []feature) error {
	var outcomes []error
	err := c.Check(ctx, func(b *netfilter.Builder) {
		for _, f := range features {
			f.addMessage(&wire{b, probeTable})
		}
	}, func(err error) { outcomes = append(outcomes, err) })
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPROTONOSUPPORT) {
		return fmt.Errorf("the kernel lacks nf_tables (module nf_tables): %w", err)
	}
	if err != nil {
		return fmt.Errorf("check the kernel: %w", err)
	}
	if outcomes[0] != nil {
		outcomes = outcomes[:1] // without the table of the first feature, all other messages fail
	}
	var missing []string
	for i, err := range outcomes {
		if netfilter.IsTransient(err) {
			return fmt.Errorf("check the kernel for %s: %w", features[i].name, err)
		}
		if err != nil {
			missing = append(missing, features[i].name)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("the kernel lacks %s", strings.Join(missing, ", "))
	}
	return nil
}
