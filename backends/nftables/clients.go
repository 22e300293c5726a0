// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netfilter"
	"golang.org/x/sys/unix"
)

// client is an element of a map of clients: the number of a list and a group of clients.
type client struct{ list, group uint32 }

// maxStaleClients limits the clients that one transaction deletes, so that changes of
// services do not wait long.
const maxStaleClients = 2_000

// deleteStaleClients deletes the clients of lists that no longer exist. If ctx ends, for
// example because a service changes, the next Verify tries again. In the worst case, clients
// stay until their timeout.
func (t *table) deleteStaleClients(ctx context.Context) error {
	if !t.staleClients || t.replaced != "" {
		return nil
	}
	for _, family := range families {
		var stale []client
		err := t.conn.dumpClients(ctx, family, func(c client) {
			if t.numbers.used[listNumber{family, c.list}] == 0 {
				stale = append(stale, c)
			}
		})
		if err != nil {
			return err
		}
		for some := range slices.Chunk(stale, maxStaleClients) {
			if err := context.Cause(ctx); err != nil {
				return err
			}
			if err := t.deleteClients(ctx, family, some); err != nil {
				return fmt.Errorf("delete clients of removed services: %w", err)
			}
		}
	}
	t.staleClients = false
	return nil
}

// deleteClients deletes elements of a map of clients. If one of them has expired, the kernel
// deletes none, so deleteClients then tries each half.
func (t *table) deleteClients(ctx context.Context, family api.Family, list []client) error {
	err := t.conn.transact(ctx, func(w *wire) {
		at, nest := w.beginElements(unix.NFT_MSG_DELSETELEM, 0, clientsMap(family).name)
		for _, c := range list {
			item := w.Nest(unix.NFTA_LIST_ELEM)
			w.data(unix.NFTA_SET_ELEM_KEY, c.key())
			w.EndNest(item)
		}
		w.EndNest(nest)
		w.End(at)
	})
	if !errors.Is(err, unix.ENOENT) {
		return err
	}
	if len(list) == 1 {
		return nil
	}
	half := len(list) / 2
	return errors.Join(t.deleteClients(ctx, family, list[:half]), t.deleteClients(ctx, family, list[half:]))
}

func (c client) key() []byte {
	return binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, c.list), c.group)
}

// dumpClients calls f with each element of a map of clients.
func (c *conn) dumpClients(ctx context.Context, family api.Family, f func(client)) error {
	return c.dumpSet(ctx, clientsMap(family).name, func(item []byte) {
		key := netfilter.Attribute(netfilter.Attribute(item, unix.NFTA_SET_ELEM_KEY), unix.NFTA_DATA_VALUE)
		if len(key) == 8 {
			f(client{binary.NativeEndian.Uint32(key), binary.NativeEndian.Uint32(key[4:])})
		}
	})
}
