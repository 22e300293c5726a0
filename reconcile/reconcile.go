// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync/atomic"
	"time"

	"github.com/google/btree"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// Dataplane plans, lists and changes objects. Calls never overlap. A Dataplane may also
// implement the optional interfaces of package sink, such as [sink.Starter]: [sink.As]
// finds them in the [Reconciler].
type Dataplane[K comparable, V any] interface {
	// Plan calls emit for each object that a service needs. If it emits a key twice, the last
	// value counts. Until the next pass, Plan must emit the same objects for the same view.
	//
	// If Plan returns an error or panics, the service fails. The Reconciler programs the
	// objects that Plan has emitted, and the service keeps its other objects. To program all
	// or nothing, call emit only when no error is possible any more.
	Plan(view *api.View, emit func(K, V)) error
	// List calls emit for all objects of this instance. It must not emit objects of other
	// programs.
	List(ctx context.Context, emit func(K, V)) error
	// Apply executes ops in their order. A nil error means that it has executed all
	// operations. A [*Failed] names the operations that have failed. Their objects are
	// unchanged, and Apply has executed the other operations. An error from [Refused] means
	// that nothing has changed. After any other error, the state of the dataplane is unknown,
	// and a new pass begins.
	Apply(ctx context.Context, ops []Op[K, V]) error
}

// Op sets or deletes an object.
type Op[K comparable, V any] struct {
	Key K
	// Old is the recorded value, or nil if the object does not exist. Apply must not
	// change this value.
	Old *V
	// New is the wanted value, or nil if the object has to be deleted. Apply must not
	// change this value. Apply may set the field New of an element of ops to another
	// value. If the operation succeeds, that value becomes the record.
	New *V
	// Service is a service that needs the object, or that has needed it. It is empty for base
	// objects, and for stale objects of unknown services.
	Service types.NamespacedName

	object *object[K, V]
}

// Failed has the errors of operations. The keys are the keys of the objects.
type Failed[K comparable] map[K]error

func (f *Failed[K]) Error() string {
	return fmt.Sprintf("%d operations failed: %v", len(*f), f.first())
}

// first returns one of the errors, or nil if there is none.
func (f *Failed[K]) first() error {
	for _, err := range *f {
		return err
	}
	return nil
}

// Refused returns an error that wraps err. If Apply of a [Dataplane] returns this error, it
// has changed nothing, and one of the operations may be the cause. If err is nil, the
// result is nil.
func Refused(err error) error {
	if err == nil {
		return nil
	}
	return &refused{err}
}

type refused struct{ error }

func (e *refused) Unwrap() error { return e.error }

// Options are the settings of a [Reconciler]. The zero value has the defaults.
type Options[K comparable, V any] struct {
	// Equal compares a recorded value with a planned or listed value. Default: ==. It is
	// required if V is not comparable.
	Equal func(is, want V) bool
	// Depth orders objects that refer to other objects. It returns 0 for an object to which no
	// other object refers. For other objects, it returns a number that is higher than the
	// depth of all objects that refer to them. Deeper objects are set first and deleted last.
	// Default: 0.
	Depth func(K) int

	// Base plans the objects that belong to no service. It must not fail. Default: none.
	Base func(emit func(K, V))
	// Virtual reports whether List cannot emit an object. Verify ignores these virtual
	// objects. When a pass begins, they count as missing. Default: false.
	Virtual func(K) bool
	// MaxOps limits the operations of a call of Apply. But a part is never divided (see
	// the package comment). Default: 20,000.
	MaxOps int
	// VerifyInterval is the shortest pause between two comparisons. The pause is also at least
	// 50 times the cost of the last comparison, repairs included, and it grows to a minute
	// while comparisons find changes. So a repair may take longer than VerifyInterval. If
	// VerifyInterval is negative, each call of Verify compares. Default: five seconds.
	VerifyInterval time.Duration
	// Drifted is called with true when Verify finds objects that another program has changed.
	// It is called with false when no such object is left. Default: none.
	Drifted func(now bool)
}

// Reconciler is a sink that keeps a dataplane equal to plans. See the package comment.
type Reconciler interface {
	sink.Sink
	sink.Verifier
	sink.Cleaner
	// Suspect makes Verify compare the dataplane soon, for example because the kernel has
	// reported a change. It may be called at any time. Verify still makes a pause of 50
	// times the cost of the last comparison.
	Suspect()
}

