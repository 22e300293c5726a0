// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"net/http"
	"path"
	"sync"
	"testing"

	"k8s.io/client-go/rest"
)

// wire records the requests of a proxy in this process.
type wire struct {
	mu       sync.Mutex
	requests []request
	more     chan struct{} // closed by the next request
}

// request describes a completed request.
type request struct {
	// resource is the requested resource, such as "services".
	resource string
	// list is true for a LIST request, and for a WATCH request whose events begin with all
	// existing objects.
	list bool
	// status is the status of the response. If there is no response, status is 0 and err is
	// the error.
	status int
	err    error
}

func newWire() *wire { return &wire{more: make(chan struct{})} }

// tap changes config so that w records the requests of all clients that use config.
func (w *wire) tap(config *rest.Config) *rest.Config {
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return &tap{w, next} })
	return config
}

// tap is a transport that records its requests in wire.
type tap struct {
	wire *wire
	next http.RoundTripper
}

func (t *tap) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := t.next.RoundTrip(r)
	query := r.URL.Query()
	status := 0
	if err == nil {
		status = answer.StatusCode
	}
	t.wire.mu.Lock()
	defer t.wire.mu.Unlock()
	t.wire.requests = append(t.wire.requests, request{
		resource: path.Base(r.URL.Path),
		list:     query.Get("watch") != "true" || query.Get("sendInitialEvents") == "true",
		status:   status,
		err:      err,
	})
	close(t.wire.more)
	t.wire.more = make(chan struct{})
	return answer, err
}

// WrappedRoundTripper returns the wrapped transport, so that client-go can close the
// transport's connections.
func (t *tap) WrappedRoundTripper() http.RoundTripper { return t.next }

// count returns the number of requests so far, for a later call of wait.
func (w *wire) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.requests)
}

// wait waits for a request that satisfies the given condition. It ignores the first n
// recorded requests.
func (w *wire) wait(t testing.TB, n int, what string, is func(request) bool) {
	t.Helper()
	ctx := within(t)
	for {
		w.mu.Lock()
		requests, more := w.requests[n:], w.more
		w.mu.Unlock()
		for _, r := range requests {
			if is(r) {
				return
			}
		}
		select {
		case <-more:
		case <-ctx.Done():
			t.Fatalf("wait for %s: %v, after %+v", what, context.Cause(ctx), requests)
		}
	}
}
