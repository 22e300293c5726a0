// SPDX-License-Identifier: Apache-2.0

package sinktest

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// ledger records the Changes that a sink has received and acknowledged. From this
// record, it knows which Changes the driver may deliver next.
type ledger struct {
	// begun is true after a sink.Changes with First was acknowledged, until ErrStartOver.
	// inPass is true between the first and the last acknowledged Changes of a pass.
	begun, inPass bool
	revision      uint64
	views         map[types.NamespacedName]*api.View
	// The services acknowledged since the last Changes with First.
	acked map[types.NamespacedName]bool
	// The services whose last delivery was not acknowledged.
	unacked map[types.NamespacedName]bool
	// maps a claim to the service that was last acknowledged with it
	owners      map[api.Claim]types.NamespacedName
	node        *api.Node
	nodeUnacked bool
	// voided: a pass in progress omitted an acknowledged view, so another pass must follow.
	voided bool
}

func newLedger() ledger {
	return ledger{
		views:   map[types.NamespacedName]*api.View{},
		acked:   map[types.NamespacedName]bool{},
		unacked: map[types.NamespacedName]bool{},
		owners:  map[api.Claim]types.NamespacedName{},
	}
}

// check returns a message for each rule of [sink.Sink] that a call with the argument c
// breaks.
func (l *ledger) check(c *sink.Changes) []string {
	services := slices.Collect(c.Services)
	var wrong []string
	report := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }

	if c.First {
		*l = newLedger()
	}
	switch {
	case l.voided && !l.inPass:
		report("should begin a pass, because the last one omitted acknowledged views")
	case c.First && !c.NodeChanged:
		report("begins a pass and says that the node has not changed")
	case c.First:
	case !l.begun:
		report("should begin a pass")
	case c.Last && !l.inPass:
		report("ends a pass that was not begun")
	case c.Revision < l.revision:
		report("was at revision %d already", l.revision)
	case c.NodeChanged && !l.nodeWaits(c.Node):
		report("says that the node changed, which was acknowledged as it is")
	case !c.NodeChanged && !c.Node.Equal(l.node):
		report("does not say that the node changed")
	case !c.NodeChanged && !c.Last && len(services) == 0:
		report("has nothing to deliver")
	}
	for i, s := range services {
		if i > 0 && ordering.Keys(services[i-1].Key, s.Key) >= 0 {
			report("service %s comes after %s", s.Key, services[i-1].Key)
		}
		if s.New != nil && s.New.Key() != s.Key {
			report("service %s has the view of %s", s.Key, s.New.Key())
		}
		old := l.views[s.Key]
		switch {
		case !s.Unsure && l.unsure(s.Key, c.First):
			report("service %s is not marked as unsure", s.Key)
		case s.Old != nil && !s.Old.Equal(old):
			report("service %s: old is not the acknowledged view", s.Key)
		case s.Old == nil && old != nil && l.owns(s.Key, old):
			if l.voided = l.inPass && s.Unsure; !l.voided {
				report("service %s: old is missing", s.Key)
			}
		case s.Old != nil && !l.owns(s.Key, s.Old):
			report("service %s: old has a claim that another service has now", s.Key)
		case !s.Unsure && s.New.Equal(old):
			report("service %s was acknowledged as it is", s.Key)
		}
	}
	return append(wrong, l.checkFailing(c)...)
}

// unsure reports whether a Change of a service must be marked as unsure. The argument
// first is the field First of the Changes.
func (l *ledger) unsure(key types.NamespacedName, first bool) bool {
	return l.unacked[key] || (first || l.inPass) && !l.acked[key]
}

// delivered reports whether the service was delivered since the last Changes with First.
func (l *ledger) delivered(key types.NamespacedName) bool { return l.acked[key] || l.unacked[key] }

// nodeWaits reports whether the sink has yet to acknowledge this Node.
func (l *ledger) nodeWaits(node *api.Node) bool { return l.nodeUnacked || !node.Equal(l.node) }

// owns reports whether the service with this key still owns every claim of view. A
// service loses a claim when another service is acknowledged with that claim.
func (l *ledger) owns(key types.NamespacedName, view *api.View) bool {
	for f := range nodeview.Frontends(view) {
		if l.owners[f.Claim()] != key {
			return false
		}
	}
	return true
}

func (l *ledger) checkFailing(c *sink.Changes) []string {
	var wrong []string
	in := map[types.NamespacedName]bool{}
	for s := range c.Services {
		in[s.Key] = true
	}
	if !c.Last && len(c.Failing) > 0 {
		wrong = append(wrong, "names failing services and does not end a pass")
	}
	if !slices.IsSortedFunc(c.Failing, ordering.Keys) {
		wrong = append(wrong, "names failing services out of order")
	}
	for _, key := range c.Failing {
		if in[key] || l.acked[key] && !l.unacked[key] {
			wrong = append(wrong, fmt.Sprintf("names service %s as failing", key))
		}
	}
	if c.Last {
		for key := range l.unacked {
			if !in[key] && !slices.Contains(c.Failing, key) {
				wrong = append(wrong, fmt.Sprintf("does not name service %s as failing", key))
			}
		}
	}
	return wrong
}

// record adds a call that had the argument c and returned err.
func (l *ledger) record(c *sink.Changes, err error) {
	failed, ok := sink.Acknowledged(err)
	switch {
	case errors.Is(err, sink.ErrStartOver):
		l.begun = false
		return
	case !ok:
		for s := range c.Services {
			l.unacked[s.Key] = true
		}
		l.nodeUnacked = l.nodeUnacked || c.NodeChanged
		return
	}
	if c.First {
		l.begun, l.inPass = true, true
	}
	if c.Last {
		l.inPass = false
	}
	l.revision = c.Revision
	if c.NodeChanged {
		l.node, l.nodeUnacked = c.Node, false
	}
	for key := range failed {
		l.unacked[key] = true
	}
	for s := range c.Services {
		if _, ok := failed[s.Key]; !ok {
			l.acknowledge(&s)
		}
	}
}

func (l *ledger) acknowledge(s *sink.Change) {
	delete(l.unacked, s.Key)
	l.acked[s.Key] = true
	if s.New == nil {
		delete(l.views, s.Key)
		return
	}
	l.views[s.Key] = s.New
	for f := range nodeview.Frontends(s.New) {
		l.own(f.Claim(), s.Key)
	}
}

// The method own sets the owner of claim to key, and removes conflicting claims.
func (l *ledger) own(claim api.Claim, key types.NamespacedName) {
	whole := api.Claim{IP: claim.IP}
	if claim == whole {
		for other := range l.owners {
			if other.IP == claim.IP {
				delete(l.owners, other)
			}
		}
	} else {
		delete(l.owners, whole)
	}
	l.owners[claim] = key
}