type reconciler[K comparable, V any] struct {
	dataplane Dataplane[K, V]
	opts      Options[K, V]

	// known is true if the field objects agrees with the dataplane. It is false during
	// calls, so that it stays false after a panic.
	known    bool
	objects  map[K]*object[K, V]
	services map[types.NamespacedName]*service[K, V]
	// unprogrammed has the services that fail and were never programmed. Objects without users
	// may belong to these services.
	unprogrammed map[*service[K, V]]bool
	// passing is true during a pass. Between passes, passedAt is the end of the last
	// pass.
	passing  bool
	passedAt time.Time
	// prune is true while objects without users have to be deleted: after a pass has
	// ended, or after Verify has found such an object. The field waits is true if the
	// deletion waits for failing services.
	prune, waits bool

	suspect atomic.Bool
	verifier
}

// object is an object in the dataplane, or an object that services need.
type object[K comparable, V any] struct {
	key   K
	value V // if exists
	// users.owner is the service whose value the object has. It is the service that was
	// delivered last, or a service that has inherited the object.
	users  users[K, V]
	exists bool
	// old is true if the object had no users when it was listed, and nothing was pruned since.
	old bool
	// marked is for temporary use within a function. Between such uses, it is false.
	marked bool
}

// users are the services that need an object. The object has the owner's value. If there
// is no owner, there are no other users. To copy users, call the method clone.
type users[K comparable, V any] struct {
	owner  *service[K, V]
	others *btree.BTreeG[*service[K, V]] // by key, or nil
}

func (u users[K, V]) clone() users[K, V] {
	if u.others != nil {
		u.others = u.others.Clone()
	}
	return u
}

func (u users[K, V]) has(s *service[K, V]) bool {
	return u.owner == s || u.others != nil && u.others.Has(s)
}

// find returns the first matching user, or nil. It checks the owner first.
func (u users[K, V]) find(matches func(*service[K, V]) bool) (found *service[K, V]) {
	if u.owner != nil && matches(u.owner) {
		return u.owner
	}
	if u.others != nil {
		u.others.Ascend(func(s *service[K, V]) bool {
			if matches(s) {
				found = s
			}
			return found == nil
		})
	}
	return found
}

// add adds a service. The service becomes the owner only if there is no owner.
func (u *users[K, V]) add(s *service[K, V]) {
	switch {
	case u.owner == nil:
		u.owner = s
	case u.owner != s:
		if u.others == nil {
			byKey := func(a, b *service[K, V]) bool { return ordering.Keys(a.key, b.key) < 0 }
			u.others = btree.NewWithFreeListG(16, byKey, btree.NewFreeListG[*service[K, V]](0)) // no spare nodes
		}
		u.others.ReplaceOrInsert(s)
	}
}

// own makes a service the owner.
func (u *users[K, V]) own(s *service[K, V]) {
	last := u.owner
	u.owner = s
	if last != nil && last != s {
		u.add(last)
		u.others.Delete(s)
	}
}

// remove removes a user. If this user was the owner, another user becomes the owner.
func (u *users[K, V]) remove(s *service[K, V]) {
	switch {
	case u.owner != s:
		u.others.Delete(s)
	case u.others != nil:
		u.owner, _ = u.others.DeleteMin()
	default:
		u.owner = nil
	}
	if u.others != nil && u.others.Len() == 0 {
		u.others = nil
	}
}

// service is a service that was delivered or is failing.
type service[K comparable, V any] struct {
	key types.NamespacedName
	// The field view has the view that was last programmed without an error, or nil. The
	// field next has the view that was delivered last.
	view, next *api.View
	// objects includes all objects of which the service is a user.
	objects []*object[K, V]
	failed  bool
	// delivered is true if the service was delivered in the present pass (between passes:
	// in the last pass), or was failing at the end of the last pass.
	delivered bool
}

// The base objects are the objects of a service with an empty key and a view of its own.
var (
	baseKey  types.NamespacedName
	baseView = &api.View{}
)

// New returns a Reconciler of d. It does not call d. New panics if V is not comparable and
// Options.Equal is nil.
func New[K comparable, V any](d Dataplane[K, V], opts Options[K, V]) Reconciler {
	if opts.Equal == nil {
		if !reflect.TypeFor[V]().Comparable() {
			panic(fmt.Sprintf("reconcile: %v is not comparable; set Options.Equal", reflect.TypeFor[V]()))
		}
		opts.Equal = func(a, b V) bool { return any(a) == any(b) }
	}
	setDefault(&opts.Depth, func(K) int { return 0 })
	setDefault(&opts.Base, func(func(K, V)) {})
	setDefault(&opts.MaxOps, 20_000)
	setDefault(&opts.VerifyInterval, 5*time.Second)
	setDefault(&opts.Drifted, func(bool) {})
	return &reconciler[K, V]{dataplane: d, opts: opts}
}

func setDefault[T any](option *T, value T) {
	if reflect.ValueOf(option).Elem().IsZero() {
		*option = value
	}
}

// Unwrap makes [sink.As] find the optional methods of the dataplane.
func (r *reconciler[K, V]) Unwrap() any { return r.dataplane }

