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
	"github.com/kpng-project/kpng/internal/ordering"
	"k8s.io/apimachinery/pkg/types"
)

// Sink programs one node's dataplane.
type Sink interface {
	// Sync applies c to the dataplane. It must be idempotent: a service that failed may be
	// half applied, and is delivered again.
	//
	// A nil error acknowledges all of c. A [*Failed] acknowledges all services except those
	// that it names. Any other error, or a panic, acknowledges nothing (see [Acknowledged]).
	// The driver delivers unacknowledged services again, merged with later changes. If
	// nothing was acknowledged, the driver delivers smaller batches until it finds the
	// service that causes the error. An error that wraps [ErrStartOver] requests a new pass.
	//
	// Calls of Sync never overlap. The sink must not use c after Sync has returned, but may
	// keep the views in c.
	Sync(ctx context.Context, c *Changes) error
}

// Func is a function that implements Sink.
type Func func(ctx context.Context, c *Changes) error

// Sync calls f.
func (f Func) Sync(ctx context.Context, c *Changes) error { return f(ctx, c) }

// Starter is for sinks that need setup. The driver finds Starter, and the other
// optional interfaces, in the sink or in a sink that the sink wraps (see [As]). The
// driver calls Start once, before the first Sync. If Start fails, the driver ends.
type Starter interface {
	Start(ctx context.Context) error
}

// Stopper is for sinks that hold listeners, addresses, goroutines or other resources. The
// driver calls Stop once, after the last Sync, but not if Start failed.
//
// The context of Stop ends after ten seconds. A sink that needs another limit, for example
// because it drains connections, has the method StopTimeout() time.Duration. The driver calls
// it before Stop. A result that is not positive means ten seconds.
type Stopper interface {
	Stop(ctx context.Context) error
}

// Cleaner is for sinks whose state stays in the dataplane after Stop, so that traffic
// flows while the program is replaced. Cleanup removes everything that sinks of this kind
// and name have created, and nothing else. Drivers never call Cleanup; commands do.
type Cleaner interface {
	Cleanup(ctx context.Context) error
}

// Verifier is for sinks that can compare the dataplane with their records and repair
// drift. The driver calls Verify one minute after the end of the last Verify, while no
// changes wait, and never during a Sync. When changes arrive during a Verify, the driver
// cancels the context of this call, and calls Verify again after a quarter of the interval.
// The second call should continue where the first call stopped. An error that wraps
// [ErrStartOver] requests a new pass. The driver reports any other error or panic, and
// continues.
//
// A sink that needs another interval, for example because its Verify is cheap, has the
// method VerifyInterval() time.Duration. NewDriver calls it. The result 0 means one minute.
// With a negative result, the driver never calls Verify. A wrapper of a sink (see [As]) may
// have this method as well.
type Verifier interface {
	Verify(ctx context.Context) error
}

// Preparer is for sinks that read their dataplane before a pass. PreparePass starts to
// read the dataplane in the background, and returns a channel. The sink closes the
// channel when it has read the dataplane, or when it cannot read it. Then the driver
// begins the pass. Until then, the driver continues to deliver changes. If the channel
// is nil, the driver begins the pass immediately.
//
// The driver does not call PreparePass before the first pass, nor if a pass must begin
// immediately: after a Sync with [ErrStartOver], and when the source has lost changes.
// The driver may also begin a pass before the channel is closed.
type Preparer interface {
	PreparePass(ctx context.Context) (ready <-chan struct{})
}

// Changes is the data that the driver passes to one call of Sync.
//
// The driver makes a pass at the start, after [ErrStartOver], after [Driver.StartOver],
// and when the source has lost the driver's position. A pass delivers every service once,
// in one or several Changes of bounded size. Services that change during a pass are
// delivered before the next batch of the pass. After ErrStartOver, a new pass begins before
// the previous pass has ended. In all other cases, the previous pass ends first.
type Changes struct {
	// First is set if this Changes begins a pass. The driver then treats the state of the
	// dataplane as unknown: earlier acknowledgements do not count any more.
	First bool
	// Last is set if this Changes ends a pass, in which every service was delivered. The
	// sink programs Services. Then it prunes everything, except the state of services that
	// were delivered in this pass, and state that may belong to services in Failing.
	Last bool
	// Failing is set with Last, and is sorted by namespace and name. It lists the services
	// that were delivered in this pass but not acknowledged, except those in Services. Any
	// part of their state may be in the dataplane. They will be delivered again.
	Failing []types.NamespacedName
	// Revision is the revision of the source for which it computed the views.
	Revision uint64
	// Services yields the services to program, in order of namespace and name, each once.
	// The sink may iterate over it several times. Outside of a pass, services that change
	// in one update of the source are in one Changes, so that they can swap addresses.
	// Each large service (see [Options].BatchSize) follows in its own Changes. During a
	// pass and after failures, services that changed in one update may be in several
	// Changes. See [Change].
	Services iter.Seq[Change]
	// Node is the Node object of this node, or nil if it is not known. If a Sync that
	// delivers only a changed Node fails, the driver retries that Sync with backoff. In
	// other Syncs, Node is then the Node that the sink last acknowledged.
	Node *api.Node
	// NodeChanged is true after a change of Node, until the sink acknowledges the change.
	// With First, NodeChanged is always true.
	NodeChanged bool
	// partial: the sink has not yet acknowledged some services that are not in Services.
	partial bool
}

