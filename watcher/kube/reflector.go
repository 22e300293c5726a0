// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"strings"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	watchapi "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// source is what a reflector asks the API server for.
type source[L runtime.Object] struct {
	client    listWatcher[L]
	resource  schema.GroupResource
	namespace string // empty: all
	labels    string
	// fields is a selector that older servers do not know. What it leaves out
	// is left out by the store as well.
	fields string
}

// reflect keeps store equal to what the source says, until ctx is done.
// expected is an object of the source's type.
func reflect[L runtime.Object](ctx context.Context, w *watch, src source[L], expected runtime.Object, store cache.TransformingStore) {
	r := &reporter{watch: w, resource: src.resource, namespace: src.namespace}
	lw := src.listWatch(r)
	backoff := newBackoff()
	reflector := cache.NewReflectorWithOptions(lw, expected, store, cache.ReflectorOptions{
		Name:  strings.TrimSuffix("kpng/"+src.resource.Resource+"/"+src.namespace, "/"),
		Clock: untilDone{ctx: ctx},
	})
	_ = backoff.DelayWithReset(clock.RealClock{}, backoffReset).Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		err := reflector.ListAndWatchWithContext(ctx)
		if err != nil && ctx.Err() == nil && !r.told(err) {
			klog.FromContext(ctx).Error(err, "Reflecting failed, trying again", "resource", src.resource.String(), "namespace", src.namespace)
		}
		return false, nil
	})
}

// listWatch returns the source in the form that reflectors take. The outcome of
// each request is told to r.
func (src *source[L]) listWatch(r *reporter) *cache.ListWatch {
	var noFields atomic.Bool
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			return do(ctx, src, r, "list", &noFields, options, src.client.List)
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watchapi.Interface, error) {
			return do(ctx, src, r, "watch", &noFields, options, src.client.Watch)
		},
	}
}

// do sends a request with the source's selectors.
func do[L runtime.Object, T any](ctx context.Context, src *source[L], r *reporter, verb string, noFields *atomic.Bool,
	options metav1.ListOptions, send func(context.Context, metav1.ListOptions) (T, error)) (T, error) {
	options.LabelSelector = src.labels
	if !noFields.Load() {
		options.FieldSelector = src.fields
	}
	result, err := send(ctx, options)
	if err != nil && options.FieldSelector != "" && apierrors.IsBadRequest(err) && strings.Contains(err.Error(), "field label not supported") {
		noFields.Store(true)
		options.FieldSelector = ""
		result, err = send(ctx, options)
	}
	r.request(ctx, verb, &options, err)
	return result, err
}

// The backoff after failed requests is that of client-go's reflectors.
const (
	backoffMin   = 800 * time.Millisecond
	backoffMax   = 30 * time.Second // and as much again by jitter
	backoffReset = 2 * time.Minute
)

func newBackoff() wait.Backoff {
	return wait.Backoff{Duration: backoffMin, Cap: backoffMax, Steps: 38, Factor: 2, Jitter: 1}
}

// untilDone is the real clock for one reflector, except that waits end early
// when ctx does: a reflector that cannot reach its server sleeps by After, or by a
// timer before client-go v0.35, without looking at its context.
type untilDone struct {
	clock.RealClock
	ctx context.Context
}

func (c untilDone) After(d time.Duration) <-chan time.Time {
	ctx, cancel := context.WithTimeout(c.ctx, d)
	ch := make(chan time.Time, 1)
	context.AfterFunc(ctx, func() {
		cancel()
		ch <- time.Now()
	})
	return ch
}

func (c untilDone) NewTimer(d time.Duration) clock.Timer { return &untilDoneTimer{c, c.After(d)} }

// untilDoneTimer has a channel of its clock's After.
type untilDoneTimer struct {
	clock untilDone
	c     <-chan time.Time
}

func (t *untilDoneTimer) C() <-chan time.Time { return t.c }

// Stop does nothing: a reflector stops no timer that it backs off by.
func (t *untilDoneTimer) Stop() bool { return false }

func (t *untilDoneTimer) Reset(d time.Duration) bool {
	t.c = t.clock.After(d)
	return true
}
