// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack

import (
	"context"
	"errors"
	"fmt"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netfilter"
	"golang.org/x/sys/unix"
)

// batchSize is the number of deletions in one request.
const batchSize = 64

// kind is the family and the protocol of all connections in one dump of the table.
type kind struct {
	family   api.Family
	protocol uint8
}

// deleteStale deletes the stale flows of kind k that match a filter. If a stale flow is
// an established connection, it passes the flow to the function reset instead. It
// returns how many entries it has read and how many it has deleted. It also returns the
// identities of the entries that the kernel would create for late replies of the
// deleted flows. It deletes while it reads, so it needs two connections.
func deleteStale(ctx context.Context, reader, writer *netfilter.Conn, k kind, f filter, stale func(flow) bool, reset func(lostConnection)) (seen, ended int, late [][]byte, err error) {
	var batch [][]byte
	var failed error
	flush := func() {
		n, err := deleteEntries(ctx, writer, k.family, batch)
		ended += n
		batch = batch[:0]
		failed = errors.Join(failed, err)
	}
	err = reader.Query(ctx, func(w *netfilter.Builder) { encodeDump(w, k, f) }, func(entry []byte) {
		seen++
		f, ok := parseFlow(entry)
		if !ok || failed != nil || !stale(f) {
			return
		}
		if f.established {
			reset(lostConnection{f, identity(entry)})
			return
		}
		if f.protocol == unix.IPPROTO_UDP && f.endpoint == f.to {
			late = append(late, replyIdentity(entry))
		}
		if batch = append(batch, identity(entry)); len(batch) == batchSize {
			flush()
		}
	})
	if err != nil {
		err = fmt.Errorf("read connections: %w", err)
	}
	if failed == nil {
		flush()
	}
	return seen, ended, late, errors.Join(err, failed)
}

// deleteEntries deletes entries and returns how many existed. A missing entry is no
// error.
func deleteEntries(ctx context.Context, c *netfilter.Conn, family api.Family, entries [][]byte) (deleted int, err error) {
	failed := c.Each(ctx, func(w *netfilter.Builder) {
		for _, e := range entries {
			encodeDeletion(w, family, e)
		}
	}, func(refused error) {
		switch {
		case refused == nil:
			deleted++
		case !errors.Is(refused, unix.ENOENT):
			err = refused
		}
	})
	if err := errors.Join(failed, err); err != nil {
		return deleted, fmt.Errorf("delete connections: %w", err)
	}
	return deleted, nil
}
