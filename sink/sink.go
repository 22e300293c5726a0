// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// Sink programs one node's dataplane.
type Sink interface {
	// Sync makes the dataplane agree with c. It must be idempotent: what it
	// reports as failed may be half applied and comes again.
	//
	// nil acknowledges all of c, a [*Failed] all of it but the services it
	// names, and any other error nothing (see [Acknowledged]): what was not
	// acknowledged comes again, merged with what changed meanwhile. An error
	// that wraps [ErrStartOver] asks for a full c next. A panic counts as an
	// error.
	//
	// Sync is never called twice at once, and c is only valid until it returns;
	// the views in it may be kept.
	Sync(ctx context.Context, c *Changes) error
}

// Func is a Sink made of a function.
type Func func(ctx context.Context, c *Changes) error

// Sync calls f.
func (f Func) Sync(ctx context.Context, c *Changes) error { return f(ctx, c) }

// Starter is implemented by a sink that has something to set up. Start is
// called once, before the first Sync; if it fails, the driver ends.
type Starter interface {
	Start(ctx context.Context) error
}

// Stopper is implemented by a sink that has something to give back when it is
// no longer driven: listeners, addresses, goroutines. Stop is called once,
// after the last Sync, if Start (where there is one) succeeded.
type Stopper interface {
	Stop(ctx context.Context) error
}

// Drainer is a [Stopper] that lets what it serves end when it stops, and says how
// long that may take at most. It counts where [Options.StopTimeout] says nothing;
// 0 says nothing either.
type Drainer interface {
	Stopper
	StopTimeout() time.Duration
}

// Cleaner is implemented by a sink that leaves something behind when it stops,
// on purpose, so that traffic flows on while its program is replaced. Cleanup
// removes all that sinks of this kind and name ever made, and nothing else. No
// driver calls it: commands do.
type Cleaner interface {
	Cleanup(ctx context.Context) error
}

// Verifier is implemented by a sink that can compare its dataplane with what it
// programmed, and mend what somebody else changed. Verify is called when
// nothing else is to do, at Options.VerifyInterval, and never while a Sync
// runs; its ctx is cancelled the moment changes wait, and the next call should
// go on where this one stopped. An error that wraps [ErrStartOver] asks for a
// full Sync; any other one, and a panic, is reported and changes nothing.
type Verifier interface {
	Verify(ctx context.Context) error
}

// Changes is what a Sync has to bring about.
type Changes struct {
	// Full says that Services is everything this node must have, so that what
	// is not in it goes. Otherwise Services is what differs from what was last
	// acknowledged.
	Full bool
	// Revision is the state's revision that is reached when all of it is applied.
	Revision uint64
	// Services are the changed services in order of namespace and name, each
	// once. It may be read several times. A full one is computed while it is
	// read: keep what you need of it rather than all of it.
	Services iter.Seq[Change]
	// Meanwhile, nil if c is not full, returns what has changed since c was made
	// or Meanwhile was called last, in order of namespace and name, each service
	// once: Old is its view in Services, or the one that Meanwhile returned last.
	// Services stays as it is. What comes with a change of Node waits.
	//
	// A sink need not call it. One whose full Sync takes long may, in between, so
	// that changes do not wait for its end. It programs them as it can and tells
	// nothing of those that fail: whatever comes of the Sync, none of it is
	// acknowledged, and the next one tells these services again, as retries.
	// A sink calls it from one goroutine at a time.
	Meanwhile func() []Change
	// Node is this node as the API has it, nil while it is not known.
	Node *api.Node
	// NodeChanged says that Node differs from what was last acknowledged, or
	// was told and not acknowledged. It is true in a full one.
	NodeChanged bool
}

// Change is what becomes of one service.
type Change struct {
	Key types.NamespacedName
	// Old is the view last acknowledged for the service, nil if there was none,
	// and nil in a full Changes.
	Old *api.ServiceEndpoints
	// New is the view to program, nil if the service has to go.
	New *api.ServiceEndpoints
	// Retry says that New, or a view between Old and New, was told before and
	// not acknowledged, or was told by Meanwhile, so that any part of it may be
	// programmed besides Old: a difference of Old and New is not enough to go by.
	// Old and New may then be equal, or both be nil. It is false in a full Changes.
	Retry bool
	// TriggerTime is when the oldest endpoint change in it happened, as the
	// endpoints controller noted; zero if unknown or no endpoint changed.
	TriggerTime time.Time
}

// Endpoints yields the endpoints that differ between Old and New, in order:
// (nil, new) for one that is added, (old, nil) for one that is removed, both
// for one whose lists, conditions or other properties changed. Draining ones
// are not in it.
func (c *Change) Endpoints() iter.Seq2[*api.Endpoint, *api.Endpoint] {
	return func(yield func(old, new *api.Endpoint) bool) {
		var before, after []api.Endpoint
		if c.Old != nil {
			before = c.Old.Endpoints
		}
		if c.New != nil {
			after = c.New.Endpoints
		}
		for len(before) > 0 || len(after) > 0 {
			var old, new *api.Endpoint
			order := 0
			switch {
			case len(after) == 0:
				order = -1
			case len(before) == 0:
				order = 1
			default:
				order = before[0].Compare(&after[0])
			}
			if order <= 0 {
				old, before = &before[0], before[1:]
			}
			if order >= 0 {
				new, after = &after[0], after[1:]
			}
			if old != nil && new != nil && old.Equal(new) {
				continue
			}
			if !yield(old, new) {
				return
			}
		}
	}
}

// Failed is what Sync returns when some services could not be programmed and
// all others were: the error of each, by service. After a full Changes it may
// name services that were not in it and could not be pruned: they come again,
// to be deleted.
type Failed map[types.NamespacedName]error

// Error names every failed service and its error.
func (f *Failed) Error() string {
	services := f.services()
	keys := slices.SortedFunc(maps.Keys(services), api.CompareKeys)
	msgs := make([]string, len(keys))
	for i, k := range keys {
		msgs[i] = fmt.Sprintf("service %s: %v", k, services[k])
	}
	return strings.Join(msgs, "; ")
}

// Unwrap returns the services' errors.
func (f *Failed) Unwrap() []error { return slices.Collect(maps.Values(f.services())) }

// services returns what failed, which is nothing for a nil *Failed: a Sync that
// returns one by mistake means that all went well.
func (f *Failed) services() Failed {
	if f == nil {
		return nil
	}
	return *f
}

// Add notes that the service key failed with err. A nil err is ignored.
func (f *Failed) Add(key types.NamespacedName, err error) {
	if err == nil {
		return
	}
	if *f == nil {
		*f = Failed{}
	}
	(*f)[key] = err
}

// Err returns f, or nil if nothing failed. Sync ends with return failed.Err().
func (f *Failed) Err() error {
	if len(*f) == 0 {
		return nil
	}
	return f
}

// Acknowledged says what a Sync that returned err acknowledged: nothing if ok is
// false, else everything but the services in failed.
//
// A *Failed counts as such alone or where errors were wrapped around it one by
// one; joined with another error it does not, for that one may be about
// everything. Nor does it if it wraps [ErrStartOver].
func Acknowledged(err error) (failed Failed, ok bool) {
	if err == nil {
		return nil, true
	}
	if errors.Is(err, ErrStartOver) {
		return nil, false
	}
	for ; err != nil; err = errors.Unwrap(err) {
		if f, ok := err.(*Failed); ok {
			return f.services(), true
		}
	}
	return nil, false
}

// ErrStartOver is wrapped by a Sync or Verify that no longer knows what its
// dataplane has, and wants a full Changes next.
var ErrStartOver = errors.New("sink needs a full sync")
