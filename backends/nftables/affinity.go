// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"cmp"
	"math/rand/v2"
	"time"

	"github.com/google/nftables/expr"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/internal/nftrule"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

// With session affinity, each endpoint of a service port has a number. One map leads from a
// slot of a frontend to the number, and another map from the number to the endpoint. The
// kernel remembers pairs of a number and a client address in one set for all services. A
// shared chain first looks for the client of a connection in each slot. An endpoint that was
// removed and comes back gets another number, so its former clients stay where they are.

const (
	// maxClients limits the clients that the kernel remembers. The set only uses memory for
	// the clients that it has. If it is full, connections of other clients go to a random
	// endpoint.
	maxClients = 1 << 22
	// maxAffineEndpoints limits the endpoints of a frontend with affinity that get traffic.
	// A shared chain's number has 12 bits for the number of endpoints.
	maxAffineEndpoints = 1<<12 - 1
)

// timeoutSteps says how timeouts are rounded up: those up to a limit, in seconds, to a
// multiple of the step. A shared chain's number has 11 bits for the number of steps.
// Kubernetes' API accepts timeouts of up to a day.
var timeoutSteps = []struct{ limit, step uint32 }{{120, 1}, {600, 5}, {86400, 60}}

// timeoutBits encodes a timeout for the number of a shared chain, and timeoutOf decodes it.
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

// affineEndpoint is an endpoint of a service port. For all-ports services, port is 0.
type affineEndpoint struct {
	protocol api.Protocol
	port     int32
	target   [20]byte // the data of endpointValue
}

// numbering has the numbers of a service's endpoints.
type numbering map[affineEndpoint]uint32

// numberer returns the number of an endpoint. The argument frontend is a frontend of the
// endpoint.
type numberer func(frontend elementID, e affineEndpoint) uint32

// numbers assigns numbers to endpoints of services with affinity.
type numbers struct {
	services map[types.NamespacedName]numbering
	// used has the numbers that cannot be assigned. If the table had the number when the pass
	// began, and no service has the number since then, the value is false.
	used map[uint32]bool
	// last is the number that was assigned last. It starts at random, so that endpoints do
	// not get the clients of endpoints that were removed before a restart.
	last uint32
}

func newNumbers() *numbers {
	return &numbers{services: map[types.NamespacedName]numbering{}, used: map[uint32]bool{}, last: rand.Uint32()}
}

// present returns the numbers of the endpoints of a service.
func (n *numbers) present(key types.NamespacedName) numberer {
	return func(_ elementID, e affineEndpoint) uint32 { return n.services[key][e] }
}

// future returns the numbers of a service for its next view, and adds them to next. An
// endpoint keeps its number. In a pass, it keeps the number that the table had before.
func (n *numbers) future(key types.NamespacedName, ps *pass, next *numbering) numberer {
	return func(frontend elementID, e affineEndpoint) uint32 {
		number := cmp.Or((*next)[e], n.services[key][e])
		if number == 0 && ps != nil {
			if before := ps.numbers[frontend][e.target]; !n.used[before] {
				number = before
			}
		}
		for number&0xffff == 0 || number>>16 == firstSlot>>16 { // nft cannot load ":0"
			n.last++
			number = 0x7000_0000 | n.last&0xfff_ffff
			if _, isUsed := n.used[number]; isUsed {
				number = 0
			}
		}
		if *next == nil {
			*next = numbering{}
		}
		(*next)[e], n.used[number] = number, true
		return number
	}
}

// settle records that a service has the numbers in next, or that it has failed to get them.
func (n *numbers) settle(key types.NamespacedName, next numbering, failed bool) {
	drop, keep := n.services[key], next
	if failed {
		drop, keep = keep, drop
	}
	for e, number := range drop {
		if keep[e] != number {
			delete(n.used, number)
		}
	}
	n.services[key] = keep
	if len(keep) == 0 {
		delete(n.services, key)
	}
}

// affinityRules returns the rules that select an endpoint for a client. If the set of
// clients is full, the rule that adds the client does nothing.
func (c sharedChain) affinityRules() (rules [][]expr.Any) {
	clients := clientsSet(c.family).name
	client := func() *nftrule.Key { return nftrule.NewKey(c.family).Meta(expr.MetaKeyPRIORITY).Source() }
	known := &expr.Lookup{SourceRegister: nftrule.Reg(0), SetName: clients}
	remember := &expr.Dynset{SrcRegKey: nftrule.Reg(0), SetName: clients, Operation: unix.NFT_DYNSET_OP_UPDATE, Timeout: c.timeout}
	toNumber := nftrule.Jump(c.mapOf(kindSlots).name())[0]
	translate := nftrule.GoTo(c.mapOf(kindEndpoints).name())
	for slot := range c.endpoints {
		rules = append(rules,
			[]expr.Any{&expr.Immediate{Register: nftrule.Reg(0), Data: nftrule.Native(firstSlot + uint32(slot))}, nftrule.SetMeta(expr.MetaKeyPRIORITY), toNumber},
			client().FollowedBy(known, remember, translate[0]))
	}
	return append(rules, append(c.randomSlot(), toNumber), client().FollowedBy(remember), translate)
}
