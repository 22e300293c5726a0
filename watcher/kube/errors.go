// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/klog/v2"
)

// Error is a failed request to the API server.
type Error struct {
	// Verb is "list" or "watch".
	Verb string
	// Resource is what was asked for.
	Resource schema.GroupResource
	// Server is the base URL of the API server.
	Server string
	// Err is the cause, such as an apierrors.StatusError.
	Err error
}

// MissingPermission reports whether the server refused the request because of
// who asked (HTTP status 401 or 403). Retrying helps only once somebody has
// granted the permission.
func (e *Error) MissingPermission() bool {
	return apierrors.IsForbidden(e.Err) || apierrors.IsUnauthorized(e.Err)
}

// Error names the server, and the permission if one is missing.
func (e *Error) Error() string {
	text := fmt.Sprintf("%s %s at API server %s: ", e.Verb, e.Resource.Resource, e.Server)
	var request *url.Error
	switch {
	case apierrors.IsUnauthorized(e.Err):
		text += "credentials are missing or not accepted; " + e.needed() + ": "
	case apierrors.IsForbidden(e.Err):
		text += "missing permission; " + e.needed() + ": "
	case errors.As(e.Err, &request):
		return text + request.Err.Error() // without the URL, a long one
	}
	return text + e.Err.Error()
}

func (e *Error) needed() string {
	where := "in all namespaces"
	if e.Resource.Resource == nodes {
		where = "at cluster scope"
	}
	return fmt.Sprintf("needed are the verbs list and watch on resource %q of API group %q %s", e.Resource.Resource, e.Resource.Group, where)
}

// Unwrap returns Err.
func (e *Error) Unwrap() error { return e.Err }

// remindAfter is how long an error that stays the same is not logged again.
const remindAfter = 5 * time.Minute

// reporter tells of the requests of one reflector, and repeats itself rarely.
type reporter struct {
	*watch
	resource schema.GroupResource

	mu       sync.Mutex
	failures map[string]failure // by verb
	last     error
}

type failure struct {
	text   string
	logged time.Time
}

// request takes note of the outcome of a request.
func (r *reporter) request(ctx context.Context, verb string, options *metav1.ListOptions, err error) {
	switch {
	case err == nil:
		r.succeeded(ctx, verb)
	case ctx.Err() != nil:
	case isExpired(err):
		// The reflector lists again.
	case options.SendInitialEvents != nil && (apierrors.IsInvalid(err) || apierrors.IsBadRequest(err)):
		// A server that knows no streaming lists; the reflector does without.
	default:
		r.failed(ctx, verb, err)
	}
}

func (r *reporter) succeeded(ctx context.Context, verb string) {
	r.mu.Lock()
	_, failed := r.failures[verb]
	delete(r.failures, verb)
	r.mu.Unlock()
	if failed {
		klog.FromContext(ctx).Info("API server answers again", "verb", verb, "resource", r.resource.String())
	}
}

func (r *reporter) failed(ctx context.Context, verb string, err error) {
	e := &Error{Verb: verb, Resource: r.resource, Server: r.client.server(), Err: err}
	if r.opts.OnError != nil {
		r.opts.OnError(e)
	}
	if r.opts.FailFast && !r.state.IsSynced() {
		r.end(e)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last = err
	text, now := e.Error(), time.Now()
	if last := r.failures[verb]; last.text == text && now.Sub(last.logged) < remindAfter {
		return
	}
	if r.failures == nil {
		r.failures = map[string]failure{}
	}
	r.failures[verb] = failure{text, now}
	klog.FromContext(ctx).Error(e, "Request to the API server failed, trying again")
}

// told reports whether err, or what it wraps, has been reported already.
func (r *reporter) told(err error) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last != nil && errors.Is(err, r.last)
}

// isExpired reports whether the server does not have the resource version that
// was asked for, any more or yet. Reflectors know what to do then.
func isExpired(err error) bool {
	return apierrors.IsResourceExpired(err) || apierrors.IsGone(err) ||
		apierrors.HasStatusCause(err, metav1.CauseTypeResourceVersionTooLarge)
}
