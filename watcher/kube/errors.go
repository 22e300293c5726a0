// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kpng-project/kpng/cluster"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	watchapi "k8s.io/apimachinery/pkg/watch"
	"k8s.io/klog/v2"
)

// requestError is the error of a failed API request. The error was already logged.
type requestError struct {
	text  string
	cause error
}

func (e *requestError) Error() string { return e.text }

func (e *requestError) Unwrap() error { return e.cause }

// newRequestError returns an error with the server's address and any missing permission.
func newRequestError(verb string, resource schema.GroupResource, server string, err error) *requestError {
	where := "in all namespaces"
	if isClusterScoped(resource.Resource) {
		where = "at cluster scope"
	}
	needed := fmt.Sprintf("grant the verbs list and watch on resource %q of API group %q %s: ", resource.Resource, resource.Group, where)
	cause, request := err.Error(), (*url.Error)(nil)
	switch {
	case apierrors.IsUnauthorized(err):
		cause = "credentials are missing or not accepted; " + needed + cause
	case apierrors.IsForbidden(err):
		cause = "missing permission; " + needed + cause
	case isAbsent(resource, err):
		cause = "the server has no such objects; Kubernetes has them (networking.k8s.io/v1) since v1.33"
	case errors.As(err, &request):
		cause = request.Err.Error() // without the URL, which is long
	}
	return &requestError{fmt.Sprintf("%s %s at API server %s: %s", verb, resource.Resource, server, cause), err}
}

// reporter logs and records the results of one reflector's requests.
type reporter struct {
	*watch
	resource schema.GroupResource
	failing  atomic.Bool
}

// request logs and records err, the result of a request to the API server. It returns the
// error that the reflector gets. That error may differ from err.
func (r *reporter) request(ctx context.Context, verb string, err error) error {
	switch {
	case err == nil:
		r.outcome(r.resource.Resource, nil)
		if r.failing.Swap(false) {
			klog.FromContext(ctx).Info("API server is reachable again", "verb", verb, "resource", r.resource.String())
		}
		return nil
	case ctx.Err() != nil:
		return err
	case isExpired(err):
		return err // no failure, because the reflector then lists again
	}
	e := newRequestError(verb, r.resource, r.client.server(), err)
	if r.opts.FailFast && !r.state.IsSynced() {
		r.end(e)
		return e
	}
	again := r.failing.Swap(true)
	r.outcome(r.resource.Resource, e)
	if !again || !isAbsent(r.resource, err) { // log once that the server is too old
		klog.FromContext(ctx).Error(e, "Request to the API server failed; retrying")
	}
	return e
}

// isAbsent reports whether a server is too old to have ServiceCIDRs.
func isAbsent(resource schema.GroupResource, err error) bool {
	return resource.Resource == serviceCIDRs && apierrors.IsNotFound(err)
}

// staleAfter is the default of Options.StaleAfter.
const staleAfter = 3 * time.Minute

// outage is the time since a request for a resource failed, or since its watch ended.
type outage struct {
	timer *time.Timer
	long  bool  // Options.StaleAfter has passed
	err   error // of the last request; nil if the watch ended and no request has failed yet
}

// errWatchEnded is the outcome of a watch that ended, which is normal.
var errWatchEnded = errors.New("watch ended")

// outcome records the error of a request for a resource, or nil, and updates the stale flag.
// The end of a watch counts as a failure until the next request succeeds. The flag does not
// wait for the next request, because a reflector waits up to a minute before it.
func (w *watch) outcome(resource string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	defer w.updateError()
	o := w.outages[resource]
	switch {
	case err == nil && o != nil:
		o.timer.Stop()
		delete(w.outages, resource)
		w.updateStale()
	case err != nil && o == nil:
		o = &outage{}
		o.timer = time.AfterFunc(cmp.Or(w.opts.StaleAfter, staleAfter), func() {
			w.whileRunning(func() {
				w.mu.Lock()
				defer w.mu.Unlock()
				o.long = true
				w.updateStale()
			})
		})
		w.outages[resource] = o
	}
	if err != nil && err != errWatchEnded {
		o.err = err
	}
}

// updateError sets the state's source error to the error of the first resource. The caller
// holds w.mu.
func (w *watch) updateError() {
	for _, resource := range slices.Sorted(maps.Keys(w.outages)) {
		if err := w.outages[resource].err; err != nil {
			w.state.SetSourceError(err)
			return
		}
	}
	w.state.SetSourceError(nil)
}

// updateStale sets the state's stale flag. The caller holds w.mu.
func (w *watch) updateStale() {
	stale := false
	for _, o := range w.outages {
		stale = stale || o.long
	}
	w.state.Update(func(tx *cluster.Tx) { tx.SetStale(stale) })
}

// reportedWatch is a watch that reports its end. Reflectors stop each watch that ended.
type reportedWatch struct {
	watchapi.Interface
	ended func()
}

// Stop implements watch.Interface.
func (w reportedWatch) Stop() {
	w.Interface.Stop()
	w.ended()
}

// isExpired reports whether the requested resource version is too old or too new for the
// server. Reflectors handle both cases.
func isExpired(err error) bool {
	return apierrors.IsResourceExpired(err) || apierrors.IsGone(err) ||
		apierrors.HasStatusCause(err, metav1.CauseTypeResourceVersionTooLarge)
}
