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
	"github.com/kpng-project/kpng/backends/internal/nftrule"
	"github.com/kpng-project/kpng/nodeview"
	"golang.org/x/sys/unix"
)

// A service with session affinity has chains of its own. A shared chain would have to
// find a client's endpoint and check that the endpoint is still in use, but nft 1.0.6 has
// no syntax for that. For each endpoint, there is a chain with the rule that translates
// connections, and a set of the endpoint's clients. The kernel adds clients and removes
// them after a timeout. For each list of endpoints, there is a chain that looks for the
// client in the endpoints' sets. If no set has the client, the chain selects an endpoint
// at random. So the cost of a connection grows with the number of endpoints.

// object is a chain or a set of a single service.
type object struct {
	name string
	// family is the family of a set's addresses, 0 for a chain.
	family api.Family
	// rules are a chain's encoded rules.
	rules []string
}

func (o object) isSet() bool { return o.family != 0 }

// isOwn reports whether the chain or set with this name belongs to a single service.
func isOwn(name string) bool { return strings.Contains(name, "/") }

// planAffinity emits objects that balance traffic among targets, for a frontend f with
// session affinity. It returns the name of the chain to which this traffic goes first.
// This name contains listName, which identifies the list of targets.
func planAffinity(se *api.ServiceEndpoints, f *nodeview.Frontend, listName string, targets []nodeview.Target, emit func(object)) string {
	port := "all"
	if p := f.ServicePort; p != nil {
		port = fmt.Sprintf("%s.%d", strings.ToLower(p.Protocol.String()), p.Port)
	}
	nameOf := func(kind, which string) string {
		return fmt.Sprintf("%s/%s/%s/%s/%s", kind, se.Service.Namespace, se.Service.Name, port, which)
	}
	var known, random [][]expr.Any
	for i := range targets {
		t := &targets[i]
		which := fmt.Sprintf("%s.%d", strings.ReplaceAll(t.Addr.String(), ":", "."), t.Port)
		clients, endpoint := nameOf("clients", which), nameOf("endpoint", which)
		emit(object{name: clients, family: f.Family})
		emit(object{name: endpoint, rules: encodeRules(
			nftrule.NewKey(f.Family).Source().FollowedBy(&expr.Dynset{SrcRegKey: nftrule.Reg(0), SetName: clients, Operation: unix.NFT_DYNSET_OP_UPDATE, Timeout: f.Affinity}),
			dnat(f, t),
		)})
		known = append(known, nftrule.NewKey(f.Family).Source().FollowedBy(&expr.Lookup{SourceRegister: nftrule.Reg(0), SetName: clients}, nftrule.GoTo(endpoint)[0]))
		// The probability 1/(len(targets)-i) makes all endpoints equally likely.
		random = append(random, []expr.Any{
			&expr.Numgen{Register: nftrule.Reg(0), Modulus: uint32(len(targets) - i), Type: unix.NFT_NG_RANDOM},
			nftrule.Equal(nftrule.Native(0)...),
			nftrule.GoTo(endpoint)[0],
		})
	}
	chain := nameOf("list", fmt.Sprintf("%s%d", listName, f.Family))
	emit(object{name: chain, rules: encodeRules(slices.Concat(known, random)...)})
	return chain
}

// dnat returns the rule that translates connections to one endpoint. All packets in the
// endpoint's chain have the same protocol. The rule matches the protocol nevertheless,
// because nft requires this in a rule with a port.
func dnat(f *nodeview.Frontend, t *nodeview.Target) []expr.Any {
	rule := nftrule.MatchFamily(f.Family)
	port := 0
	if t.Port != 0 {
		port = 4
		rule = append(rule,
			nftrule.LoadMeta(expr.MetaKeyL4PROTO),
			nftrule.Equal(protocolNumbers[f.Protocol]),
			&expr.Immediate{Register: nftrule.Reg(port), Data: binary.BigEndian.AppendUint16(nil, uint16(t.Port))})
	}
	return append(rule, &expr.Immediate{Register: nftrule.Reg(0), Data: t.Addr.AsSlice()}, nftrule.DNATTo(f.Family, 0, port))
}

// maxClients limits the clients that the kernel remembers for one endpoint. A set only
// uses memory for clients that it has.
const maxClients = 1 << 20

// objectOp is the change of an object. If old is nil, the object is created. If new is
// nil, the object is deleted. If neither is nil, the object's rules are replaced.
type objectOp struct {
	part     int
	old, new *object
}

// makeObjects adds messages that create or change objects. Elements that refer to the
// objects must follow. The objects are sorted by name: sets of clients, then chains of
// endpoints, then chains of lists. So each object refers only to earlier objects.
func (w *wire) makeObjects(ops []objectOp) {
	for _, o := range ops {
		switch {
		case o.new == nil:
		case o.new.isSet():
			addr := addrType(o.new.family)
			w.newSet(layout{name: o.new.name, flags: unix.NFT_SET_EVAL | unix.NFT_SET_TIMEOUT, keyType: addr.number, keyLen: addr.length, size: maxClients})
		default:
			w.makeChain(o.new.name, o.new.rules)
		}
	}
}

// deleteObjects adds messages that delete objects. Earlier messages must remove the
// elements that refer to the objects.
func (w *wire) deleteObjects(ops []objectOp) {
	var chains, sets []string
	for _, o := range ops {
		switch {
		case o.new != nil:
		case o.old.isSet():
			sets = append(sets, o.old.name)
		default:
			chains = append(chains, o.old.name)
		}
	}
	w.deleteChainsAndSets(chains, sets)
}