// Sync implements [sink.Sink].
func (r *reconciler[K, V]) Sync(ctx context.Context, c *sink.Changes) error {
	t := &changes[K, V]{reconciler: r, index: map[*object[K, V]]*touch[K, V]{}, plans: plans[K, V]{}}
	if c.First {
		if err := r.begin(ctx); err != nil {
			return err
		}
		t.deliver(baseKey, baseView)
	}
	if !r.known {
		return errUnknown
	}
	r.known = false
	for ch := range c.Services {
		t.deliver(ch.Key, ch.New)
	}
	if c.Last {
		for _, key := range c.Failing {
			r.service(key).delivered = true
		}
		for key, s := range r.services {
			if !s.delivered {
				t.deliver(key, nil)
			}
		}
	}
	err := t.apply(ctx)
	if c.Last {
		r.passing, r.prune, r.passedAt = false, true, time.Now()
	}
	if err == nil && (c.Last || r.waits && len(r.unprogrammed) == 0) {
		err = r.pruneStale(ctx)
	}
	if err != nil {
		return startOver(err)
	}
	if c.Last && len(c.Failing)+len(t.failed) == 0 {
		r.opts.Drifted(false)
	}
	r.known = true
	return t.failed.Err()
}

// service returns the record of a service.
func (r *reconciler[K, V]) service(key types.NamespacedName) *service[K, V] {
	s := r.services[key]
	if s == nil {
		s = &service[K, V]{key: key}
		r.services[key], r.unprogrammed[s] = s, true
	}
	return s
}

var errUnknown = startOver(errors.New("the state of the dataplane is unknown"))

// startOver returns an error that wraps err and requests a new pass, because the state
// of the dataplane is unknown.
func startOver(err error) error { return fmt.Errorf("%w (%w)", err, sink.ErrStartOver) }

// begin begins a pass: it lists the dataplane. If the state of the dataplane was
// unknown, begin forgets all services, because the value of an object may come from any
// service.
func (r *reconciler[K, V]) begin(ctx context.Context) error {
	if !r.known {
		r.objects, r.services = map[K]*object[K, V]{}, map[types.NamespacedName]*service[K, V]{}
		r.unprogrammed = map[*service[K, V]]bool{}
	}
	r.known = false
	if _, err := r.list(ctx, nil); err != nil {
		return err
	}
	for _, s := range r.services {
		s.delivered = false
	}
	r.known, r.passing, r.prune, r.waits = true, true, false, false
	return nil
}

// remove records that an object does not exist.
func (r *reconciler[K, V]) remove(o *object[K, V]) {
	var none V
	o.value, o.exists = none, false
	r.tidy(o)
}

// tidy forgets an object that does not exist and has no users.
func (r *reconciler[K, V]) tidy(o *object[K, V]) {
	if !o.exists && o.users.owner == nil {
		delete(r.objects, o.key)
	}
}

// waitLimit limits how long stale objects at depth 0 wait for failing services.
const waitLimit = 10 * time.Minute

// pruneStale deletes the objects without users, if a pass has ended. It waits for the
// services that were never programmed.
func (r *reconciler[K, V]) pruneStale(ctx context.Context) error {
	r.waits = len(r.unprogrammed) > 0
	if !r.prune || r.waits && time.Since(r.passedAt) < waitLimit {
		return nil
	}
	needed := map[K]bool{}
	for s := range r.unprogrammed {
		for _, o := range s.objects {
			needed[o.key] = true
		}
	}
	var ops []Op[K, V]
	for k, o := range r.objects {
		if o.users.owner == nil && !(r.waits && (needed[k] || r.opts.Depth(k) > 0)) {
			ops = append(ops, r.deletion(o))
		}
	}
	failed, err := r.applyDeletions(ctx, ops)
	if len(failed) > 0 {
		klog.FromContext(ctx).Error(failed.first(), "Cannot delete stale objects; retrying later", "objects", len(failed))
	}
	if err != nil || len(failed) > 0 || r.waits {
		return err
	}
	for _, o := range r.objects {
		o.old = false
	}
	r.prune = false
	return nil
}

// Cleanup implements [sink.Cleaner]. If the dataplane is a Cleaner, Cleanup calls it.
// Otherwise, Cleanup deletes all objects that List emits.
func (r *reconciler[K, V]) Cleanup(ctx context.Context) error {
	r.known = false
	if c, ok := r.dataplane.(sink.Cleaner); ok {
		return c.Cleanup(ctx)
	}
	err := r.begin(ctx)
	r.known = false
	if err != nil {
		return err
	}
	var ops []Op[K, V]
	for _, o := range r.objects {
		ops = append(ops, r.deletion(o))
	}
	failed, err := r.applyDeletions(ctx, ops)
	return cmp.Or(err, failed.first())
}
