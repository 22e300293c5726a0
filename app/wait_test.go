// SPDX-License-Identifier: Apache-2.0

package app_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/sink"
)

// ownedSink is a sink with a companion. Another process owns its dataplane for a number of
// calls of Start.
type ownedSink struct {
	owned          atomic.Int32
	started, early atomic.Bool
	companions     atomic.Int32
}

func (s *ownedSink) Start(context.Context) error {
	if s.owned.Add(-1) >= 0 {
		return fmt.Errorf("table x: %w: process 7", sink.ErrOwned)
	}
	s.started.Store(true)
	return nil
}

func (s *ownedSink) Sync(context.Context, *sink.Changes) error { return nil }

func (s *ownedSink) backend() *command.Backend {
	companion := sink.FullState(func(context.Context, []*api.View) error {
		s.companions.Add(1)
		if !s.started.Load() {
			s.early.Store(true)
		}
		return nil
	})
	return &command.Backend{Make: func(command.Run) (command.Parts, error) {
		return command.Parts{Sink: s, Beside: map[string]sink.Sink{"companion": companion}}, nil
	}}
}

func TestSecondProcessFailsOrWaits(t *testing.T) {
	args := []string{"--manifests", demo, "--node-name=vm-002", "--once"}
	var s ownedSink
	s.owned.Store(1)
	err := runCommand(t.Context(), s.backend(), args...)
	if !errors.Is(err, sink.ErrOwned) || !strings.Contains(err.Error(), "process 7") || !strings.Contains(err.Error(), "--wait") {
		t.Errorf("without --wait: %v, want the owner and the flag", err)
	}
	var later ownedSink
	later.owned.Store(3)
	if err := runCommand(t.Context(), later.backend(), append(args, "--wait")...); err != nil {
		t.Errorf("with --wait: %v", err)
	}
	if !later.started.Load() || later.companions.Load() == 0 || later.early.Load() {
		t.Errorf("with --wait: %+v, want that the companion works after the start", &later)
	}
}

func TestWaitEndsWithContext(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	var s ownedSink
	s.owned.Store(1 << 30)
	if err := runCommand(ctx, s.backend(), "--manifests", demo, "--node-name=vm-002", "--wait"); err != nil {
		t.Error(err)
	}
}

func TestWaitTakesOverAddresses(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended, synced := make(chan error, 1), make(chan struct{}, 1)
	s := sink.FullState(func(context.Context, []*api.View) error { synced <- struct{}{}; return nil })
	go func() {
		ended <- runCommand(ctx, s, "--manifests", demo, "--node-name=vm-002", "--wait", "--healthz-bind-address", taken.Addr().String())
	}()
	<-synced
	taken.Close()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for ; ; time.Sleep(10 * time.Millisecond) {
		answer, err := client.Get("http://" + taken.Addr().String() + "/livez")
		if err == nil {
			answer.Body.Close()
			break
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
