// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kpng-project/kpng/sink"
)

// errLate is what every error of runOnce wraps that says that time is up.
var errLate = errors.New("--once: not everything could be programmed")

// runOnce runs p, whose sinks all have sink.Options.Once, and ends it with an error that says
// what is missing when no progress was made for as long as timeout.
func runOnce(ctx context.Context, p proxy, timeout time.Duration) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	watching := make(chan struct{})
	go func() {
		defer close(watching)
		progress := time.Now()
		for {
			for _, s := range p.Status() {
				progress = latest(progress, lastProgress(s))
			}
			left := timeout - time.Since(progress)
			if left <= 0 {
				end(fmt.Errorf("%w, and there was no progress for %v: %s", errLate, timeout, missing(p.Status())))
				return
			}
			select {
			case <-time.After(left):
			case <-ctx.Done():
				return
			}
		}
	}()
	err := p.Run(ctx)
	late := context.Cause(ctx)
	end(nil)
	<-watching
	if errors.Is(late, errLate) && !errors.Is(err, errLate) {
		err = errors.Join(late, err)
	}
	return err
}

// lastProgress returns when a sink last came closer to being done. After the first pass, only
// services that fail are left, and to try them again is no progress.
func lastProgress(s sink.Status) time.Time {
	if s.Passes > 0 {
		return s.LastPass
	}
	return s.LastProgress
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// missing says why sinks are not done.
func missing(sinks []sink.Status) string {
	const most = 10 // failing services to name
	var why []string
	failing := 0
	for _, s := range sinks {
		if s.Err != nil {
			why = append(why, s.Err.Error())
		}
		for _, f := range s.Failing {
			if failing++; failing <= most {
				why = append(why, fmt.Sprintf("service %s: %v", f.Key, f.Err))
			}
		}
	}
	if failing > most {
		why = append(why, fmt.Sprintf("and %d more services", failing-most))
	}
	if len(why) == 0 {
		return "the source has not delivered everything, or a sink is busy"
	}
	return strings.Join(why, "; ")
}
