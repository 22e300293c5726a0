// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfilter

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// ListChains returns after quietListings consecutive interrupted listings without a new
// chain.
const quietListings = 3

// ListChains calls f with the attributes of each chain of a family, such as NFPROTO_INET.
// The function f has to return true for a chain that concerns the caller and that the
// caller has not seen before. ListChains may call f several times with the same chain.
//
// The kernel answers in several messages. Before each further message, it skips as many
// chains as it has already sent, in all tables of the family. So if a table changes
// between two messages, the listing is interrupted and may miss chains. Then ListChains
// repeats the listing until f returns true for no chain.
func (c *Conn) ListChains(ctx context.Context, family byte, f func(attributes []byte) (isNew bool)) error {
	for quiet := 0; ; quiet++ {
		err := c.Query(ctx, func(w *Builder) {
			w.End(w.Begin(nfTables|unix.NFT_MSG_GETCHAIN, unix.NLM_F_DUMP, family))
		}, func(attributes []byte) {
			if f(attributes) {
				quiet = 0
			}
		})
		interrupted := errors.Is(err, ErrInterrupted)
		switch {
		case err == nil, interrupted && quiet == quietListings:
			return nil
		case !interrupted, ctx.Err() != nil:
			return fmt.Errorf("list chains of nf_tables: %w", err)
		}
	}
}

// Generation returns the number of the last nf_tables transaction in the network
// namespace. The number changes with each change of a table.
func (c *Conn) Generation(ctx context.Context) (generation uint32, err error) {
	err = c.Query(ctx, func(w *Builder) {
		w.End(w.Begin(nfTables|unix.NFT_MSG_GETGEN, 0, unix.NFPROTO_UNSPEC))
	}, func(attributes []byte) {
		generation = Uint32(Attribute(attributes, unix.NFTA_GEN_ID))
	})
	if err != nil {
		return 0, fmt.Errorf("read the generation of nf_tables: %w", err)
	}
	return generation, nil
}

// nfTables is the part of message types that selects nf_tables.
const nfTables = unix.NFNL_SUBSYS_NFTABLES << 8
