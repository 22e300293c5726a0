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
			append(loadClient(f.Family), &expr.Dynset{SrcRegKey: reg(0), SetName: clients, Operation: unix.NFT_DYNSET_OP_UPDATE, Timeout: f.Affinity}),
			dnat(f, t),
		)})
		known = append(known, append(loadClient(f.Family), &expr.Lookup{SourceRegister: reg(0), SetName: clients}, goTo(endpoint)[0]))
		// Of the endpoints that are left, each is as likely as the others.
		drawn = append(drawn, []expr.Any{
			&expr.Numgen{Register: reg(0), Modulus: uint32(len(targets) - i), Type: unix.NFT_NG_RANDOM},
			equal(native(0)...),
			goTo(endpoint)[0],
		})
	}
	chain := ownName("list", se, f, fmt.Sprintf("%s%d", list, f.Family))
	emit(object{name: chain, rules: encodeRules(slices.Concat(known, drawn)...)})
	return chain
}

// loadClient loads the source address. It matches only the family.
func loadClient(family api.Family) []expr.Any {
	source, _ := loadSource(family, 0)
	return append(matchFamily(family), source)
}

// dnat returns the rule that goes to one endpoint. The protocol is known when it
// is reached; nft takes the rule for valid only if it says so itself.
func dnat(f *nodeview.Frontend, t *nodeview.Target) []expr.Any {
	rule := matchFamily(f.Family)
	port := 0
	if t.Port != 0 {
		port = 4
		rule = append(rule,
			loadMeta(expr.MetaKeyL4PROTO),
			equal(protocolNumbers[f.Protocol]),
			&expr.Immediate{Register: reg(port), Data: binary.BigEndian.AppendUint16(nil, uint16(t.Port))})
	}
	return append(rule, &expr.Immediate{Register: reg(0), Data: t.Addr.AsSlice()}, natTo(f.Family, 0, port))
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

// clientSet describes a set of clients.
func clientSet(name string, family api.Family) layout {
	addr := addrType(family)
	return layout{name: name, flags: unix.NFT_SET_EVAL | unix.NFT_SET_TIMEOUT, keyType: addr.number, keyLen: addr.length, size: maxClients}
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
			w.newSet(clientSet(o.new.name, o.new.family))
		default:
			w.newChain(o.new.name, hook{})
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
