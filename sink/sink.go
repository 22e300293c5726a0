// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"runtime/debug"
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
	// acknowledged comes again, merged with what changed meanwhile. After such an
	// error the driver delivers fewer services at once, until it knows which service
	// causes it. An error that wraps [ErrStartOver] asks for a new pass. A panic
	// counts as an error.
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
// driver calls it: commands do. [CleanerOf] says whether a sink is one.
type Cleaner interface {
	Cleanup(ctx context.Context) error
}

// Verifier is implemented by a sink that can compare its dataplane with what it
// programmed, and mend what somebody else changed. Verify is called when
// nothing else is to do, at Options.VerifyInterval, and never while a Sync
// runs; its ctx is cancelled the moment changes wait, and the next call should
// go on where this one stopped. An error that wraps [ErrStartOver] asks for a
// new pass; any other one, and a panic, is reported and changes nothing.
type Verifier interface {
	Verify(ctx context.Context) error
}

// Changes is what one Sync has to program.
//
// At the start, after [ErrStartOver], and whenever the source or the caller of
// [Driver.StartOver] says that the dataplane may hold anything, the driver makes a
// pass: it delivers every service once, in one Changes or in several of bounded size.
// Services that change during a pass are delivered before its next batch. A pass may
// begin again before it has ended.
type Changes struct {
	// First begins a pass. From here on, nothing is known about the dataplane:
	// acknowledgements of earlier Changes no longer count.
	First bool
	// Last ends a pass: every service was delivered since First. The sink programs
	// Services and then prunes everything that belongs to no service delivered since
	// First, except what may belong to the services in Failing.
	Last bool
	// Failing are, with Last, the services that were delivered in the pass and not
	// acknowledged, except those in Services, in order of namespace and name. The
	// dataplane may have anything of them. They are delivered again.
	Failing []types.NamespacedName
	// Revision is the revision of the source's state that the views belong to.
	Revision uint64
	// Services are the services to program, in order of namespace and name, each once.
	// They may be read several times. The services that one update of the source
	// changes are never split over several Changes, so that services can swap addresses.
	Services iter.Seq[Change]
	// Node is this node as the API server has it, nil while it is not known.
	Node *api.Node
	// NodeChanged says that Node differs from the one last acknowledged, or was
	// delivered and not acknowledged. It is true with First.
	NodeChanged bool
}

// Change is the change of one service.
//
// No two services have a claim (see [api.Claim]) at the same time. If the sink's own
// records say that another service has an address of New, New takes it over, and the
// sink forgets that the other service had it: that service is about to change, or to
// be pruned.
type Change struct {
	Key types.NamespacedName
	// Old is the view last acknowledged since the pass began, nil if there is none.
	// It names no address that was given to another service in an earlier Sync.
	Old *api.ServiceEndpoints
	// New is the view to program, nil if the service has to be deleted.
	New *api.ServiceEndpoints
	// Unsure says that the dataplane may have anything of this service: it has not
	// been acknowledged since First, or an earlier Sync of it failed. The difference
	// between Old and New is then not enough: the sink compares with what there is, or
	// programs the whole service. Old and New may be equal, or both be nil.
	Unsure bool
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
// all others were: the error of each, by service. It may name services that were
// not in Changes.Services, such as those that could not be pruned: the driver
// delivers them again, to be deleted if they do not exist.
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

// Do calls program, which programs the service key, and adds its error. A panic in
// it counts as an error of the service; the driver logs its stack.
func (f *Failed) Do(key types.NamespacedName, program func() error) {
	defer func() {
		if r := recover(); r != nil {
			f.Add(key, &panicError{r, debug.Stack()})
		}
	}()
	f.Add(key, program())
}

// panicError is the error of a service whose programming panicked.
type panicError struct {
	value any
	stack []byte
}

func (e *panicError) Error() string { return fmt.Sprintf("panic: %v", e.value) }

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
// dataplane has, and wants a new pass.
var ErrStartOver = errors.New("sink starts over")
