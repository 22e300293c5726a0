// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// changes are the changes of one Sync.
type changes[K comparable, V any] struct {
	*reconciler[K, V]
	failed sink.Failed
	// touched has the objects whose users or wanted values change.
	touched []*touch[K, V]
	index   map[*object[K, V]]*touch[K, V]
	// delivered has the services in this Sync, and parent has the parts of these services.
	// The index of one of its services identifies a part, see root.
	delivered []*service[K, V]
	parent    []int
	plans     plans[K, V]
}

// touch is an object whose users or wanted value change.
type touch[K comparable, V any] struct {
	*object[K, V]
	// before has the users before this Sync.
	before users[K, V]
	// want is the value that was emitted last, and from is the service that needs this value,
	// or nil.
	want V
	from *service[K, V]
	// by has the indexes of the services that now need the object or have released it.
	by []int
}

// deliver replaces the objects of a service by the objects that its view needs. A service
// without a view needs no objects.
func (t *changes[K, V]) deliver(key types.NamespacedName, view *api.View) {
	s := t.service(key)
	n := len(t.delivered)
	t.delivered, t.parent = append(t.delivered, s), append(t.parent, n)
	s.next = view
	s.delivered = true
	before := s.objects
	now := make([]*object[K, V], 0, len(before))
	t.failed.Do(key, func() error {
		return t.plan(view, func(k K, v V) {
			var o *object[K, V]
			if i := len(now); i < len(before) && before[i].key == k && before[i].users.owner != nil {
				o = before[i] // a service usually emits the same keys in the same order
			} else {
				o = t.object(k)
			}
			again := o.marked
			if !again {
				o.marked = true
				now = append(now, o)
			}
			if again || !o.exists || o.users.owner != s || !t.opts.Equal(o.value, v) {
				c := t.touch(o, n)
				c.want, c.from = v, s
				o.users.own(s)
			}
		})
	})
	s.failed = t.failed[key] != nil
	emitted := len(now)
	for _, o := range before {
		switch {
		case o.marked, !o.users.has(s):
		case s.failed:
			now = append(now, o)
		default:
			t.touch(o, n).users.remove(s)
		}
	}
	for _, o := range now[:emitted] {
		o.marked = false
	}
	s.objects = now
}

// object returns the object with a key. The object need not exist in the dataplane.
func (r *reconciler[K, V]) object(k K) *object[K, V] {
	o := r.objects[k]
	if o == nil {
		o = &object[K, V]{key: k}
		r.objects[k] = o
	}
	return o
}

// touch records that a service changes an object, and returns the record. The argument by
// is the index of the service.
func (t *changes[K, V]) touch(o *object[K, V], by int) *touch[K, V] {
	c := t.index[o]
	if c == nil {
		c = &touch[K, V]{object: o, before: o.users.clone()}
		t.index[o] = c
		t.touched = append(t.touched, c)
	}
	if n := len(c.by); n == 0 || c.by[n-1] != by {
		c.by = append(c.by, by)
	}
	return c
}

// op returns the operation that an object needs. If the object needs no operation, ok is
// false.
func (t *changes[K, V]) op(c *touch[K, V]) (op Op[K, V], ok bool) {
	owner := c.users.owner
	switch {
	case owner == nil:
		op = t.deletion(c.object)
		op.Service = t.delivered[c.by[len(c.by)-1]].key
		// Until the old objects are pruned, one of them may refer to this object.
		return op, c.exists && !(c.old && t.opts.Depth(c.key) > 0)
	case owner == c.from:
		return t.setting(c.object, c.want)
	case owner == c.before.owner:
		return Op[K, V]{}, false
	}
	// Another user inherits the object.
	if heir, want := t.heir(c); heir != nil {
		c.users.own(heir)
		return t.setting(c.object, want)
	}
	// Only failing services need the object. An object at a depth above 0 stays, because
	// objects of these services may refer to it. An object at depth 0 is deleted, because
	// its value may refer to a missing object.
	op = t.deletion(c.object)
	op.Service = owner.key
	return op, c.exists && t.opts.Depth(c.key) == 0
}

