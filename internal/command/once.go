// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kpng-project/kpng/sink"
)

// runOnce runs p, whose sinks have sink.Options.Once set. If there is no progress for the
// duration timeout, runOnce stops p and returns an error that lists the failing services.
func runOnce(ctx context.Context, p proxy, timeout time.Duration) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	var late error
	watching := make(chan struct{})
	go func() {
		defer close(watching)
		for progress := time.Now(); ; {
			for _, s := range p.Status() {
				at := s.LastProgress
				if s.Passes > 0 {
					at = s.LastPass // after a pass, only failing services are left; their retries are not progress
				}
				if at.After(progress) {
					progress = at
				}
			}
			left := timeout - time.Since(progress)
			if left <= 0 {
				late = fmt.Errorf("--once: not everything is programmed, and no progress for %v: %s", timeout, missing(p.Status()))
				end(late)
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
	end(nil)
	<-watching
	if late != nil && !errors.Is(err, late) {
		err = errors.Join(late, err)
	}
	return err
}

func missing(sinks []sink.Status) string {
	const most = 10 // limits the list of failing services
	failing := 0
	var why []string
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
		return "the source has not synced, or a sink is busy"
	}
	return strings.Join(why, "; ")
}