// Change is the change of one service.
//
// No two services have the same claim (see [api.Claim]) at the same time. If another
// service owns an address of New in the sink's records, that service has lost the
// address, and will be changed or pruned soon. The sink programs the address for New, and
// removes the address from its record of the other service.
type Change struct {
	Key types.NamespacedName
	// Old is the view last acknowledged since the pass began, or nil if there is none. It is
	// also nil, with Unsure set, if an earlier Sync gave a claim of this service to another
	// service. During a pass, Old is nil, with Unsure set, if another pass has to follow
	// because the source has lost changes or StartOver was called.
	Old *api.View
	// New is the view to program. If it is nil, the service has to be deleted.
	New *api.View
	// If Unsure is true, any state of this service may be in the dataplane, because its last
	// delivery failed or it was not acknowledged since the pass began. Then the difference
	// between Old and New is not enough. The sink has to read the dataplane or program the
	// whole service. Old and New may be equal or both nil.
	Unsure bool
	// TriggerTime is the time of the oldest endpoint change in this Change, according to the
	// endpoints controller. It is zero if it is unknown or no endpoint has changed.
	TriggerTime time.Time
}

// Endpoints yields the endpoints that differ between Old and New, in order. It yields
// (nil, new) for an added endpoint, (old, nil) for a removed endpoint, and (old, new) if
// scopes, conditions or other properties have changed. It omits draining endpoints.
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
				order = ordering.Endpoints(&before[0], &after[0])
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

// Failed maps services to their errors. Sync returns a *Failed if some services failed
// and all others succeeded. A nil error in the map means success. A *Failed may also name
// services that are not in Changes.Services, for example services that could not be
// pruned. The driver delivers these services again too. If such a service does not exist,
// its Change has a nil New.
type Failed map[types.NamespacedName]error

// Error returns the errors of all services as one line.
func (f *Failed) Error() string {
	services := f.services()
	keys := slices.SortedFunc(maps.Keys(services), ordering.Keys)
	msgs := make([]string, len(keys))
	for i, k := range keys {
		msgs[i] = fmt.Sprintf("service %s: %v", k, services[k])
	}
	return strings.Join(msgs, "; ")
}

// Unwrap returns the errors of all services.
func (f *Failed) Unwrap() []error { return slices.Collect(maps.Values(f.services())) }

// services returns the services that failed. A nil *Failed counts as success, and so does
// a service with a nil error.
func (f *Failed) services() Failed {
	if f == nil {
		return nil
	}
	for _, err := range *f {
		if err == nil {
			failed := maps.Clone(*f)
			maps.DeleteFunc(failed, func(_ types.NamespacedName, err error) bool { return err == nil })
			return failed
		}
	}
	return *f
}

// Add records that the service with this key failed with err. It ignores a nil err.
func (f *Failed) Add(key types.NamespacedName, err error) {
	if err == nil {
		return
	}
	if *f == nil {
		*f = Failed{}
	}
	(*f)[key] = err
}

// Do calls the function program for the service with this key, and records the error. If
// program panics, that counts as an error of the service, and the driver logs the stack.
func (f *Failed) Do(key types.NamespacedName, program func() error) {
	defer func() {
		if r := recover(); r != nil {
			f.Add(key, &panicError{r, debug.Stack()})
		}
	}()
	f.Add(key, program())
}

// panicError is the error of a service if the function that programs it panicked.
type panicError struct {
	value any
	stack []byte
}

func (e *panicError) Error() string { return fmt.Sprintf("panic: %v", e.value) }

// Err returns f, or nil if no service failed. Sync should return failed.Err().
func (f *Failed) Err() error {
	if len(f.services()) == 0 {
		return nil
	}
	return f
}

// Acknowledged interprets err, the result of a Sync. If ok is false, the Sync
// acknowledged nothing. Otherwise it acknowledged all services except those in failed.
//
// If err is nil, is a *Failed, or wraps one or more *Failed and no other error, ok is
// true. For example, errors.Join(failed.Err(), nil) acknowledges the same services as
// failed.Err(). If a *Failed is joined with another error, ok is false, because that error
// may concern all services. If err wraps [ErrStartOver], ok is false too.
func Acknowledged(err error) (failed Failed, ok bool) {
	switch e := err.(type) {
	case nil:
		return nil, true
	case *Failed:
		failed, ok = e.services(), true
	default:
		failed, ok = merged(err)
	}
	if !ok || errors.Is(err, ErrStartOver) {
		return nil, false
	}
	return failed, true
}

// merged returns the services of all *Failed that err wraps. It returns false if err wraps
// another error or no *Failed.
func merged(err error) (Failed, bool) {
	var wrapped []error
	switch e := err.(type) {
	case *Failed:
		return e.services(), true
	case interface{ Unwrap() error }:
		wrapped = []error{e.Unwrap()}
	case interface{ Unwrap() []error }:
		wrapped = e.Unwrap()
	}
	var all Failed
	for _, w := range wrapped {
		some, ok := merged(w)
		if !ok {
			return nil, false
		}
		for key, err := range some {
			if other := all[key]; other != nil {
				err = errors.Join(other, err)
			}
			all.Add(key, err)
		}
	}
	return all, len(wrapped) > 0
}

// ErrStartOver requests a new pass. If a sink no longer knows the state of its dataplane,
// its Sync or Verify should return an error that wraps ErrStartOver.
var ErrStartOver = errors.New("sink starts over")

// ErrOwned reports that another process programs the same objects of the dataplane. Start
// of a sink returns an error that wraps ErrOwned and names that process. A program may
// call Start again until the other process has ended. Cleanup may return it as well.
var ErrOwned = errors.New("owned by another process")