// heir returns a user that can inherit an object. It also returns the value that this
// user needs.
func (t *changes[K, V]) heir(c *touch[K, V]) (heir *service[K, V], want V) {
	heir = c.users.find(func(u *service[K, V]) (ok bool) {
		for _, view := range []*api.View{u.next, u.view} {
			want, ok = t.plans.of(t.reconciler, view)[c.key]
			// A failing user sets its value later, when it succeeds. So it inherits an object
			// only if the object already has this value.
			if ok = ok && (!u.failed || c.exists && t.opts.Equal(c.value, want)); ok {
				break
			}
		}
		return ok
	})
	return heir, want
}

func (r *reconciler[K, V]) deletion(o *object[K, V]) Op[K, V] {
	return Op[K, V]{Key: o.key, Old: &o.value, object: o}
}

// setting returns the operation that sets an object to the value that its owner needs. If
// the object already has this value, ok is false.
func (r *reconciler[K, V]) setting(o *object[K, V], want V) (op Op[K, V], ok bool) {
	op = Op[K, V]{Key: o.key, New: &want, Service: o.users.owner.key, object: o}
	if o.exists {
		op.Old = &o.value
	}
	return op, !o.exists || !r.opts.Equal(o.value, want)
}

// plan emits the objects that a view needs. The view baseView needs the base objects.
func (r *reconciler[K, V]) plan(view *api.View, emit func(K, V)) error {
	switch view {
	case nil:
	case baseView:
		r.opts.Base(emit)
	default:
		return r.dataplane.Plan(view, emit)
	}
	return nil
}

// plans caches the plans of views.
type plans[K comparable, V any] map[*api.View]map[K]V

// of returns the plan of a view. If the cache p does not have the plan, of plans the view
// again. If this fails, the result is incomplete.
func (p plans[K, V]) of(r *reconciler[K, V], view *api.View) map[K]V {
	plan, ok := p[view]
	if !ok {
		plan = map[K]V{}
		var failed sink.Failed
		failed.Do(types.NamespacedName{}, func() error {
			return r.plan(view, func(k K, v V) { plan[k] = v })
		})
		p[view] = plan
	}
	return plan
}

// root returns the index that identifies a part: the part of the service with the index
// i.
func (t *changes[K, V]) root(i int) int {
	for t.parent[i] != i {
		t.parent[i] = t.parent[t.parent[i]]
		i = t.parent[i]
	}
	return i
}

// parts returns the operations, grouped by part. A part has all operations of those
// services that change the same objects.
func (t *changes[K, V]) parts() (parts [][]Op[K, V]) {
	var ops []Op[K, V]
	var first []int // for each operation, a service that changes its object
	for _, c := range t.touched {
		if op, ok := t.op(c); ok {
			ops, first = append(ops, op), append(first, c.by[0])
			for _, i := range c.by[1:] {
				t.parent[t.root(i)] = t.root(c.by[0])
			}
		}
	}
	index := map[int]int{} // by root
	for n, op := range ops {
		root := t.root(first[n])
		i, ok := index[root]
		if !ok {
			i = len(parts)
			index[root], parts = i, append(parts, nil)
		}
		parts[i] = append(parts[i], op)
	}
	return parts
}

// apply applies the changes. It adds the services that fail to t.failed. It returns an
// error only if the state of the dataplane is unknown afterwards.
func (t *changes[K, V]) apply(ctx context.Context) error {
	failed, err := t.applyParts(ctx, t.parts())
	if err != nil {
		return err
	}
	for _, c := range t.touched {
		if err := failed[c.key]; err != nil {
			t.fail(c, err)
		}
	}
	for _, c := range t.touched {
		for _, i := range c.by { // a failing service keeps the objects that it has released
			if s := t.delivered[i]; s.failed && c.exists && c.before.has(s) && !c.users.has(s) {
				c.users.add(s)
				s.objects = append(s.objects, c.object)
			}
		}
		t.tidy(c.object)
	}
	for _, s := range t.delivered {
		if s.failed {
			continue
		}
		s.view = s.next
		delete(t.unprogrammed, s)
		if s.view == nil {
			delete(t.services, s.key)
		}
	}
	return t.failed[baseKey]
}

