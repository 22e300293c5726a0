// SPDX-License-Identifier: Apache-2.0

package app_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/watcher"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// runCommand runs a command for s and returns the command's error.
func runCommand(ctx context.Context, s sink.Sink, args ...string) error {
	cmd := app.Command(app.Options{Name: "test", Sink: s})
	cmd.SetArgs(args)
	cmd.SetOut(io.Discard)
	return cmd.ExecuteContext(ctx)
}

// Without subcommands, the help text of a command does not mention subcommands. It has
// one default for each flag.
func TestHelp(t *testing.T) {
	for name, want := range map[string]string{"": "(default: services without this label)", "mine": `(default "mine")`} {
		var help bytes.Buffer
		cmd := app.Command(app.Options{Name: "test", Sink: sink.FullState(ignore), Services: watcher.Options{ServiceProxyName: name}})
		cmd.SetArgs([]string{"--help"})
		cmd.SetOut(&help)
		if err := cmd.ExecuteContext(t.Context()); err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(help.String(), "Usage:\n  test [flags]\n") || strings.Contains(help.String(), "COMMAND") {
			t.Errorf("want the usage line of a single command:\n%.200s", &help)
		}
		_, flag, _ := strings.Cut(help.String(), "--service-proxy-name")
		flag, _, _ = strings.Cut(flag, "\n      --")
		if flag = strings.Join(strings.Fields(flag), " "); !strings.HasSuffix(flag, "headless ones "+want) {
			t.Errorf("proxy name %q: the help text of the flag is %q, want the default %s", name, flag, want)
		}
	}
}

func ignore(context.Context, []*api.View) error { return nil }

const demo = "../examples/demo.yaml"

func TestOncePrintsAndEnds(t *testing.T) {
	for _, test := range []struct {
		name string
		args []string
		want string
	}{
		{"the services of a proxy name", []string{"--service-proxy-name=kpng-example"}, "kpng-example"},
		{"without a proxy name", nil, "web"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var names []string
			s := sink.FullState(func(_ context.Context, services []*api.View) error {
				for _, s := range services {
					names = append(names, s.Service.Name)
				}
				return nil
			})
			if err := runCommand(t.Context(), s, append(test.args, "--manifests", demo, "--node-name=vm-002", "--once")...); err != nil {
				t.Fatal(err)
			}
			if got := strings.Join(names, " "); got != test.want {
				t.Errorf("services %q, want %q", got, test.want)
			}
		})
	}
}

func TestAllPortsFlags(t *testing.T) {
	for _, test := range []struct {
		name string
		args []string
		want bool
	}{
		{"disabled by default", nil, false},
		{"enabled by the flag", []string{"--all-ports"}, true},
		{"disabled for services without the annotation", []string{"--all-ports-annotation=all-ports"}, false},
		{"enabled by the flag, whatever the annotations", []string{"--all-ports", "--all-ports-annotation=all-ports"}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := []bool{}
			s := sink.FullState(func(_ context.Context, services []*api.View) error {
				for _, s := range services {
					got = append(got, s.Service.AllPorts)
				}
				return nil
			})
			if err := runCommand(t.Context(), s, append(test.args, "--manifests", demo, "--node-name=vm-002", "--once")...); err != nil {
				t.Fatal(err)
			}
			if len(got) != 1 || got[0] != test.want {
				t.Errorf("AllPorts of the services is %t, want one service with %t", got, test.want)
			}
		})
	}
}

