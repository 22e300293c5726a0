// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package traffic sends requests while a test changes the component that handles them,
// and counts the failures.
package traffic

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
)

// interval is the time between two requests of a client.
const interval = 20 * time.Millisecond

// LossDelay is less than one second, TCP's initial retransmission timeout. If a request
// takes longer than LossDelay, a packet was lost or the machine is busy.
const LossDelay = 900 * time.Millisecond

// Traffic consists of several clients that send requests. It counts the requests. Its
// methods may be called concurrently.
type Traffic struct {
	stop    chan struct{}
	clients sync.WaitGroup

	mu    sync.Mutex
	count map[string]*requests
}

// requests counts what happened to the requests of one client.
type requests struct {
	made, slow int
	slowest    time.Duration // of successful requests
	failures   []string
}

func (r *requests) String() string {
	return fmt.Sprintf("%d requests, %d failed, %d took longer than %v, slowest %v",
		r.made, len(r.failures), r.slow, LossDelay, r.slowest.Round(time.Millisecond))
}

// New returns a Traffic without clients. The method Start adds clients, which stop when
// the test ends.
func New(t testing.TB) *Traffic {
	tr := &Traffic{stop: make(chan struct{}), count: map[string]*requests{}}
	t.Cleanup(tr.End)
	return tr
}

// End stops all clients and waits until they have ended.
func (tr *Traffic) End() {
	tr.mu.Lock()
	select {
	case <-tr.stop:
	default:
		close(tr.stop)
	}
	tr.mu.Unlock()
	tr.clients.Wait()
}

// Start runs a client in a network namespace. The client makes requests one after the
// other, one every 20 ms.
func (tr *Traffic) Start(name string, in *netnstest.Namespace, request func() error) {
	tr.clients.Go(func() {
		in.Do(func() error {
			ticker := time.NewTicker(interval)
			defer ticker.Stop()
			for {
				select {
				case <-tr.stop:
					return nil
				case <-ticker.C:
				}
				began := time.Now()
				err := request()
				tr.add(name, began, err)
			}
		})
	})
}

func (tr *Traffic) add(name string, began time.Time, err error) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	r := tr.count[name]
	if r == nil {
		r = &requests{}
		tr.count[name] = r
	}
	r.made++
	took := time.Since(began)
	if err != nil {
		r.failures = append(r.failures, fmt.Sprintf("%s, after %v: %v", began.Format(time.TimeOnly), took.Round(time.Millisecond), err))
		return
	}
	r.slowest = max(r.slowest, took)
	if took > LossDelay {
		r.slow++
	}
}

// Made returns the number of requests that ended since the last call of Report.
func (tr *Traffic) Made() (n int) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	for _, r := range tr.count {
		n += r.made
	}
	return n
}

// Report logs what happened since the last call of Report. It returns the number of
// failed requests, and the number of successful requests that took longer than LossDelay.
// In the log, phase names the part of the test since the last call.
func (tr *Traffic) Report(t testing.TB, phase string) (failed, slow int) {
	t.Helper()
	tr.mu.Lock()
	count := tr.count
	tr.count = map[string]*requests{}
	tr.mu.Unlock()
	total := &requests{}
	for name, r := range count {
		total.made += r.made
		total.slow += r.slow
		total.slowest = max(total.slowest, r.slowest)
		total.failures = append(total.failures, r.failures...)
		for i, failure := range r.failures {
			if i == 5 {
				t.Logf("%s: %s: and %d more", phase, name, len(r.failures)-i)
				break
			}
			t.Logf("%s: %s: %s", phase, name, failure)
		}
	}
	t.Logf("%s: %v", phase, total)
	if total.made == 0 {
		t.Errorf("%s: no requests were made", phase)
	}
	return len(total.failures), total.slow
}
