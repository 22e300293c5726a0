// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"github.com/google/nftables/expr"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/internal/netfilter"
	"github.com/kpng-project/kpng/nodeview"
	"golang.org/x/sys/unix"
)

// Session affinity takes chains of a service's own: nft 1.0.6 has no way to say in a
// shared one what a client's endpoint is and that it is still on the list. Of
// each endpoint there is a set of its clients, which the kernel fills and empties,
// and a chain that goes to it; of each list of endpoints a chain that looks for the client
// in the sets of those on the list, and else draws. So what a connection costs grows
// with the number of endpoints, for these services alone.

// object is a chain of a service's own, or one of its sets.
type object struct {
	name string
	// family is that of a set's addresses; a chain has none.
	family api.Family
	// rules are a chain's rules as the kernel takes them.
	rules []string
}

func (o object) isSet() bool { return o.family != 0 }

// isOwn reports whether a chain or set of that name is some service's own.
func isOwn(name string) bool { return strings.Contains(name, "/") }

// ownName returns the name of an object of the service port of f.
func ownName(kind string, se *api.ServiceEndpoints, f *nodeview.Frontend, which string) string {
	port := "all"
	if p := f.ServicePort; p != nil {
		port = fmt.Sprintf("%s.%d", strings.ToLower(p.Protocol.String()), p.Port)
	}
	return fmt.Sprintf("%s/%s/%s/%s/%s", kind, se.Service.Namespace, se.Service.Name, port, which)
}

// affinity emits the objects that balance some traffic of f so that clients keep
// their endpoints, and returns the name of the chain to go to.
func (p *planner) affinity(se *api.ServiceEndpoints, f *nodeview.Frontend, list string, targets []nodeview.Target, emit func(object)) string {
	var known, drawn [][]expr.Any
	for i := range targets {
		t := &targets[i]
		which := fmt.Sprintf("%s.%d", strings.ReplaceAll(t.Addr.String(), ":", "."), t.Port)
		clients, endpoint := ownName("clients", se, f, which), ownName("endpoint", se, f, which)
		emit(object{name: clients, family: f.Family})
		emit(object{name: endpoint, rules: encodeRules(
			append(loadClient(f.Family), &expr.Dynset{SrcRegKey: 1, SetName: clients, Operation: unix.NFT_DYNSET_OP_UPDATE, Timeout: f.Affinity}),
			dnat(f, t),
		)})
		known = append(known, append(loadClient(f.Family), &expr.Lookup{SourceRegister: 1, SetName: clients}, goTo(endpoint)[0]))
		// Of the endpoints that are left, each is as likely as the others.
		drawn = append(drawn, []expr.Any{
			&expr.Numgen{Register: 1, Modulus: uint32(len(targets) - i), Type: unix.NFT_NG_RANDOM},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: make([]byte, 4)},
			goTo(endpoint)[0],
		})
	}
	chain := ownName("list", se, f, fmt.Sprintf("%s%d", list, f.Family))
	emit(object{name: chain, rules: encodeRules(slices.Concat(known, drawn)...)})
	return chain
}

// loadClient puts the source address into register 1. It matches only the family.
func loadClient(family api.Family) []expr.Any {
	offset, length := uint32(12), uint32(4)
	if family == api.IPv6 {
		offset, length = 8, 16
	}
	return append(matchFamily(family),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length})
}

// dnat returns the rule that goes to one endpoint. The protocol is known when it
// is reached; nft takes the rule for valid only if it says so itself.
func dnat(f *nodeview.Frontend, t *nodeview.Target) []expr.Any {
	rule := matchFamily(f.Family)
	nat := &expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(nfproto(f.Family)), RegAddrMin: 1}
	if t.Port != 0 {
		rule = append(rule,
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{protocolNumbers[f.Protocol]}},
			&expr.Immediate{Register: 2, Data: binary.BigEndian.AppendUint16(nil, uint16(t.Port))})
		nat.RegProtoMin = 2
	}
	return append(rule, &expr.Immediate{Register: 1, Data: t.Addr.AsSlice()}, nat)
}

// encodeRules returns rules as the kernel takes them.
func encodeRules(rules ...[]expr.Any) []string {
	encoded := make([]string, len(rules))
	for i, rule := range rules {
		var w netfilter.Builder
		for _, e := range rule {
			b, err := expr.Marshal(unix.NFPROTO_INET, e)
			if err != nil {
				panic(err) // the expressions are ours, and their data too
			}
			w.Bytes(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, b...)
		}
		encoded[i] = string(w.Encoded())
	}
	return encoded
}

// maxClients is how many clients of one endpoint are remembered. Memory is only
// taken for those there are.
const maxClients = 1 << 20

// makeSet adds a message that makes a set of clients, if it is not there.
func (w *wire) makeSet(name string, family api.Family) {
	typ, length := uint32(7), uint32(4) // of nft's types, ipv4_addr
	if family == api.IPv6 {
		typ, length = 8, 16
	}
	at := w.Begin(nftMsg(unix.NFT_MSG_NEWSET), unix.NLM_F_CREATE, unix.NFPROTO_INET)
	w.String(unix.NFTA_SET_TABLE, w.table)
	w.String(unix.NFTA_SET_NAME, name)
	w.Uint32(unix.NFTA_SET_FLAGS, unix.NFT_SET_EVAL|unix.NFT_SET_TIMEOUT)
	w.Uint32(unix.NFTA_SET_KEY_TYPE, typ)
	w.Uint32(unix.NFTA_SET_KEY_LEN, length)
	desc := w.Nest(unix.NFTA_SET_DESC)
	w.Uint32(unix.NFTA_SET_DESC_SIZE, maxClients)
	w.EndNest(desc)
	w.Uint32(unix.NFTA_SET_ID, 1)
	w.End(at)
}

// deleteSet adds a message that deletes a set.
func (w *wire) deleteSet(name string) {
	at := w.Begin(nftMsg(unix.NFT_MSG_DELSET), 0, unix.NFPROTO_INET)
	w.String(unix.NFTA_SET_TABLE, w.table)
	w.String(unix.NFTA_SET_NAME, name)
	w.End(at)
}

// objectOp is what becomes of an object: it is made if old is nil, deleted if new is
// nil, and else its rules change.
type objectOp struct {
	part     int
	old, new *object
}

// makeObjects adds messages that make or change objects, and deleteObjects those
// that delete them. What elements lead to has to be there before them, and what
// they led to may go only after them.
func (w *wire) makeObjects(ops []objectOp) {
	for _, o := range ops {
		switch {
		case o.new == nil:
		case o.new.isSet():
			w.makeSet(o.new.name, o.new.family)
		default:
			w.chain(unix.NFT_MSG_NEWCHAIN, o.new.name)
		}
	}
	for _, o := range ops {
		if o.new != nil && !o.new.isSet() {
			w.flushChain(o.new.name)
			for _, rule := range o.new.rules {
				w.rule(o.new.name, rule)
			}
		}
	}
}

func (w *wire) deleteObjects(ops []objectOp) {
	var chains []string
	for _, o := range ops {
		if o.new == nil && !o.old.isSet() {
			chains = append(chains, o.old.name)
		}
	}
	w.deleteChains(chains)
	for _, o := range ops {
		if o.new == nil && o.old.isSet() {
			w.deleteSet(o.old.name)
		}
	}
}
