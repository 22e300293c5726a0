// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/statuspage"
	"github.com/kpng-project/kpng/remote"
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

func TestServerMetrics(t *testing.T) {
	state := cluster.New(cluster.Options{})
	state.Update(func(tx *cluster.Tx) {
		tx.SetService(&api.Service{Namespace: "ns", Name: "web", Type: api.ClusterIP})
	})
	state.SetSynced()
	server, err := remote.NewServer(state, remote.ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	page := &statuspage.Handler{State: state, Clients: server.Streams}
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(newServerCollector(server, page.Behind))
	if problems, err := testutil.GatherAndLint(registry); err != nil || len(problems) > 0 {
		t.Errorf("problems %v, error %v", problems, err)
	}

	address := "unix://" + filepath.Join(t.TempDir(), "s")
	l, err := remote.Listen(address, 0)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 2)
	go func() { ended <- server.Serve(ctx, l) }()
	client, err := remote.NewClient(remote.ClientOptions{DialOptions: remote.DialOptions{Addresses: []string{address}}, NodeName: "n"})
	if err != nil {
		t.Fatal(err)
	}
	go func() { ended <- ignoreEnd(ctx, client.Run(ctx)) }()
	source := client.Source()
	defer source.Close()
	synced := make(chan struct{})
	err = sink.Run(ctx, source, sink.Func(func(context.Context, *sink.Changes) error { close(synced); return nil }), sink.Options{Once: true})
	if err != nil {
		t.Fatal(err)
	}
	<-synced
	eventually(t, "the client has all changes", func() bool { streams, _ := page.Behind(); return streams == 0 })

	got := map[string]float64{}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		got[f.GetName()] = f.GetMetric()[0].GetGauge().GetValue() + f.GetMetric()[0].GetCounter().GetValue()
	}
	sent := got["kpng_server_sent_bytes_total"]
	if sent < 20 || sent > 10_000 {
		t.Errorf("%v bytes were sent, want more than 0 for one service", sent)
	}
	delete(got, "kpng_server_sent_bytes_total")
	for name, want := range map[string]float64{
		"kpng_server_streams": 1, "kpng_server_streams_behind": 0, "kpng_server_behind_seconds": 0, "kpng_server_views_total": 1, "kpng_server_values_total": 1, "kpng_server_refused_total": 0, "kpng_server_stalled_total": 0,
	} {
		if value, ok := got[name]; !ok || value != want {
			t.Errorf("%s is %v, want %v", name, value, want)
		}
	}
	cancel()
	for range 2 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// ignoreEnd returns err, or nil if ctx has ended.
func ignoreEnd(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}