// TestOwnPredicates checks that a program for one class of load balancers serves only the
// services of this class, and treats them as all-ports services.
func TestOwnPredicates(t *testing.T) {
	var served []string
	s := sink.FullState(func(_ context.Context, services []*api.View) error {
		for _, v := range services {
			served = append(served, fmt.Sprint(v.Service.Name, " ", v.Service.AllPorts))
		}
		return nil
	})
	opts := app.Options{Name: "test", Sink: s, Services: watcher.Options{
		Skip:            func(s *corev1.Service) bool { return s.Name != "kpng-example" },
		AllPorts:        func(s *corev1.Service) bool { return s.Name == "kpng-example" },
		KeepAnnotations: []string{"example.com/*"},
	}}
	for flags, want := range map[string]string{
		"--service-proxy-name=kpng-example":                              "kpng-example true",
		"--service-proxy-name=kpng-example --all-ports-annotation=other": "kpng-example true",
		"": "", // the flags select the other service, which Skip omits
	} {
		served = nil
		cmd := app.Command(opts)
		cmd.SetArgs(append(strings.Fields(flags), "--manifests", demo, "--node-name=vm-002", "--once"))
		if err := cmd.ExecuteContext(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(served, ", "); got != want {
			t.Errorf("flags %q: served %q, want %q", flags, got, want)
		}
	}
	fs := app.Command(opts).Flags()
	if fs.Lookup("api") != nil {
		t.Error("the command can read from a kpng server, which knows nothing of Skip")
	}
	if got := fs.Lookup("keep-annotations").DefValue; got != "[example.com/*]" {
		t.Errorf("the default of --keep-annotations is %s", got)
	}
}

type cleaner struct{ syncs, cleanups int }

func (c *cleaner) Sync(context.Context, *sink.Changes) error { c.syncs++; return nil }
func (c *cleaner) Cleanup(context.Context) error             { c.cleanups++; return nil }

func TestCleanupFlagCleansUpInsteadOfRunning(t *testing.T) {
	var c cleaner
	if err := runCommand(t.Context(), &c, "--manifests=/does/not/exist", "--cleanup"); err != nil {
		t.Fatal(err)
	}
	if c.syncs != 0 || c.cleanups != 1 {
		t.Errorf("%d syncs and %d cleanups, want one cleanup", c.syncs, c.cleanups)
	}
	if err := runCommand(t.Context(), sink.FullState(ignore), "--cleanup"); err == nil {
		t.Error("a sink that cannot clean up has the flag")
	}
}

func TestFatalErrorsNameTheirCause(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	t.Setenv("HOME", t.TempDir())
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	broken := filepath.Join(t.TempDir(), "broken.yaml")
	if err := os.WriteFile(broken, []byte("kind: Service\napiVersion: v1\nmetadata: {\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name string
		args []string
		want []string
	}{
		{"a kubeconfig that does not exist", []string{"--kubeconfig=/does/not/exist"}, []string{"/does/not/exist", "no such file"}},
		{"no source", nil, []string{"no API server known"}},
		{"manifests that do not exist", []string{"--manifests=/does/not/exist.yaml"}, []string{"/does/not/exist.yaml", "no such file"}},
		{"a manifest with a syntax error", []string{"--manifests", broken}, []string{broken + ":"}},
		{"two sources", []string{"--manifests", demo, "--kubeconfig=x"}, []string{"manifests", "kubeconfig"}},
		{"an address in use", []string{"--manifests", demo, "--healthz-bind-address", taken.Addr().String()}, []string{taken.Addr().String(), "in use"}},
		{"an invalid address", []string{"--manifests", demo, "--metrics-bind-address", "10256"}, []string{`"10256"`}},
		{"an invalid pattern", []string{"--manifests", demo, "--keep-labels", "[a"}, []string{"[a"}},
		{"an empty source", []string{"--manifests", ""}, []string{"--manifests", "empty"}},
		{"a negative interval", []string{"--manifests", demo, "--min-sync-interval", "-5s"}, []string{"--min-sync-interval"}},
		{"profiles without an address", []string{"--manifests", demo, "--profiling"}, []string{"--profiling", "--metrics-bind-address"}},
		{"a status page without an address", []string{"--manifests", demo, "--expose-status"}, []string{"--expose-status", "--healthz-bind-address"}},
		{"an argument", []string{"surprise"}, []string{"surprise"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := runCommand(t.Context(), sink.FullState(ignore), test.args...)
			if err == nil {
				t.Fatal("no error")
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not name %q", err, want)
				}
			}
		})
	}
}

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func get(t *testing.T, url string) (int, []byte) {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer.StatusCode, body
}

func TestHealthAndMetricsBindAddresses(t *testing.T) {
	health, metrics := freeAddress(t), freeAddress(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	entered, release := make(chan struct{}), make(chan struct{})
	s := sink.FullState(func(context.Context, []*api.View) error {
		select {
		case <-entered:
		default:
			close(entered)
		}
		<-release
		return nil
	})
	ended := make(chan error)
	go func() {
		ended <- runCommand(ctx, s, "--manifests", demo, "--node-name=vm-002", "--healthz-bind-address", health, "--metrics-bind-address", metrics, "--kubeproxy-metrics", "--profiling")
	}()
	<-entered
	for path, want := range map[string]int{"/livez": 200, "/healthz": 200, "/readyz": 503, "/metrics": 404, "/debug/pprof/": 404} {
		if got, body := get(t, "http://"+health+path); got != want {
			t.Errorf("before the end of the first sync, %s returns status %d, want %d: %s", path, got, want, body)
		}
	}
	close(release)
	status := 0
	for status != 200 && t.Context().Err() == nil {
		status, _ = get(t, "http://"+health+"/readyz")
	}
	_, body := get(t, "http://"+health+"/readyz")
	var report map[string]any
	if err := json.Unmarshal(body, &report); err != nil || report["synced"] != true || report["nodeEligible"] != true {
		t.Errorf("report %s, error %v", body, err)
	}
	// The metrics may change a little later than the status, so the test waits for them.
	counted := []byte(`kpng_sink_sync_duration_seconds_count{sink="test",type="full"} 1`)
	for deadline := time.Now().Add(time.Minute); ; {
		status, body = get(t, "http://"+metrics+"/metrics")
		if status != 200 || bytes.Contains(body, counted) || time.Now().After(deadline) {
			break
		}
	}
	if status != 200 || !bytes.Contains(body, counted) {
		t.Errorf("metrics: status %d\n%s", status, body)
	} else if !bytes.Contains(body, []byte("kubeproxy_sync_full_proxy_rules_duration_seconds_count 1")) {
		t.Errorf("with --kubeproxy-metrics, no metric has a name of kube-proxy:\n%s", body)
	}
	if status, body := get(t, "http://"+metrics+"/proxyMode"); status != 200 || string(body) != "test" {
		t.Errorf("/proxyMode: status %d, %q; want the name of the command", status, body)
	}
	for path, want := range map[string]string{"": "goroutine", "goroutine?debug=1": "TestHealthAndMetricsBindAddresses", "profile?seconds=1": "\x1f\x8b"} {
		if status, body := get(t, "http://"+metrics+"/debug/pprof/"+path); status != 200 || !bytes.Contains(body, []byte(want)) {
			t.Errorf("/debug/pprof/%s: status %d, %q; want it to contain %q", path, status, body, want)
		}
	}
	cancel()
	if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("command returned %v", err)
	}
}

// If a machine opens many connections and sends half a request on each, it loses its own
// connections. Another client gets an answer. Errors of the HTTP server go to the log.
func TestHTTPConnectionsAreLimited(t *testing.T) {
	address := freeAddress(t)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- runCommand(ctx, sink.FullState(ignore), "--manifests", demo, "--node-name=vm-002", "--healthz-bind-address", address)
	}()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	var held []net.Conn
	for len(held) < 600 {
		conn, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}).Dial("tcp", address)
		if err != nil && len(held) == 0 {
			continue // the program does not listen yet
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		io.WriteString(conn, "GET /livez HTTP/1.1\r\nX: ")
		held = append(held, conn)
	}
	held[0].SetReadDeadline(time.Now().Add(3 * time.Second)) // less than the timeout for the header
	if _, err := held[0].Read(make([]byte, 1)); err == nil || os.IsTimeout(err) {
		t.Errorf("the first of %d connections is still open: %v", len(held), err)
	}
	resp, err := http.Get("http://" + address + "/livez")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
}
