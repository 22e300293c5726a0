// SPDX-License-Identifier: Apache-2.0

package app_test

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"net/http"
	"path/filepath"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/report"
	"github.com/kpng-project/kpng/sink"
)

// runForPage runs a command with a health address until the test ends. It returns the URL
// of the status page when the sink has received the services.
func runForPage(t *testing.T, args ...string) (url string) {
	t.Helper()
	address := freeAddress(t)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	s := sink.FullState(ignore)
	go func() {
		ended <- runCommand(ctx, s, append(args, "--node-name=vm-002", "--healthz-bind-address", address)...)
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if answer, err := client.Get("http://" + address + "/readyz"); err == nil {
			answer.Body.Close()
			if answer.StatusCode == http.StatusOK {
				break
			}
		}
		if time.Now().After(deadline) {
			t.Fatal("the program is not ready within a minute")
		}
	}
	return "http://" + address + "/status"
}

// A client of a kpng server tells load balancers to use its node only when the server has
// delivered the services and the Node object.
func TestHealthOfClient(t *testing.T) {
	for _, test := range []struct {
		name, node string
		server     func(*testing.T) string
		healthz    int
	}{
		{"no server", "vm-002", func(t *testing.T) string { return "unix://" + filepath.Join(t.TempDir(), "s") }, 503},
		{"the server does not know the node", "unknown", func(t *testing.T) string { return serveDemo(t, "") }, 503},
		{"the server knows the node", "vm-002", func(t *testing.T) string { return serveDemo(t, "") }, 200},
	} {
		t.Run(test.name, func(t *testing.T) {
			address, server := freeAddress(t), test.server(t)
			ctx, cancel := context.WithCancel(context.Background())
			ended, synced := make(chan error, 1), make(chan struct{}, 1)
			s := sink.FullState(func(context.Context, []*api.View) error { synced <- struct{}{}; return nil })
			go func() {
				ended <- runCommand(ctx, s, "--api", server, "--node-name", test.node, "--healthz-bind-address", address)
			}()
			if test.name != "no server" {
				<-synced
			}
			for listening := false; !listening; { // the program listens before it reads from the server
				c, err := net.Dial("tcp", address)
				if listening = err == nil; listening {
					c.Close()
				}
			}
			for path, want := range map[string]int{"/livez": 200, "/healthz": test.healthz} {
				if code, body := get(t, "http://"+address+path); code != want {
					t.Errorf("%s: status %d, want %d: %s", path, code, want, body)
				}
			}
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
	}
}

func TestStatusPageOfProxy(t *testing.T) {
	url := runForPage(t, "--manifests", demo)
	var r report.Report
	_, body := get(t, url+"?output=json")
	if err := json.Unmarshal(body, &r); err != nil {
		t.Fatalf("%v in %s", err, body)
	}
	if r.Node != "vm-002" || r.Source.Name != "manifests "+demo || r.Source.Services != 1 || len(r.Sinks) != 1 || r.Sinks[0].Passes != 1 || len(r.Changes) == 0 || r.Changes[0].Time.IsZero() || len(r.Problems) > 0 {
		t.Errorf("report %s", body)
	}
	if code, body := get(t, url+"?service=default/web"); code != 200 || !bytes.Contains(body, []byte("topology: no hints")) {
		t.Errorf("status %d: %s", code, body)
	}
}

func TestStatusPageOfClient(t *testing.T) {
	server := serveDemo(t, "")
	url := runForPage(t, "--api", server)
	var r report.Report
	_, body := get(t, url+"?output=json")
	if err := json.Unmarshal(body, &r); err != nil {
		t.Fatalf("%v in %s", err, body)
	}
	if !r.Source.Synced || r.Source.Name != "kpng server "+server || len(r.Services) != 1 || r.Services[0].Endpoints != 2 || r.Services[0].Type != api.ClusterIP || len(r.Problems) > 0 {
		t.Errorf("report %s", body)
	}
	if code, body := get(t, url+"?service=default/web"); code != 200 || !bytes.Contains(body, []byte("from anywhere   forward to 11.0.2.3:8080, 11.0.3.3:8080")) {
		t.Errorf("status %d: %s", code, body)
	}
}
