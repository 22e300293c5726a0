// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"context"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/kpng-project/kpng/internal/listwatch"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	watchapi "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
)

// source describes the objects that a reflector requests from the API server.
type source struct {
	client   rest.Interface
	resource schema.GroupResource
	labels   string
	fields   string
	// newFields replaces the selector fields, except with servers that refuse newFields.
	// Such a server returns more objects than the proxy needs, and the store drops them.
	newFields string
	// refused is the time at which a server last refused newFields.
	refused time.Time

	// latest makes the next list return the server's latest state. If latest is false,
	// the server may return a cached state that is older than earlier events.
	latest atomic.Bool
	// resumed is true if a watch was requested since the last list.
	resumed bool
	// stopCheck ends the check that belongs to the last watch. It may be nil.
	stopCheck func()
}

const (
	// newFieldsAfter is the time after which requests have the selector newFields again,
	// because a new version of the server may have started.
	newFieldsAfter = time.Hour
	// A check of the resource version begins one to two times checkAfter after the watch. So
	// many nodes that lost the same server do not check at the same time.
	checkAfter = 5 * time.Second
	// checkTimeout limits a check.
	checkTimeout = 10 * time.Second
)

// restrict sets the selectors of a request.
func (src *source) restrict(options *metav1.ListOptions) {
	options.LabelSelector, options.FieldSelector = src.labels, src.fields
	if src.newFields != "" && (src.refused.IsZero() || time.Since(src.refused) >= newFieldsAfter) {
		options.FieldSelector = src.newFields
	}
}

// again reports whether a request that failed with err must be repeated without the
// selector newFields.
func (src *source) again(ctx context.Context, options *metav1.ListOptions, err error) bool {
	if options.FieldSelector == src.fields || !apierrors.IsBadRequest(err) {
		return false
	}
	if src.refused.IsZero() {
		klog.FromContext(ctx).Info("API server is older than v1.31 and refuses a field selector; dropping headless services here",
			"resource", src.resource.String(), "selector", src.newFields)
	}
	src.refused = time.Now()
	src.restrict(options)
	return true
}

// request returns a request for the source's resource.
func (src *source) request(options *metav1.ListOptions) *rest.Request {
	return src.client.Get().Resource(src.resource.Resource).VersionedParams(options, metav1.ParameterCodec)
}

// listWatch returns a ListWatch for a reflector. The ListWatch reports the result of each
// request to r, and uses the store to decode lists.
func (src *source) listWatch(r *reporter, store objectStore) listwatch.Plain {
	return listwatch.New(
		func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			src.restrict(&options)
			latest := src.latest.Load()
			if latest && options.Continue == "" {
				options.ResourceVersion = ""
			}
			list, err := src.list(ctx, &options, r.client.decoder, store)
			if src.again(ctx, &options, err) {
				list, err = src.list(ctx, &options, r.client.decoder, store)
			}
			if err == nil {
				src.resumed = false
				src.latest.CompareAndSwap(latest, false)
			}
			return list, r.request(ctx, "list", err)
		},
		func(ctx context.Context, options metav1.ListOptions) (watchapi.Interface, error) {
			if src.stopCheck != nil {
				src.stopCheck()
			}
			if src.latest.Load() {
				return nil, &requestError{"list again", apierrors.NewResourceExpired("resource version went back")}
			}
			options.Watch = true
			src.restrict(&options)
			watch, err := src.request(&options).Watch(ctx)
			if src.again(ctx, &options, err) {
				watch, err = src.request(&options).Watch(ctx)
			}
			resumed := src.resumed
			src.resumed = true
			if err = r.request(ctx, "watch", err); err != nil {
				return nil, err
			}
			if resumed {
				checking, stop := context.WithCancel(ctx)
				src.stopCheck = stop
				r.running.Go(func() { src.check(checking, r, options.ResourceVersion, watch) })
			}
			return reportedWatch{watch, func() {
				if ctx.Err() == nil {
					r.outcome(src.resource.Resource, errWatchEnded)
				}
			}}, nil
		},
	)
}

// check compares the server's resource version once with "since", the version at which the
// watch has begun. If the server's version is lower, etcd was restored from a backup. The
// watch would then deliver nothing until the server reaches the version "since" again, and
// would omit earlier changes. So check ends the watch, and the reflector lists all objects
// again.
func (src *source) check(ctx context.Context, r *reporter, since string, watch watchapi.Interface) {
	for delay := checkAfter; ; delay = min(2*delay, time.Minute/2) {
		select {
		case <-time.After(wait.Jitter(delay, 1)):
		case <-ctx.Done():
			return
		}
		now, err := src.version(ctx, r.opts.NodeName)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil && isLower(now, since):
			klog.FromContext(ctx).Info("Resource versions of the API server went back, as after a restore of etcd; listing all objects again",
				"resource", src.resource.String(), "from", since, "to", now)
			src.latest.Store(true)
			watch.Stop()
			return
		case err == nil, apierrors.IsForbidden(err), apierrors.IsNotFound(err):
			return
		}
	}
}

// version returns the server's present resource version. It requests a list of at most one
// object, which the server finds by its key.
func (src *source) version(ctx context.Context, node string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	name := "kubernetes" // a Service and its EndpointSlice, or a ServiceCIDR
	if src.resource.Resource == nodes {
		name = cmp.Or(node, name) // the proxy may have permission for its own Node only
	}
	options := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, name).String(), Limit: 1}
	o, err := src.request(&options).NamespaceIfScoped(metav1.NamespaceDefault, !isClusterScoped(src.resource.Resource)).Do(ctx).Get()
	if err != nil {
		return "", err
	}
	list, err := apimeta.ListAccessor(o)
	if err != nil {
		return "", err
	}
	return list.GetResourceVersion(), nil
}

// isLower reports whether the resource version a is lower than b. It returns false if one
// of them is not a number.
func isLower(a, b string) bool {
	x, errA := strconv.ParseUint(a, 10, 64)
	y, errB := strconv.ParseUint(b, 10, 64)
	return errA == nil && errB == nil && x < y
}
