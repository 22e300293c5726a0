// SPDX-License-Identifier: Apache-2.0

package sinktest

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// ledger is what a sink acknowledged, and what it was told besides: what a
// driver has to go by.
type ledger struct {
	// full is whether a full Changes was acknowledged and is still good.
	full     bool
	revision uint64
	views    map[types.NamespacedName]*api.ServiceEndpoints
	// unacked are the services that were told and not acknowledged since.
	unacked     map[types.NamespacedName]bool
	node        *api.Node
	nodeUnacked bool
}

func newLedger() ledger {
	return ledger{
		views:   map[types.NamespacedName]*api.ServiceEndpoints{},
		unacked: map[types.NamespacedName]bool{},
	}
}

// check returns what is wrong with c, in the light of what was acknowledged.
func (l *ledger) check(c *Sync) []string {
	var wrong []string
	report := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }

	switch {
	case c.Full && !c.NodeChanged:
		report("is full and says that the node has not changed")
	case c.Full:
	case !l.full:
		report("should be full")
	case c.Revision < l.revision:
		report("was at revision %d already", l.revision)
	case c.NodeChanged && !l.nodeUnacked && c.Node.Equal(l.node):
		report("says that the node changed, which was acknowledged as it is")
	case !c.NodeChanged && (l.nodeUnacked || !c.Node.Equal(l.node)):
		report("does not say that the node changed")
	case !c.NodeChanged && len(c.Services) == 0:
		report("has nothing to say")
	}
	for i, s := range c.Services {
		if i > 0 && api.CompareKeys(c.Services[i-1].Key, s.Key) >= 0 {
			report("service %s comes after %s", s.Key, c.Services[i-1].Key)
		}
		if s.New != nil && s.New.Key() != s.Key {
			report("service %s has the view of %s", s.Key, s.New.Key())
		}
		old := l.views[s.Key]
		switch {
		case c.Full && (s.New == nil || s.Old != nil || s.Retry):
			report("service %s: new: %t, old: %t, retry: %t in a full one", s.Key, s.New != nil, s.Old != nil, s.Retry)
		case c.Full || !l.full:
		case !s.Old.Equal(old):
			report("service %s: old is not what was acknowledged", s.Key)
		case s.Retry != l.unacked[s.Key]:
			report("service %s: retry is %t", s.Key, s.Retry)
		case !s.Retry && s.New.Equal(old):
			report("service %s was acknowledged as it is", s.Key)
		}
	}
	return wrong
}

// checkMeanwhile returns what is wrong with changes, which Changes.Meanwhile
// returned in the call c.
func checkMeanwhile(c *Sync, changes []sink.Change) []string {
	var wrong []string
	told := map[types.NamespacedName]*api.ServiceEndpoints{}
	for _, s := range slices.Concat(c.Services, c.Meanwhile) {
		told[s.Key] = s.New
	}
	for i, s := range changes {
		if i > 0 && api.CompareKeys(changes[i-1].Key, s.Key) >= 0 {
			wrong = append(wrong, fmt.Sprintf("service %s comes after %s", s.Key, changes[i-1].Key))
		}
		if !s.Old.Equal(told[s.Key]) || s.Retry {
			wrong = append(wrong, fmt.Sprintf("service %s: old is not what was told last, or retry is %t", s.Key, s.Retry))
		}
		if s.New.Equal(told[s.Key]) {
			wrong = append(wrong, fmt.Sprintf("service %s was told as it is", s.Key))
		}
	}
	return wrong
}

// settle notes how c was answered.
func (l *ledger) settle(c *Sync) {
	failed, acked := sink.Acknowledged(c.Err)
	switch {
	case errors.Is(c.Err, sink.ErrStartOver), !acked && c.Full:
		l.full = false
		return
	case !acked:
		for _, s := range c.Services {
			l.unacked[s.Key] = true
		}
		l.nodeUnacked = l.nodeUnacked || c.NodeChanged
		return
	}

	if c.Full {
		*l = newLedger()
		l.full = true
	}
	l.revision = c.Revision
	l.node, l.nodeUnacked = c.Node, false
	for _, s := range c.Services {
		if _, ok := failed[s.Key]; ok {
			continue
		}
		delete(l.unacked, s.Key)
		if s.New == nil {
			delete(l.views, s.Key)
		} else {
			l.views[s.Key] = s.New
		}
	}
	for _, s := range c.Meanwhile {
		l.unacked[s.Key] = true
	}
	for key := range failed {
		l.unacked[key] = true
	}
}
