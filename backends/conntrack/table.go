// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack

import (
	"context"
	"errors"
	"fmt"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/internal/netfilter"
	"golang.org/x/sys/unix"
)

// batchSize is how many deletions are sent at once.
const batchSize = 64

// kind is what one listing of the table has: connections of a family and protocol.
type kind struct {
	family   api.Family
	protocol uint8
}

// end deletes the flows to any of places, all of one kind, that are stale. It
// says how many it has looked at and deleted.
func end(ctx context.Context, netNS int, k kind, places []place, stale func(flow) bool) (seen, ended int, err error) {
	reader, writer := netfilter.NewConn(netNS), netfilter.NewConn(netNS)
	defer reader.Close()
	defer writer.Close()

	var gone [][]byte
	var failed error
	flush := func() {
		n, err := deleteEntries(ctx, writer, k.family, gone)
		ended += n
		gone = gone[:0]
		failed = errors.Join(failed, err)
	}
	err = reader.Query(ctx, func(w *netfilter.Builder) { listing(w, k, places) }, func(entry []byte) {
		seen++
		if f, ok := parseFlow(entry); !ok || failed != nil || !stale(f) {
			return
		}
		if gone = append(gone, identity(entry)); len(gone) == batchSize {
			flush()
		}
	})
	if err != nil {
		err = fmt.Errorf("read connections: %w", err)
	}
	if failed == nil {
		flush()
	}
	return seen, ended, errors.Join(err, failed)
}

// deleteEntries deletes entries and returns how many there were. One that does not exist
// any more is fine.
func deleteEntries(ctx context.Context, c *netfilter.Conn, family api.Family, entries [][]byte) (deleted int, err error) {
	failed := c.Each(ctx, func(w *netfilter.Builder) {
		for _, e := range entries {
			deletion(w, family, e)
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
