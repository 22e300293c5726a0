// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/nft"
	"golang.org/x/sys/unix"
)

// With session affinity, weights or stable hashing, each endpoint of a list has a number.
// One map maps a slot of the list to the number, and another maps the number to the
// endpoint. A third map, which packets write, maps the list and a client to the number. An
// endpoint keeps its number when it gets another slot. An endpoint that was removed and
// comes back gets another number, so its former clients stay at the endpoints that they use
// now.
//
// The key of a client is not its address, but a hash of the address with one of
// clientGroups values. So no service can use more than its share of the kernel's memory.
// Clients with the same hash share an endpoint. The seed of the hash is random in each
// table.

const (
	// clientGroups is the number of groups of clients that each list has.
	clientGroups = 1 << 16
	// maxClients limits the elements of a map of clients. The map only uses memory for the
	// elements that it has. If it is full, connections of other clients go to a random
	// endpoint.
	maxClients = 1 << 22
	// maxNumberedEndpoints limits the endpoints that get traffic in a list with numbers.
	// The number of an endpoint differs from the number of its list only in the lowest 12
	// bits.
	maxNumberedEndpoints = endpointMask

	// nftDynsetDelete is missing in golang.org/x/sys/unix.
	nftDynsetDelete = 2
)

// timeoutSteps defines how timeouts are rounded up. Timeouts of at most limit seconds are
// rounded to a multiple of step seconds. The number of a class has 11 bits for the number
// of steps. Kubernetes' API accepts timeouts of up to a day.
var timeoutSteps = []struct{ limit, step uint32 }{{120, 1}, {600, 5}, {86400, 60}}

// timeoutBits encodes a timeout for the number of a class, and timeoutOf decodes it.
func timeoutBits(timeout time.Duration) uint32 {
	seconds := uint32(min((timeout+time.Second-1)/time.Second, 86400))
	var bits, from uint32
	for _, s := range timeoutSteps {
		if seconds <= s.limit {
			return bits + (seconds-from+s.step-1)/s.step
		}
		bits += (s.limit - from) / s.step
		from = s.limit
	}
	return bits
}

func timeoutOf(bits uint32) time.Duration {
	var from uint32
	for _, s := range timeoutSteps {
		steps := (s.limit - from) / s.step
		if bits <= steps {
			return time.Duration(from+bits*s.step) * time.Second
		}
		bits -= steps
		from = s.limit
	}
	return time.Duration(from) * time.Second
}

// affinityRules returns the rules that select an endpoint for a client. If the map of
// clients is full, the rule that adds the client does nothing.
func (c class) affinityRules(seed uint32) []nft.Rule {
	isEndpoint := loadPriority(endpointMask) + nft.NotEqual(nft.Native(0)...)
	clients := func(operation uint32, timeout time.Duration) nft.Rule {
		const value = 2 // the register after the key's registers
		return clientKey(c.family, seed).Meta(unix.NFT_META_PRIORITY).Then(nft.Dynset(clientsMap(c.family).Name, operation, value, timeout))
	}
	remember := clients(unix.NFT_DYNSET_OP_UPDATE, timeoutOf(uint32(c.timeout))) // keeps the number of a known client
	slot, _ := c.needs()
	toEndpoint := nft.Jump(numberChain(c.isAddress, c.family))
	return []nft.Rule{
		nft.Jump(findChain(c.family)),
		nft.Jump(clientChain(c.family)),
		isEndpoint + remember + toEndpoint,
		isEndpoint + clients(nftDynsetDelete, 0), // toEndpoint found no endpoint: it was removed
		loadPriority(^uint32(endpointMask)) + nft.SetMeta(unix.NFT_META_PRIORITY),
		nft.Jump(slot.name()),
		isEndpoint + remember,
		toEndpoint,
		nft.Drop,
	}
}

// clientKey loads the key of a packet's client in the map of clients: the list and the
// group of the client.
func clientKey(family api.Family, seed uint32) *nft.Key {
	return nft.NewKey(family).Meta(unix.NFT_META_PRIORITY).Masked(nft.Native(^uint32(endpointMask))).SourceHash(clientGroups, seed)
}

// clientGroup computes the group of a client like the kernel.
func clientGroup(addr netip.Addr, seed uint32) uint32 {
	return uint32(uint64(jhash(addr.AsSlice(), seed)) * clientGroups >> 32)
}

// jhash is the kernel's function of that name, for at most 24 octets.
func jhash(key []byte, seed uint32) uint32 {
	a := 0xdeadbeef + uint32(len(key)) + seed
	b, c := a, a
	if len(key) > 12 {
		a += binary.NativeEndian.Uint32(key)
		b += binary.NativeEndian.Uint32(key[4:])
		c += binary.NativeEndian.Uint32(key[8:])
		for _, r := range [2][3]int{{4, 6, 8}, {16, 19, 4}} {
			a = (a - c) ^ bits.RotateLeft32(c, r[0])
			c += b
			b = (b - a) ^ bits.RotateLeft32(a, r[1])
			a += c
			c = (c - b) ^ bits.RotateLeft32(b, r[2])
			b += a
		}
		key = key[12:]
	}
	var rest [12]byte
	copy(rest[:], key)
	a += binary.LittleEndian.Uint32(rest[:])
	b += binary.LittleEndian.Uint32(rest[4:])
	c += binary.LittleEndian.Uint32(rest[8:])
	c = (c ^ b) - bits.RotateLeft32(b, 14)
	a = (a ^ c) - bits.RotateLeft32(c, 11)
	b = (b ^ a) - bits.RotateLeft32(a, 25)
	c = (c ^ b) - bits.RotateLeft32(b, 16)
	a = (a ^ c) - bits.RotateLeft32(c, 4)
	b = (b ^ a) - bits.RotateLeft32(a, 14)
	return (c ^ b) - bits.RotateLeft32(b, 24)
}

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
	for _, family := range nft.Families {
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
	err := t.conn.Transact(ctx, func(w *nft.Writer) {
		w.Elements(unix.NFT_MSG_DELSETELEM, 0, clientsMap(family).Name, len(list), func(i int) {
			w.Value(unix.NFTA_SET_ELEM_KEY, list[i].key())
		})
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
	return c.Dump(ctx, clientsMap(family).Name, func(item []byte) {
		if key := nft.Value(item, unix.NFTA_SET_ELEM_KEY); len(key) == 8 {
			f(client{binary.NativeEndian.Uint32(key), binary.NativeEndian.Uint32(key[4:])})
		}
	})
}
