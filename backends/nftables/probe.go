// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/nft"
	"golang.org/x/sys/unix"
)

// feature is a kernel feature that this package needs.
type feature struct {
	// name describes the feature. The name may contain the kernel module or the first Linux
	// version that has the feature.
	name string
	// addMessage adds one message that only a kernel with the feature accepts.
	addMessage func(*nft.Writer)
}

// features lists all needed features. One netlink message tests each feature. The first
// two messages create the table and the chain that later messages use.
var features = []feature{
	{"tables of family inet (CONFIG_NF_TABLES_INET)", (*nft.Writer).NewTable},
	{"chains", func(w *nft.Writer) { w.NewChain("probe", nft.Hook{}) }},
	{"chains of type nat in tables of family inet (Linux 5.2, module nft_chain_nat)", func(w *nft.Writer) {
		w.NewChain("probe-nat", nft.NAT(unix.NF_INET_PRE_ROUTING, 0))
	}},
	{"maps", func(w *nft.Writer) { w.NewSet(mapID{kind: kindEndpoints, family: api.IPv4}.layout()) }},
	{"expression fib (module nft_fib_inet)", withRule(nft.StartsHere())},
	{"expression numgen (module nft_numgen)", withRule(number(api.IPv4).Random(2).Then(""))},
	{"expression ct (module nft_ct)", withRule(nft.IsTranslated())},
	{"expression hash (module nft_hash)", withRule(clientKey(api.IPv4, 1).Then(""))},
	{"expression nat (module nft_nat)", withRule(nft.NewKey(api.IPv4).Destination().Then(nft.DNATTo(api.IPv4, 0, 0)))},
	{"expression masq (module nft_masq)", withRule(nft.Masquerade)},
	{"expression reject (module nft_reject_inet)", withRule(nft.Reject)},
}

// features returns the features that a table with these options needs.
func (o *Options) features() []feature {
	if !o.Stats {
		return features
	}
	return append(slices.Clip(features), feature{"counters in elements, which the option Stats needs (module nft_counter)", func(w *nft.Writer) {
		e := (&list{listKey: listKey{family: api.IPv4, port: 1}, number: plainLists.first}).slotID(0)
		writeElements(w, unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, elementRef{&e, &value{counted: true}})
	}})
}

// withRule returns a function that adds a rule to the chain "probe".
func withRule(rule nft.Rule) func(*nft.Writer) {
	return func(w *nft.Writer) { w.AddRules("probe", []nft.Rule{rule}) }
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
			f.addMessage(&nft.Writer{Builder: b, Table: probeTable})
		}
	}, func(err error) { outcomes = append(outcomes, err) })
	if err = nft.Explain(err); errors.Is(err, nft.ErrNoTables) {
		return err
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
