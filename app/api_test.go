// SPDX-License-Identifier: Apache-2.0

package app_test

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-logr/logr/funcr"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/remote"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/watcher"
	"github.com/kpng-project/kpng/watcher/file"
	"k8s.io/klog/v2"
)

// serveDemo starts a kpng server with the demo services whose service-proxy name is
// proxyName. It returns the server's address.
func serveDemo(t *testing.T, proxyName string) (address string) {
	t.Helper()
	state := cluster.New(cluster.Options{})
	server, err := remote.NewServer(state, remote.ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	address = "unix://" + filepath.Join(t.TempDir(), "s")
	l, err := remote.Listen(address, 0)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 2)
	go func() {
		ended <- file.Watch(ctx, state, file.Options{Path: demo, Options: watcher.Options{ServiceProxyName: proxyName}})
	}()
	go func() { ended <- server.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		for range 2 {
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
	})
	return address
}

// printOnce returns the output of kpng-json with the given flags and --once.
func printOnce(t *testing.T, args ...string) string {
	t.Helper()
	var out bytes.Buffer
	s := sink.FullState(func(_ context.Context, services []*api.View) error {
		for _, service := range services {
			if err := json.NewEncoder(&out).Encode(service); err != nil {
				return err
			}
		}
		return nil
	})
	if err := runCommand(t.Context(), s, append(args, "--once")...); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestServerPrintsTheSameAsManifests(t *testing.T) {
	for _, name := range []string{"", "kpng-example"} {
		want := printOnce(t, "--manifests", demo, "--service-proxy-name", name, "--node-name=vm-002")
		got := printOnce(t, "--api", serveDemo(t, name), "--node-name=vm-002")
		if got != want || got == "" {
			t.Errorf("proxy name %q: with --api\n%s\nwith --manifests\n%s", name, got, want)
		}
	}
}

func TestInconsistentAPIFlagsAreErrors(t *testing.T) {
	for _, test := range []struct {
		name string
		args []string
		want []string
	}{
		{"a flag that only the server may have", []string{"--api=unix:///s", "--service-proxy-name=x"}, []string{"api", "service-proxy-name"}},
		{"two sources", []string{"--api=unix:///s", "--manifests", demo}, []string{"api", "manifests"}},
		{"two other sources", []string{"--api=unix:///s", "--kubeconfig=x"}, []string{"api", "kubeconfig"}},
		{"TLS without an address", []string{"--manifests", demo, "--api-tls-ca-file=x"}, []string{"--api-…", "need --api"}},
		{"plaintext to another machine", []string{"--api=tcp://192.0.2.1:12090"}, []string{"192.0.2.1", "TLS"}},
		{"an empty address", []string{"--api="}, []string{"--api", "empty"}},
		{"no address", []string{"--api=192.0.2.1"}, []string{`"192.0.2.1"`}},
		{"a missing certificate", []string{"--api=tcp://192.0.2.1:1", "--api-tls-ca-file=a", "--api-tls-cert-file=b", "--api-tls-key-file=c"}, []string{"b", "c"}},
		{"an incomplete set of TLS files", []string{"--api=tcp://192.0.2.1:1", "--api-tls-ca-file=a"}, []string{"three files"}},
		{"a missing server with --once", []string{"--api=unix:///does/not/exist", "--once"}, []string{"/does/not/exist"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := runCommand(t.Context(), sink.FullState(ignore), append(test.args, "--node-name=n")...)
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

func TestClientReadsFromServerOfThisMachineByDefault(t *testing.T) {
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	const content = `{clusters: [{name: a, cluster: {server: "http://127.0.0.1:1"}}], contexts: [{name: a, context: {cluster: a}}], current-context: a}`
	if err := os.WriteFile(kubeconfig, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KUBECONFIG", kubeconfig)
	for args, want := range map[string]string{
		"--node-name=n":              "kpng server tcp://127.0.0.1:12090",
		"--once":                     "kpng server tcp://127.0.0.1:12090",
		"--api=unix:///s":            "kpng server unix:///s",
		"--kubeconfig=" + kubeconfig: "API server of " + kubeconfig,
		"--manifests=" + demo:        "manifests " + demo,
		"--service-proxy-name=":      "API server",
		"--service-proxy-name=x":     "API server",
		"--all-ports":                "API server",
	} {
		var first string
		log := funcr.NewJSON(func(line string) {
			var l struct{ Source string }
			if err := json.Unmarshal([]byte(line), &l); err != nil {
				t.Error(err)
			}
			if first == "" {
				first = l.Source
			}
		}, funcr.Options{})
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), log))
		cancel() // the command logs its source and ends
		cmd := app.Command(app.Options{Name: "test", Sink: sink.FullState(ignore), Server: remote.DefaultAddress})
		cmd.SetArgs([]string{args})
		if err := cmd.ExecuteContext(ctx); err != nil && want != "" && args != "--once" {
			t.Errorf("%s: %v", args, err)
		}
		if first != want {
			t.Errorf("%s: source %q, want %q", args, first, want)
		}
	}
}