// fail records an error for all services that change the object of c. The object gets
// back its former users. At depth 0, it also gets back its former owner.
func (t *changes[K, V]) fail(c *touch[K, V], err error) {
	for _, i := range c.by {
		s := t.delivered[i]
		if s.failed = true; t.failed[s.key] == nil {
			t.failed.Add(s.key, err)
		}
		if !c.users.has(s) { // the service has released the object
			c.users.add(s)
			s.objects = append(s.objects, c.object)
		}
	}
	if t.opts.Depth(c.key) == 0 {
		// The object keeps the former owner's value. This value may refer to objects that only
		// this owner needs.
		c.users = c.before.clone()
	}
}

// applyParts applies parts. One call of Apply gets several parts. The result has the
// errors of failed operations. It returns an error only if the state of the dataplane is
// unknown.
func (r *reconciler[K, V]) applyParts(ctx context.Context, parts [][]Op[K, V]) (Failed[K], error) {
	failed := Failed[K]{}
	for len(parts) > 0 {
		n, size := 1, len(parts[0])
		for n < len(parts) && size+len(parts[n]) <= r.opts.MaxOps {
			size += len(parts[n])
			n++
		}
		if err := r.applyTogether(ctx, parts[:n], failed); err != nil {
			return nil, err
		}
		parts = parts[n:]
	}
	return failed, nil
}

// applyTogether calls Apply for parts. If the dataplane refuses them, it tries each half.
func (r *reconciler[K, V]) applyTogether(ctx context.Context, parts [][]Op[K, V], failed Failed[K]) error {
	ops := slices.Concat(parts...)
	r.sort(ops)
	err := Refused(context.Cause(ctx))
	if err == nil {
		err = r.dataplane.Apply(ctx, ops)
	}
	var all *refused
	some := &Failed[K]{}
	switch {
	case errors.As(err, &all) && len(parts) > 1:
		if err := r.applyTogether(ctx, parts[:len(parts)/2], failed); err != nil {
			return err
		}
		return r.applyTogether(ctx, parts[len(parts)/2:], failed)
	case err != nil && all == nil && (!errors.As(err, &some) || errors.Is(err, sink.ErrStartOver)):
		return err
	}
	for i := range ops {
		o := ops[i].object
		switch {
		case all != nil:
			failed[o.key] = all.error
		case (*some)[o.key] != nil:
			failed[o.key] = (*some)[o.key]
		case ops[i].New == nil:
			r.remove(o)
		default:
			o.value, o.exists = *ops[i].New, true
		}
	}
	return nil
}

// sort puts operations into the order of Apply: deep objects are set first and deleted last.
func (r *reconciler[K, V]) sort(ops []Op[K, V]) {
	rank := func(op *Op[K, V]) int {
		if op.New == nil {
			return r.opts.Depth(op.Key)
		}
		return -1 - r.opts.Depth(op.Key)
	}
	slices.SortStableFunc(ops, func(a, b Op[K, V]) int { return cmp.Compare(rank(&a), rank(&b)) })
}

// applyDeletions deletes objects, one depth after the other. If some deletions fail, all
// deeper objects stay, because the objects that were not deleted may refer to them.
func (r *reconciler[K, V]) applyDeletions(ctx context.Context, ops []Op[K, V]) (failed Failed[K], err error) {
	r.sort(ops)
	for len(ops) > 0 && len(failed) == 0 && err == nil {
		n := 1
		for n < len(ops) && r.opts.Depth(ops[n].Key) == r.opts.Depth(ops[0].Key) {
			n++
		}
		failed, err = r.applyParts(ctx, slices.Collect(slices.Chunk(ops[:n], 1)))
		ops = ops[n:]
	}
	return failed, err
}
