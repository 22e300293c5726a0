// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfilter

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/kpng-project/kpng/internal/netnstest"
	"golang.org/x/sys/unix"
)

// change adds or deletes objects of a table in one transaction.
func change(ctx context.Context, c *Conn, message uint16, names ...string) error {
	return c.Transact(ctx, func(w *Builder) {
		if len(names) == 0 {
			at := w.Begin(nfTables|message, unix.NLM_F_CREATE, unix.NFPROTO_IPV4)
			w.String(unix.NFTA_TABLE_NAME, "test")
			w.End(at)
		}
		for _, name := range names {
			at := w.Begin(nfTables|message, unix.NLM_F_CREATE, unix.NFPROTO_IPV4)
			w.String(unix.NFTA_CHAIN_TABLE, "test")
			w.String(unix.NFTA_CHAIN_NAME, name)
			w.End(at)
		}
	})
}

// TestListChainsDuringChanges checks that a listing has all chains although another
// program constantly changes the table.
func TestListChainsDuringChanges(t *testing.T) {
	ns := netnstest.New(t)
	c, other := NewConn(ns.FD), NewConn(ns.FD)
	defer c.Close()
	defer other.Close()
	var names []string
	for i := range 2000 {
		names = append(names, fmt.Sprintf("chain%04d", i))
	}
	if err := errors.Join(change(t.Context(), c, unix.NFT_MSG_NEWTABLE), change(t.Context(), c, unix.NFT_MSG_NEWCHAIN, names...)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		for ctx.Err() == nil {
			if err := errors.Join(change(ctx, other, unix.NFT_MSG_NEWCHAIN, "other"), change(ctx, other, unix.NFT_MSG_DELCHAIN, "other")); err != nil {
				t.Error(err)
				return
			}
		}
	})
	defer running.Wait()
	defer cancel()
	for range 20 {
		found := map[string]bool{}
		err := c.ListChains(t.Context(), unix.NFPROTO_IPV4, func(attributes []byte) bool {
			name := String(Attribute(attributes, unix.NFTA_CHAIN_NAME))
			isNew := !found[name]
			found[name] = true
			return isNew
		})
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			if !found[name] {
				t.Fatalf("chain %s is missing in a list of %d chains", name, len(found))
			}
		}
	}
	cancelled, stop := context.WithCancel(t.Context())
	stop()
	if err := c.ListChains(cancelled, unix.NFPROTO_IPV4, func([]byte) bool { return true }); !errors.Is(err, context.Canceled) {
		t.Errorf("with a cancelled context, ListChains returned %v", err)
	}
}

// TestGenerationChangesWithTables checks that Generation returns another number after a
// change, and the same number without a change.
func TestGenerationChangesWithTables(t *testing.T) {
	c := NewConn(netnstest.New(t).FD)
	defer c.Close()
	var got []uint32
	read := func() {
		t.Helper()
		generation, err := c.Generation(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, generation)
	}
	read()
	read()
	if err := change(t.Context(), c, unix.NFT_MSG_NEWTABLE); err != nil {
		t.Fatal(err)
	}
	read()
	if got[0] != got[1] || got[1] == got[2] {
		t.Errorf("generations %v, want two equal ones and another one", got)
	}
}
