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
	// Sync makes the dataplane agree with c. It must be idempotent: a service that it
	// reports as failed may be half applied, and is delivered again.
	//
	// A nil error acknowledges all of c. A [*Failed] acknowledges all services except
	// those it names. Any other error acknowledges nothing (see [Acknowledged]). The
	// driver delivers unacknowledged services again, merged with later changes. After an
	// error that acknowledges nothing, the driver delivers smaller batches until it finds
	// the service that causes the error. An error that wraps [ErrStartOver] requests a
	// new pass. A panic counts as an error.
	//
	// Calls of Sync never overlap. The sink must not use c after Sync returns, but may
	// keep the views in it.
	Sync(ctx context.Context, c *Changes) error
}

// Func is a Sink that consists of a function.
type Func func(ctx context.Context, c *Changes) error

// Sync calls f.
func (f Func) Sync(ctx context.Context, c *Changes) error { return f(ctx, c) }

// Starter is implemented by a sink that needs setup. The driver calls Start once, before
// the first Sync. If Start fails, the driver ends.
type Starter interface {
	Start(ctx context.Context) error
}

// Stopper is implemented by a sink that holds listeners, addresses, goroutines or other
// resources. The driver calls Stop once, after the last Sync, if the sink has no Start or
// Start succeeded.
type Stopper interface {
	Stop(ctx context.Context) error
}

// Drainer is a [Stopper] that drains connections when it stops. StopTimeout is the time
// limit of Stop if [Options.StopTimeout] is 0. If both are 0, the default applies.
type Drainer interface {
	Stopper
	StopTimeout() time.Duration
}

// Cleaner is implemented by a sink whose state stays in the dataplane after Stop, so that
// traffic flows while its program is replaced. Cleanup removes everything that sinks of
// this kind and name ever created, and nothing else. Drivers never call Cleanup; commands
// do. [CleanerOf] reports whether a sink is a Cleaner.
type Cleaner interface {
	Cleanup(ctx context.Context) error
}

// Verifier is implemented by a sink that can compare the dataplane with its records and
// repair drift. The driver calls Verify when it is idle, at Options.VerifyInterval, and
// never during a Sync. It cancels the context as soon as changes wait; the next call
// should continue where this one stopped. An error that wraps [ErrStartOver] requests a
// new pass. The driver only reports any other error or panic.
type Verifier interface {
	Verify(ctx context.Context) error
}

// Poller is a [Verifier] whose Verify is cheap while nothing changed. If
// [Options.VerifyInterval] is 0, the driver calls VerifyInterval for its value; if that
// returns 0, the general default applies.
type Poller interface {
	Verifier
	VerifyInterval() time.Duration
}

// Changes is the work of one Sync.
//
// The driver makes a pass at the start, after [ErrStartOver], after [Driver.StartOver],
// and when the source has lost the reader's position. A pass delivers every service once,
// in one Changes or in several of bounded size. Services that change during a pass are
// delivered before its next batch. A new pass may begin before the current one has ended.
type Changes struct {
	// First begins a pass. The state of the dataplane is unknown: acknowledgements before
	// First no longer count.
	First bool
	// Last ends a pass: every service was delivered since First. The sink programs
	// Services. Then it prunes everything that belongs to no service delivered since
	// First, except what may belong to services in Failing.
	Last bool
	// Failing is set with Last. It lists the services that this pass delivered without an
	// acknowledgement, except those in Services, in order of namespace and name. The
	// dataplane may hold any part of them. They are delivered again.
	Failing []types.NamespacedName
	// Revision is the source's revision of the views.
	Revision uint64
	// Services yields the services to program, in order of namespace and name, each once.
	// It may be iterated several times. All services that change in one update of the
	// source are in one Changes, so that services can swap addresses.
	Services iter.Seq[Change]
	// Node is this node as the API server has it, or nil if it is not known.
	Node *api.Node
	// NodeChanged reports whether Node differs from the node last acknowledged, or was
	// delivered without an acknowledgement. It is true with First.
	NodeChanged bool
}

// Change is the change of one service.
//
// No two services have the same claim (see [api.Claim]) at the same time. The sink's
// records may say that another service owns an address of New. Then New takes the address
// over, and the sink removes it from its record of the other service, which is about to
// change or to be pruned.
type Change struct {
	Key types.NamespacedName
	// Old is the view last acknowledged since the pass began, or nil if there is none. It
	// contains no address that an earlier Sync gave to another service.
	Old *api.ServiceEndpoints
	// New is the view to program, or nil if the service has to be deleted.
	New *api.ServiceEndpoints
	// Unsure reports that the dataplane may hold any state of this service, because it
	// was not acknowledged since First or an earlier Sync of it failed. The difference
	// between Old and New is then not enough. The sink compares with the dataplane or
	// programs the whole service. Old and New may be equal or both nil.
	Unsure bool
	// TriggerTime is when the oldest endpoint change in this Change happened, as recorded
	// by the endpoints controller. It is zero if that is unknown or if no endpoint
	// changed.
	TriggerTime time.Time
}

// Endpoints yields the endpoints that differ between Old and New, in order: (nil, new)
// for an added endpoint, (old, nil) for a removed one, and both if lists, conditions or
// other properties changed. It omits draining endpoints.
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

// Failed maps services to their errors. Sync returns a *Failed when some services failed
// and all others succeeded. It may name services that are not in Changes.Services, for
// example services that could not be pruned. The driver delivers those again too. It
// delivers a service that does not exist as a delete.
type Failed map[types.NamespacedName]error

// Error lists every failed service with its error.
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

// services returns the failures. A nil *Failed has none, so a Sync that returns a nil
// *Failed by mistake has succeeded.
func (f *Failed) services() Failed {
	if f == nil {
		return nil
	}
	return *f
}

// Add records that the service key failed with err. It ignores a nil err.
func (f *Failed) Add(key types.NamespacedName, err error) {
	if err == nil {
		return
	}
	if *f == nil {
		*f = Failed{}
	}
	(*f)[key] = err
}

// Do calls program, which programs the service key, and records its error. A panic counts
// as an error of the service; the driver logs its stack.
func (f *Failed) Do(key types.NamespacedName, program func() error) {
	defer func() {
		if r := recover(); r != nil {
			f.Add(key, &panicError{r, debug.Stack()})
		}
	}()
	f.Add(key, program())
}

// panicError is the error of a service whose program function panicked.
type panicError struct {
	value any
	stack []byte
}

func (e *panicError) Error() string { return fmt.Sprintf("panic: %v", e.value) }

// Err returns f, or nil if nothing failed. Sync should end with return failed.Err().
func (f *Failed) Err() error {
	if len(*f) == 0 {
		return nil
	}
	return f
}

// Acknowledged interprets err, the result of a Sync. If ok is false, the Sync
// acknowledged nothing. Otherwise it acknowledged all services except those in failed.
//
// A *Failed counts if err is one or wraps one as its only error. It does not count if it
// is joined with another error, which may concern all services, or if it wraps
// [ErrStartOver].
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

// ErrStartOver requests a new pass. A Sync or Verify that no longer knows the state of
// its dataplane returns an error that wraps it.
var ErrStartOver = errors.New("sink starts over")
