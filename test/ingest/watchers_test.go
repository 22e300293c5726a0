// SPDX-License-Identifier: Apache-2.0

package ingest

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kpng-project/kpng/test/internal/apiserver"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
)

// BenchmarkWatchers measures what watches of EndpointSlices cost the API server: memory of
// an idle watch, and CPU time of one event for one watch. Each watch has a connection of
// its own, as on a node, and reads without decoding.
func BenchmarkWatchers(b *testing.B) {
	const changes = 100
	server := apiserver.Start(b, apiserver.Options{})
	*services = 100
	fill(b, server)
	process := findProcess(b, "kube-apiserver")
	slices := server.Client().DiscoveryV1().EndpointSlices("default")
	slice, err := slices.Get(b.Context(), "service-00000-x7k2p", metav1.GetOptions{})
	if err != nil {
		b.Fatal(err)
	}
	cost := map[int]time.Duration{}
	for b.Loop() {
		for _, watchers := range []int{0, 500} {
			ctx, cancel := context.WithCancel(b.Context())
			var received atomic.Int64
			time.Sleep(5 * time.Second)
			before := process.memory(b)
			for range watchers {
				watchSlices(b, ctx, server.Config(), slice.ResourceVersion, &received)
			}
			time.Sleep(5 * time.Second)
			idle := process.memory(b)
			received.Store(0)
			cpu := process.cpu(b)
			for i := range changes {
				slice.Endpoints[0].Conditions.Ready = ptr.To(i%2 == 1)
				if slice, err = slices.Update(b.Context(), slice, metav1.UpdateOptions{}); err != nil {
					b.Fatal(err)
				}
				time.Sleep(50 * time.Millisecond)
			}
			time.Sleep(2 * time.Second)
			cost[watchers] = process.cpu(b) - cpu
			if watchers > 0 {
				b.ReportMetric(float64(idle-before)/float64(watchers), "B/watch")
				b.ReportMetric(float64(received.Load())/float64(watchers*changes), "B/event")
				b.ReportMetric(float64((cost[watchers]-cost[0]).Microseconds())/float64(watchers*changes), "cpu-us/event")
			}
			cancel()
		}
	}
	b.ReportMetric(0, "ns/op")
}

// watchSlices starts a watch that counts the received bytes.
func watchSlices(b *testing.B, ctx context.Context, config *rest.Config, revision string, received *atomic.Int64) {
	b.Helper()
	tls, err := rest.TLSConfigFor(config)
	if err != nil {
		b.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: tls, ForceAttemptHTTP2: true, DisableCompression: true}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, config.Host+"/apis/discovery.k8s.io/v1/endpointslices?watch=1&allowWatchBookmarks=true&resourceVersion="+revision, nil)
	if err != nil {
		b.Fatal(err)
	}
	req.Header.Set("Accept", "application/vnd.kubernetes.protobuf;stream=watch")
	if config.BearerToken != "" {
		req.Header.Set("Authorization", "Bearer "+config.BearerToken)
	}
	resp, err := client.Do(req)
	if err != nil {
		b.Fatal(err)
	}
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(resp.Body)
		b.Fatalf("watch: %s: %s", resp.Status, text)
	}
	go func() {
		defer resp.Body.Close()
		buf := make([]byte, 64<<10)
		for {
			n, err := resp.Body.Read(buf)
			received.Add(int64(n))
			if err != nil {
				return
			}
		}
	}()
}

// process is the folder of a process in /proc.
type processDir string

// findProcess returns the child of this process that runs the named program.
func findProcess(b *testing.B, name string) processDir {
	b.Helper()
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		if fields := stat(dir); len(fields) > 3 && fields[1] == "("+name[:min(15, len(name))]+")" && fields[3] == strconv.Itoa(os.Getpid()) {
			return processDir(dir)
		}
	}
	b.Fatalf("no child process runs %s", name)
	return ""
}

// stat returns the fields of /proc/PID/stat.
func stat(dir string) []string {
	text, _ := os.ReadFile(dir + "/stat") // an empty result if the process has ended
	return strings.Fields(string(text))
}

// cpu returns the CPU time of the process, in steps of 10 ms.
func (p processDir) cpu(b *testing.B) time.Duration {
	b.Helper()
	ticks := 0
	for _, field := range stat(string(p))[13:15] {
		n, err := strconv.Atoi(field)
		if err != nil {
			b.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

// memory returns the resident memory of the process.
func (p processDir) memory(b *testing.B) int64 {
	b.Helper()
	text, err := os.ReadFile(string(p) + "/statm")
	if err != nil {
		b.Fatal(err)
	}
	var size, resident int64
	if _, err := fmt.Sscan(string(text), &size, &resident); err != nil {
		b.Fatal(err)
	}
	return resident * int64(os.Getpagesize())
}
