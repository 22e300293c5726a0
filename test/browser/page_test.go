// SPDX-License-Identifier: Apache-2.0

// Package browser tests the status page and the site of the documents in Debian's Chromium.
package browser

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"image/png"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/health"
	"github.com/kpng-project/kpng/internal/statuspage"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

var screenshot = flag.String("screenshot", "", "write the screenshot to this `file`, such as docs/status.png")

// services is the number of services of the page.
const services = 10_000

// Text in errors must not become markup. Otherwise the DOM would have an element with this
// ID. A screenshot for the documentation does not have this text.
const markup = `<b id="injected">`

func name(i int) types.NamespacedName {
	namespaces := [...]string{"default", "kube-system", "monitoring", "shop"}
	return types.NamespacedName{Namespace: namespaces[i%len(namespaces)], Name: fmt.Sprintf("service-%05d", i)}
}

func addr(first, i int) netip.Addr {
	return netip.AddrFrom4([4]byte{byte(first), byte(i >> 16), byte(i >> 8), byte(i)})
}

func write(tx *cluster.Tx, i, endpoints int) {
	key := name(i)
	tx.SetService(&api.Service{
		Namespace: key.Namespace, Name: key.Name, Type: api.ClusterIP,
		IPs:   api.ServiceIPs{ClusterIPs: api.NewIPSet(addr(10, i))},
		Ports: []api.PortMapping{{Name: "http", Protocol: api.TCP, Port: 80, TargetPort: 8080}},
	})
	slice := &api.EndpointSlice{
		Namespace: key.Namespace, Name: key.Name + "-x", ServiceName: key.Name, Family: api.IPv4,
		Ports: []api.EndpointPort{{Name: "http", Protocol: api.TCP, Port: 8080}},
	}
	for e := range endpoints {
		slice.Endpoints = append(slice.Endpoints, api.SliceEndpoint{
			Addr: addr(172, i*16+e), Details: &api.EndpointDetails{NodeName: fmt.Sprint("worker-", e+1)}, Conditions: api.Conditions{Ready: true, Serving: true},
		})
	}
	tx.SetSlice(slice)
}

// page serves the status page of a node with many services, of which two fail.
func page(t *testing.T) (url string) {
	t.Helper()
	state := cluster.New(cluster.Options{Resumable: true})
	state.Update(func(tx *cluster.Tx) {
		for i := range services {
			write(tx, i, 10)
		}
		tx.SetNode(&api.Node{Name: "worker-1"})
	})
	state.SetSynced()
	for i := range 6 {
		state.Update(func(tx *cluster.Tx) { write(tx, 1000*i+7, 9) })
	}
	now := time.Now()
	second := "adding endpoints4 7000:2a0 . tcp . 1 : 172.0.2.160 . 8080: the map is full"
	if *screenshot == "" {
		second += markup
	}
	failing := []sink.FailingService{
		{Key: name(17), Err: errors.New("adding endpoints4 7000:110 . tcp . 3 : 172.0.1.18 . 8080: the map is full"), Failures: 3, NextRetry: now.Add(2 * time.Minute)},
		{Key: name(42), Err: errors.New(second), Failures: 12, NextRetry: now.Add(9 * time.Minute)},
	}
	revision := uint64(state.Snapshot().Revision)
	server := httptest.NewServer(&statuspage.Handler{
		Program: "v0.1.0 go1.26 linux/amd64", Source: "API server", NodeName: "worker-1", State: state,
		Health: func() health.Report { return health.Report{Synced: true, NodeEligible: true} },
		Sinks: func() []sink.Status {
			return []sink.Status{
				{Name: "nftables", Revision: revision - 12, Passes: 1, Syncs: 214, LastPass: now.Add(-40 * time.Minute), LastSync: now, LastProgress: now, Pending: 2, Failing: failing},
				{Name: "nftables-healthchecks", Revision: revision, Passes: 1, Syncs: 3, LastPass: now.Add(-40 * time.Minute), LastSync: now, LastProgress: now},
			}
		},
	})
	t.Cleanup(server.Close)
	return server.URL
}

// headless returns the arguments of Chromium for a window of 1100 by 900 pixels.
func headless(t *testing.T) []string {
	return []string{
		"--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--no-first-run",
		"--hide-scrollbars", "--window-size=1100,900", "--user-data-dir=" + t.TempDir(),
	}
}

func TestPageInChromium(t *testing.T) {
	chromium, err := exec.LookPath("chromium")
	if err != nil {
		t.Skip("chromium is missing")
	}
	url := page(t)
	run := func(args ...string) []byte {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), chromium, append(headless(t), args...)...)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("chromium %q: %v\n%s", args, err, stderr.Bytes())
		}
		return out
	}
	// In the DOM that Chromium prints, each row has its end tag.
	check := func(query string, counts map[string]int, texts ...string) {
		t.Helper()
		dom := string(run("--dump-dom", url+"/status"+query))
		for part, want := range counts {
			if got := strings.Count(dom, part); got != want {
				t.Errorf("%s: %q occurs %d times in the DOM, want %d times", query, part, got, want)
			}
		}
		for _, text := range texts {
			if !strings.Contains(dom, text) {
				t.Errorf("%s: the DOM lacks %q", query, text)
			}
		}
	}
	const (
		inServices = 1000 + 1  // rows, with the head
		others     = 2 + 3 + 3 // rows of source, sinks and failing services
		changes    = 50 + 1    // rows of recent changes
	)
	check("", map[string]int{
		"</tr>": inServices + others + changes, `<b id="injected"`: 0, "<script": 0,
		`id="problems" class="bad"`: 1, `id="next"`: 1,
	}, "<title>kpng on node worker-1: problems: 1</title>", "sink nftables fails to program 2 services", "7000:110 . tcp . 3 : 172.0.1.18 . 8080: the map is full", `href="?service=monitoring%2Fservice-00042"`)
	check("?match=service-0001", map[string]int{"</tr>": 10 + 1 + others + changes, `id="next"`: 0}, `value="service-0001"`)
	check("?service=monitoring/service-00042", map[string]int{`<b id="injected"`: 0}, "<h1>monitoring/service-00042</h1>", "from anywhere   forward to 172.0.2.160:8080")

	file := filepath.Join(t.TempDir(), "page.png")
	run("--screenshot="+file, url+"/status")
	picture, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	decoded, err := png.Decode(bytes.NewReader(picture))
	if err != nil {
		t.Fatal(err)
	}
	colours := map[any]bool{}
	for y := range decoded.Bounds().Dy() {
		for x := range decoded.Bounds().Dx() {
			colours[decoded.At(x, y)] = true
		}
	}
	if size := decoded.Bounds().Size(); size.X != 1100 || size.Y != 900 || len(colours) < 20 {
		t.Errorf("the screenshot has %v pixels of %d colours", size, len(colours))
	}
	if *screenshot != "" {
		if err := os.WriteFile(*screenshot, picture, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
