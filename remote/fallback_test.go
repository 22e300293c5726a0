// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"context"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/statuspage"
	"github.com/kpng-project/kpng/remote"
	"github.com/kpng-project/kpng/sink/sinktest"
)

// The only server ends. Later, another server starts, which does not know the first
// server's tokens. In between, the client reads the cluster from its fallback. The first
// attempt of the fallback fails. The fallback has one more service, and only this service
// reaches the sink.
func TestClientFallsBackAndReturns(t *testing.T) {
	state, address := manyServices(3), socket(t)
	_, stop := serve(t, state, address, quick)
	left := make(chan struct{})
	var uses atomic.Int32
	client, err := remote.NewClient(remote.ClientOptions{
		NodeName: "n", DialOptions: remote.Quick(remote.DialOptions{Addresses: []string{address}}),
		Fallback: &remote.Fallback{After: 100 * time.Millisecond, Watch: func(ctx context.Context, state *cluster.State) error {
			if uses.Add(1) == 1 {
				return context.DeadlineExceeded
			}
			rewrite(state, 3, 0)
			state.SetSynced()
			update(state, func(to apitest.Writer) { to.SetService(plain("late", 1)) })
			<-ctx.Done()
			close(left)
			return context.Cause(ctx)
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	start(t, client.Run)
	rec := sinktest.NewRecorder(t, nil)
	drive(t, client.Source(), rec)
	views := func(n int) {
		t.Helper()
		if err := rec.Wait(within(t), func([]sinktest.Sync) bool { return len(rec.Views()) == n }); err != nil {
			t.Fatal(err)
		}
	}
	views(3)
	time.Sleep(300 * time.Millisecond) // longer than After
	if uses.Load() != 0 {
		t.Error("the client fell back although a server answered")
	}
	before := len(rec.Syncs())
	stop()
	views(4)
	if client.Stale() {
		t.Error("stale")
	}
	status := &statuspage.Handler{Client: client}
	reported := func() bool {
		page := httptest.NewRecorder()
		status.ServeHTTP(page, httptest.NewRequest("GET", "/status?output=json", nil))
		return strings.Contains(page.Body.String(), "reads the API server itself")
	}
	if !client.UsesFallback() || !reported() {
		t.Error("the client and the status page do not report the fallback")
	}
	serve(t, state, address, quick)
	views(3)
	<-left
	for _, s := range rec.Syncs()[before:] {
		if got := keys(s); len(got) > 0 && !slices.Equal(got, []string{"late"}) {
			t.Errorf("the sink received %v", got)
		}
	}
	update(state, func(to apitest.Writer) { to.SetService(plain("new", 1)) })
	views(4)
	if client.UsesFallback() || reported() {
		t.Error("the client and the status page report a fallback that has ended")
	}
	if n := uses.Load(); n != 2 {
		t.Errorf("%d uses of the fallback", n)
	}
}

// A stale server counts as a server that does not answer.
func TestClientFallsBackFromStaleServer(t *testing.T) {
	state, address := manyServices(3), socket(t)
	state.Update(func(tx *cluster.Tx) { tx.SetStale(true) })
	serve(t, state, address, quick)
	client, err := remote.NewClient(remote.ClientOptions{
		NodeName: "n", DialOptions: remote.Quick(remote.DialOptions{Addresses: []string{address}}),
		Fallback: &remote.Fallback{After: 100 * time.Millisecond, Watch: func(ctx context.Context, state *cluster.State) error {
			rewrite(state, 5, 0)
			state.SetSynced()
			<-ctx.Done()
			return context.Cause(ctx)
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	start(t, client.Run)
	rec := sinktest.NewRecorder(t, nil)
	drive(t, client.Source(), rec)
	for _, step := range []struct {
		stale bool
		views int
	}{{true, 5}, {false, 3}} {
		state.Update(func(tx *cluster.Tx) { tx.SetStale(step.stale) })
		if err := rec.Wait(within(t), func([]sinktest.Sync) bool { return len(rec.Views()) == step.views }); err != nil {
			t.Fatal(err)
		}
	}
}
