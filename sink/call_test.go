// SPDX-License-Identifier: Apache-2.0

package sink_test

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
)

// hanging is a sink. One of its methods ignores its context and does not return until
// release is closed.
type hanging struct {
	method  string
	release chan struct{}
}

func (h *hanging) hang(method string) error {
	if h.method == method {
		<-h.release
	}
	return nil
}

func (h *hanging) Start(context.Context) error  { return h.hang("Start") }
func (h *hanging) Stop(context.Context) error   { return h.hang("Stop") }
func (h *hanging) Verify(context.Context) error { return h.hang("Verify") }
func (h *hanging) StopTimeout() time.Duration   { _ = h.hang("StopTimeout"); return time.Second }
func (h *hanging) Sync(_ context.Context, c *sink.Changes) error {
	for range c.Services {
		break
	}
	return h.hang("Sync")
}

func TestHangIsLoggedWithItsMethod(t *testing.T) {
	for _, method := range []string{"Start", "Sync", "Verify", "StopTimeout", "Stop"} {
		t.Run(method, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
				logged := func(text string) int {
					synctest.Wait()
					n := 0
					for line := range strings.Lines(logger.GetSink().(ktesting.Underlier).GetBuffer().String()) {
						if strings.Contains(line, text) && strings.Contains(line, `sink="nft"`) && strings.Contains(line, `method="`+method+`"`) {
							n++
						}
					}
					return n
				}
				ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
				src := sinktest.NewSource()
				src.Set(view(web, 1))
				src.MarkSynced()
				s := &hanging{method: method, release: make(chan struct{})}
				ended := make(chan error, 1)
				d := sink.NewDriver(src, s, sink.Options{Name: "nft"})
				d.SetVerifyInterval(time.Second)
				go func() { ended <- d.Run(ctx) }()
				time.Sleep(time.Second)
				if strings.HasPrefix(method, "Stop") {
					cancel()
				}
				time.Sleep(10 * time.Second)
				if n := logged("makes no progress"); n != 1 {
					t.Errorf("the hang is logged %d times within ten seconds", n)
				}
				time.Sleep(time.Hour)
				if n := logged(""); n < 5 || n > 20 {
					t.Errorf("%d lines about the hang in an hour", n)
				}
				cancel()
				if n := logged("Waiting for the sink to return"); n == 0 {
					t.Error("the log does not say that Run waits for the sink")
				}
				close(s.release)
				<-ended
				if n := logged("Sink has returned"); n != 1 {
					t.Errorf("the end of the hang is logged %d times", n)
				}
			})
		})
	}
}

// A slow sink reads a service every five seconds. It hangs after the last service.
func TestProgressIsNoHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
		src := sinktest.NewSource()
		src.Set(manyViews(20)...)
		src.MarkSynced()
		release, ended := make(chan struct{}), make(chan error)
		s := sink.Func(func(_ context.Context, c *sink.Changes) error {
			for range c.Services {
				time.Sleep(5 * time.Second)
			}
			<-release
			return nil
		})
		go func() { ended <- sink.Run(ctx, src, s, sink.Options{}) }()
		logged := func() bool {
			synctest.Wait()
			return strings.Contains(logger.GetSink().(ktesting.Underlier).GetBuffer().String(), "makes no progress")
		}
		time.Sleep(99 * time.Second)
		if logged() {
			t.Error("a slow sink is logged as hanging")
		}
		time.Sleep(10 * time.Second)
		if !logged() {
			t.Error("the hang is not logged within ten seconds")
		}
		cancel()
		close(release)
		<-ended
	})
}

// A sink hangs for five minutes, makes progress, and hangs again. For each hang, the
// log has the durations 8 s, 16 s and so on since its start.
func TestEachHangIsLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
		src := sinktest.NewSource()
		src.Set(manyViews(3)...)
		src.MarkSynced()
		ended := make(chan error)
		s := sink.Func(func(_ context.Context, c *sink.Changes) error {
			for range c.Services {
				time.Sleep(5 * time.Minute)
			}
			return nil
		})
		go func() { ended <- sink.Run(ctx, src, s, sink.Options{}) }()
		hangs := func(text string) int {
			synctest.Wait()
			return strings.Count(logger.GetSink().(ktesting.Underlier).GetBuffer().String(), text)
		}
		for n, at := range []time.Duration{20 * time.Second, 5 * time.Minute, 5 * time.Minute} {
			time.Sleep(at)
			for _, d := range []string{`for="8s"`, `for="16s"`} {
				if got := hangs(d); got != n+1 {
					t.Errorf("in hang %d, %s is logged %d times, want %d", n+1, d, got, n+1)
				}
			}
		}
		time.Sleep(time.Hour) // the sink has nothing to do
		cancel()
		<-ended
		if got := hangs(`for="8s"`); got != 3 {
			t.Errorf("%d hangs are logged, want 3", got)
		}
	})
}

// TestIdleSinkIsNoHang checks that nothing is logged about a call that returned.
func TestIdleSinkIsNoHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
		ctx, cancel := context.WithTimeout(klog.NewContext(t.Context(), logger), time.Hour)
		defer cancel()
		src := sinktest.NewSource()
		src.Set(view(web, 1))
		src.MarkSynced()
		_ = sink.Run(ctx, src, sink.Func(func(context.Context, *sink.Changes) error { return nil }), sink.Options{})
		if log := logger.GetSink().(ktesting.Underlier).GetBuffer().String(); strings.Contains(log, "progress") || strings.Contains(log, "has returned") {
			t.Errorf("log: %s", log)
		}
	})
}

func TestSilentSourceIsLogged(t *testing.T) {
	for _, silent := range []bool{true, false} {
		testSilentSource(t, silent)
	}
}

func testSilentSource(t *testing.T, silent bool) {
	synctest.Test(t, func(t *testing.T) {
		logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
		ctx, cancel := context.WithTimeout(klog.NewContext(t.Context(), logger), 10*time.Second)
		defer cancel()
		src := sinktest.NewSource()
		if !silent {
			src.MarkSynced()
		}
		_ = sink.Run(ctx, src, sinktest.NewRecorder(t, nil), sink.Options{})
		if log := logger.GetSink().(ktesting.Underlier).GetBuffer().String(); strings.Contains(log, "Waiting for the source to provide services") != silent {
			t.Errorf("the source is silent: %t; log: %s", silent, log)
		}
	})
}
