// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/nft"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// Before a new table replaces a table of an earlier layout, the new table gets the old
// table's clients with session affinity. In the old layout, each endpoint of a service
// port has a number. The set clients4 has pairs of a number and a client's address. The
// maps service-endpoints4, nodeport-endpoints4 and address-endpoints4, and the same maps
// with the prefix "node-", lead from a frontend and a number to the endpoint. If the old
// table has other sets, the new table gets no clients.

// takeover is the state of the copy of one family's clients.
type takeover struct {
	family api.Family
	// numbers maps the number of an endpoint in the old table to its numbers in the new
	// table. There is one number for each list that contains the endpoint.
	numbers map[uint32][]uint32
	taken   map[client]bool
}

// takenClient is an element for a map of clients.
type takenClient struct {
	client
	number uint32
	// timeout and expiration are encoded in milliseconds.
	timeout, expiration []byte
}

// maxLateClients limits the clients in the transaction that replaces the old table.
const maxLateClients = 1_000

// takeClients writes clients of the old table to the new table. It returns, by family, the
// clients that the old table got meanwhile. The transaction that replaces the table adds
// these clients.
func (t *table) takeClients(ctx context.Context) (late map[api.Family][]takenClient, err error) {
	old := &conn{t.conn.Other(t.replaced)}
	l, err := old.inspect(ctx, old.Table)
	if err != nil {
		return nil, err
	}
	late = map[api.Family][]takenClient{}
	for _, family := range nft.Families {
		want := nft.NewSet(clientsMap(family).Name, unix.NFT_SET_EVAL|unix.NFT_SET_TIMEOUT, []nft.Type{nft.TypePriority, nft.TypeAddr(family)}, nil)
		if set := l.Sets[want.Name]; !set.SameAs(&want) {
			continue
		}
		o := &takeover{family: family, taken: map[client]bool{}}
		if o.numbers, err = t.newNumbersOf(ctx, old, l, family); err != nil {
			return nil, err
		}
		if err := t.conn.Transact(ctx, func(w *nft.Writer) { w.FlushSet(clientsMap(family).Name) }); err != nil {
			return nil, err
		}
		for {
			found, err := o.find(ctx, old, t.clientSeed)
			if err != nil {
				return nil, err
			}
			if len(found) <= maxLateClients {
				late[family] = found
				break
			}
			for some := range slices.Chunk(found, maxOps) {
				if err := t.conn.Transact(ctx, func(w *nft.Writer) { writeClients(w, family, some) }); err != nil {
					return nil, fmt.Errorf("write clients of table inet %s: %w", old.Table, err)
				}
			}
			klog.FromContext(ctx).V(2).Info("Took over clients with session affinity", "from", old.Table, "clients", len(found))
		}
	}
	return late, nil
}

// newNumbersOf returns the field numbers of a takeover.
func (t *table) newNumbersOf(ctx context.Context, old *conn, l listing, family api.Family) (map[uint32][]uint32, error) {
	lists := map[uint32]*list{}
	for _, some := range t.services {
		for i := range some {
			if l := &some[i]; l.family == family && isNumbered(l.number) {
				lists[l.number] = l
			}
		}
	}
	endpoints := map[uint32]map[record]uint32{} // list → endpoint → number
	numbers := map[uint32][]uint32{}
	for _, s := range allMatches {
		frontends, err := readSnapshot(ctx, t.conn, mapID{kindFrontends, s, family}, nil)
		if err != nil {
			return nil, err
		}
		for _, prefix := range []string{"", "node-"} {
			name := fmt.Sprintf("%s%s-endpoints%d", prefix, matchNames[s], family)
			keyLen := frontends.m.keyLen()
			if set, ok := l.Sets[name]; !ok || set.KeyLen != keyLen+4 {
				continue
			}
			err := old.Dump(ctx, name, func(item []byte) {
				key := nft.Value(item, unix.NFTA_SET_ELEM_KEY)
				data := nft.Value(item, unix.NFTA_SET_ELEM_DATA)
				if len(key) != keyLen+4 || len(data) < nft.AddrLen(family) {
					return
				}
				id := elementID{m: frontends.m}
				copy(id.key[:], key[:keyLen])
				v, _ := frontends.get(&id)
				list := lists[v.number()&^endpointMask]
				if prefix != "" && list != nil {
					list = lists[list.shortcut]
				}
				if list == nil {
					return
				}
				if endpoints[list.number] == nil {
					endpoints[list.number] = list.numbers()
				}
				var port [2]byte
				if s != matchAddress {
					copy(port[:], data[nft.AddrLen(family):])
				}
				endpoint := record(data[:nft.AddrLen(family)]) + record(port[:])
				number := binary.NativeEndian.Uint32(key[keyLen:])
				if n, ok := endpoints[list.number][endpoint]; ok && !slices.Contains(numbers[number], list.number|n) {
					numbers[number] = append(numbers[number], list.number|n)
				}
			})
			if err != nil {
				return nil, err
			}
		}
	}
	return numbers, nil
}

// numbers returns the number of each endpoint by the record's ID.
func (l *list) numbers() map[record]uint32 {
	numbers := map[record]uint32{}
	for slot := range l.len() {
		r := l.record(slot)
		numbers[r.id()] = r.number()
	}
	return numbers
}

// find returns the clients of the old table that were not taken over so far.
func (o *takeover) find(ctx context.Context, old *conn, seed uint32) (found []takenClient, err error) {
	err = old.Dump(ctx, clientsMap(o.family).Name, func(item []byte) {
		key := nft.Value(item, unix.NFTA_SET_ELEM_KEY)
		if len(key) != 4+nft.AddrLen(o.family) {
			return
		}
		addr, _ := netip.AddrFromSlice(key[4:])
		for _, number := range o.numbers[binary.NativeEndian.Uint32(key)] {
			c := takenClient{
				client: client{number &^ endpointMask, clientGroup(addr, seed)}, number: number,
				timeout:    slices.Clone(netfilter.Attribute(item, unix.NFTA_SET_ELEM_TIMEOUT)),
				expiration: slices.Clone(netfilter.Attribute(item, unix.NFTA_SET_ELEM_EXPIRATION)),
			}
			if !o.taken[c.client] && len(c.timeout) == 8 && len(c.expiration) == 8 && binary.BigEndian.Uint64(c.expiration) > 0 {
				o.taken[c.client] = true
				found = append(found, c)
			}
		}
	})
	if errors.Is(err, unix.ENOENT) {
		err = nil // no error, because the old table was deleted
	}
	return found, err
}

// writeClients adds messages that add clients.
func writeClients(w *nft.Writer, family api.Family, list []takenClient) {
	w.Elements(unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, clientsMap(family).Name, len(list), func(i int) {
		w.Value(unix.NFTA_SET_ELEM_KEY, list[i].key())
		w.Value(unix.NFTA_SET_ELEM_DATA, nft.Native(list[i].number))
		w.Bytes(unix.NFTA_SET_ELEM_TIMEOUT, list[i].timeout...)
		w.Bytes(unix.NFTA_SET_ELEM_EXPIRATION, list[i].expiration...)
	})
}
