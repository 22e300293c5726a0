// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kpng-project/kpng/health"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// fakeProxy is a proxy whose progress the test controls.
type fakeProxy struct {
	done   chan struct{}
	stop   error // the error that Run returns; it stands for the error of a sink's Stop
	status func() sink.Status
}

func (p *fakeProxy) Run(ctx context.Context) error {
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		if p.stop != nil {
			return p.stop
		}
		return context.Cause(ctx)
	}
}

func (p *fakeProxy) Status() []sink.Status { return []sink.Status{p.status()} }
func (p *fakeProxy) Health() health.Report { return health.Report{} }

func TestRunOnce(t *testing.T) {
	web := sink.FailingService{Key: types.NamespacedName{Namespace: "default", Name: "web"}, Err: errors.New("no such device")}
	for _, test := range []struct {
		name   string
		status func(began time.Time) sink.Status
		after  time.Duration // the time until everything is done, 0 for never
		stop   error
		want   []string // substrings of the error, nil for no error
		took   time.Duration
	}{
		{"done in time", func(time.Time) sink.Status { return sink.Status{} }, 59 * time.Second, nil, nil, 59 * time.Second},
		{"a slow sink that makes progress", func(time.Time) sink.Status { return sink.Status{LastProgress: time.Now()} }, time.Hour, nil, nil, time.Hour},
		{"a source that delivers nothing", func(time.Time) sink.Status { return sink.Status{} }, 0, nil, []string{"--once", "no progress for 1m0s", "source"}, time.Minute},
		{"a sink that fails as a whole", func(time.Time) sink.Status { return sink.Status{Err: errors.New("no kernel")} }, 0, nil, []string{"no kernel"}, time.Minute},
		{"a service that fails repeatedly", func(began time.Time) sink.Status {
			return sink.Status{Passes: 1, LastPass: began.Add(time.Second), LastProgress: time.Now(), Failing: []sink.FailingService{web}}
		}, 0, nil, []string{"service default/web: no such device"}, 61 * time.Second},
		{"many failing services, and a failing Stop", func(time.Time) sink.Status {
			s := sink.Status{}
			for range 12 {
				s.Failing = append(s.Failing, web)
			}
			return s
		}, 0, errors.New("routes were left behind"), []string{"default/web", "and 2 more", "routes were left behind"}, time.Minute},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				p := &fakeProxy{done: make(chan struct{}), stop: test.stop, status: func() sink.Status { return test.status(began) }}
				if test.after > 0 {
					time.AfterFunc(test.after, func() { close(p.done) })
				}
				err := runOnce(t.Context(), p, time.Minute)
				if (err != nil) != (test.want != nil) {
					t.Fatalf("error %v", err)
				}
				for _, want := range test.want {
					if !strings.Contains(err.Error(), want) {
						t.Errorf("error %q does not contain %q", err, want)
					}
				}
				if took := time.Since(began); took != test.took {
					t.Errorf("took %v, want %v", took, test.took)
				}
			})
		})
	}
}
