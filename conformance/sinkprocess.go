// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/feed"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/watcher"
	"k8s.io/klog/v2"
)

// carryOut does the task of this process. It either cleans up, or runs the proxy until
// the kit disconnects or kills the process.
func (o order) carryOut(newSink NewSink, opts sink.Options) error {
	ctx := klog.NewContext(context.Background(), klog.Background())
	s, err := newSink(o.Site)
	if err != nil {
		return fmt.Errorf("create sink: %w", err)
	}
	if o.Cleanup {
		cleaner, ok := sink.As[sink.Cleaner](s)
		if !ok {
			return nil
		}
		if err := cleaner.Cleanup(ctx); err != nil {
			return fmt.Errorf("clean up: %w", err)
		}
		return nil
	}
	file := os.NewFile(3, "kit")
	conn, err := net.FileConn(file)
	if err != nil {
		return fmt.Errorf("connect to the kit: %w", err)
	}
	file.Close()
	return proxy(ctx, o.Site, s, opts, conn)
}

// proxy receives objects from conn and delivers them to a sink, until conn is closed.
func proxy(ctx context.Context, site Site, s sink.Sink, opts sink.Options, conn net.Conn) error {
	converter, err := watcher.New(watcher.Options{
		ServiceProxyName: site.ServiceProxyName,
		AllPorts:         watcher.AllPortsAnnotated(AllPortsAnnotation),
	})
	if err != nil {
		return err
	}
	state := cluster.New(cluster.Options{})
	source := feed.New(state, site.NodeName)
	defer source.Close()
	driver := sink.NewDriver(source, s, opts)
	var honours nodeview.Parameters
	if c, ok := sink.As[backends.Capable](s); ok {
		honours = c.Honours()
	}
	_, counts := sink.As[backends.Counter](s)
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		err := driver.Run(ctx)
		conn.Close() // ends a blocked read from conn
		ended <- err
	}()
	stopReporting := func() {}
	for decoder := json.NewDecoder(conn); ; {
		var p publication
		if err := decoder.Decode(&p); err != nil {
			stopReporting()
			cancel()
			if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
				return fmt.Errorf("drive sink: %w", err)
			}
			if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
				return nil
			}
			return fmt.Errorf("read objects from the kit: %w", err)
		}
		if p.Count {
			_ = json.NewEncoder(conn).Encode(report{Counted: count(ctx, s)}) // if Encode fails, Decode fails
			continue
		}
		stopReporting()
		revision := writeObjects(state, converter, p.Objects)
		var reporting context.Context
		reporting, stopReporting = context.WithCancel(ctx)
		go reportOn(reporting, driver, conn, report{Generation: p.Generation, Honours: honours, Counts: counts}, revision)
	}
}

// count returns the numbers of a sink, if the sink counts.
func count(ctx context.Context, s sink.Sink) *counted {
	all := &counted{}
	counter, ok := sink.As[backends.Counter](s)
	if !ok {
		return &counted{Error: "the sink does not count"}
	}
	if err := counter.Stats(ctx, func(s backends.Stats) bool { all.Stats = append(all.Stats, s); return true }); err != nil {
		all.Error = "read counters: " + err.Error()
	}
	return all
}

// writeObjects puts the objects into the state in one commit. It returns the revision of
// that commit.
func writeObjects(state *cluster.State, converter *watcher.Converter, objects *Objects) uint64 {
	var services []*api.Service
	for _, o := range objects.Services {
		if converter.WantsService(o) {
			service, _ := converter.Service(o)
			services = append(services, service)
		}
	}
	var endpoints []*api.EndpointSlice
	for _, o := range objects.Slices {
		if slice, _ := converter.EndpointSlice(o); slice != nil && converter.WantsSlice(o) {
			endpoints = append(endpoints, slice)
		}
	}
	var nodes []*api.Node
	for _, o := range objects.Nodes {
		node, _ := converter.Node(o)
		nodes = append(nodes, node)
	}
	state.Update(func(tx *cluster.Tx) {
		tx.ReplaceNodes(slices.Values(nodes))
		tx.ReplaceServices(slices.Values(services))
		tx.ReplaceSlices(slices.Values(endpoints))
	})
	state.SetSynced()
	return uint64(state.Snapshot().Revision)
}

// reportOn regularly sends the report r to the kit until the objects of its generation are
// programmed. It adds the current errors.
func reportOn(ctx context.Context, driver *sink.Driver, conn net.Conn, r report, revision uint64) {
	for ctx.Err() == nil {
		wait, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
		r.Applied = driver.WaitApplied(wait, revision) == nil
		cancel()
		if !r.Applied {
			r.Trouble = trouble(driver.Status())
		}
		if json.NewEncoder(conn).Encode(r) != nil || r.Applied {
			return
		}
	}
}

func trouble(status sink.Status) string {
	var text string
	if status.Err != nil {
		text = status.Err.Error()
	}
	for _, f := range status.Failing {
		text += fmt.Sprintf("; %s: %v", f.Key, f.Err)
	}
	return text
}
