// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"context"
	"fmt"
	"runtime/debug"
	"time"

	"k8s.io/klog/v2"
)

// running is the sink's method that runs now, if any, and the time of its call.
type running struct {
	method string
	since  time.Time
}

// call calls f, a method of the sink. If f makes no progress, or does not return after the
// end of ctx, call logs that. If f panics, call returns the panic as an error.
func (d *Driver) call(ctx context.Context, method string, f func(context.Context) error) error {
	begin, returned := time.Now(), make(chan struct{})
	d.update(func() { d.running = running{method, begin} })
	report := time.AfterFunc(hangAfter, func() { d.reportHang(ctx, method, begin, returned) })
	defer func() {
		report.Stop()
		close(returned)
		d.update(func() { d.running = running{} })
	}()
	return guard(ctx, method, f)
}

// guard calls f, a method of the sink. If f panics, guard returns the panic as an error.
func guard(ctx context.Context, method string, f func(context.Context) error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic in %s: %v", method, r)
			klog.FromContext(ctx).Error(err, "Sink panicked", "stack", string(debug.Stack()))
		}
	}()
	return f(ctx)
}

const (
	// hangAfter limits the time without progress. After it, the method of the sink is
	// logged.
	hangAfter = 8 * time.Second
	// maxHangInterval limits the time between the log lines about one call of a method.
	maxHangInterval = 10 * time.Minute
)

// reportHang logs that a method of the sink makes no progress, at growing intervals,
// until the method has returned. After ctx has ended, progress no longer counts,
// because the method only has to return.
func (d *Driver) reportHang(ctx context.Context, method string, since time.Time, returned <-chan struct{}) {
	log := klog.FromContext(ctx).WithValues("method", method)
	ended, interval, logged := ctx.Done(), hangAfter, false
	for {
		if ended != nil {
			if progress := d.lastProgress(); progress.After(since) {
				since, interval = progress, hangAfter
			}
		}
		idle := time.Since(since)
		if idle >= interval {
			if ended != nil {
				log.Error(nil, "Sink makes no progress", "for", idle.Round(time.Second))
			} else {
				log.Error(nil, "Waiting for the sink to return after the end of its context", "for", idle.Round(time.Second))
			}
			interval, logged = idle+min(idle, maxHangInterval), true
		}
		select {
		case <-returned:
			if logged {
				log.Info("Sink has returned")
			}
			return
		case <-ended:
			ended, since, interval = nil, time.Now(), hangAfter
			if logged {
				log.Error(nil, "Waiting for the sink to return after the end of its context", "for", time.Duration(0))
			}
		case <-time.After(min(interval-idle, hangAfter)): // after progress, a new hang may have begun
		}
	}
}
