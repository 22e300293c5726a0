// SPDX-License-Identifier: Apache-2.0

package kpng_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/watcher"
	"go.uber.org/goleak"
	"k8s.io/client-go/rest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func demo() kpng.Options {
	return kpng.Options{
		Manifests: "examples/demo.yaml",
		NodeName:  "vm-002",
		Services:  watcher.Options{ServiceProxyName: "kpng-example"},
	}
}

// names returns a sink that sends the names of all services at each sync.
func names(to chan<- string) sink.Sink {
	return sink.FullState(func(ctx context.Context, services []*api.ServiceEndpoints) error {
		var list []string
		for _, s := range services {
			list = append(list, s.Service.Name)
		}
		select {
		case to <- strings.Join(list, " "):
		case <-ctx.Done():
		}
		return nil
	})
}

func TestRunDrivesEverySink(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	a, b, ended := make(chan string), make(chan string), make(chan error)
	go func() { ended <- kpng.Run(ctx, demo(), names(a), names(b)) }()
	for _, c := range []chan string{a, b} {
		if got := <-c; got != "kpng-example" {
			t.Errorf("services %q", got)
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("ended with %v", err)
	}
}

func TestRunFollowsWhatChanges(t *testing.T) {
	manifest := filepath.Join(t.TempDir(), "services.yaml")
	write := func(name string) {
		t.Helper()
		text := "apiVersion: v1\nkind: Service\nmetadata: {name: " + name + "}\nspec: {clusterIP: 10.0.0.1, ports: [{port: 80}]}\n"
		if err := os.WriteFile(manifest+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(manifest+".new", manifest); err != nil {
			t.Fatal(err)
		}
	}
	write("a")
	ctx, cancel := context.WithCancel(t.Context())
	told, ended := make(chan string), make(chan error)
	p, err := kpng.New(kpng.Options{Manifests: manifest, NodeName: "n"})
	if err != nil {
		t.Fatal(err)
	}
	go func() { ended <- p.Run(ctx, names(told)) }()
	if got := <-told; got != "a" {
		t.Errorf("services %q, want a", got)
	}
	if err := p.WaitApplied(ctx); err != nil {
		t.Error(err)
	}
	write("b")
	if got := <-told; got != "b" {
		t.Errorf("services %q, want b", got)
	}
	if s := p.Status(); len(s) != 1 || s[0].Passes != 1 {
		t.Errorf("status %+v, want one sink with one full sync", s)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("ended with %v", err)
	}
	if err := p.Run(ctx, names(told)); err == nil {
		t.Error("a proxy ran twice")
	}
}

type unstartable struct{ sink.Func }

func (unstartable) Start(context.Context) error { return errors.New("no such device") }

func TestRunEndsWithWhatKeepsItFromGoingOn(t *testing.T) {
	never := sink.Func(func(context.Context, *sink.Changes) error {
		t.Error("sink was called")
		return nil
	})
	nodeless := demo()
	nodeless.Manifests = "does/not/exist.yaml"
	two := demo()
	two.Config = &rest.Config{}
	for _, test := range []struct {
		name  string
		opts  kpng.Options
		sinks []sink.Sink
		want  string
	}{
		{"no sink", demo(), nil, "no sink"},
		{"a sink that does not start", demo(), []sink.Sink{unstartable{never}}, "no such device"},
		{"manifests that are not there", nodeless, []sink.Sink{never}, "does/not/exist.yaml"},
		{"two sources", two, []sink.Sink{never}, "more than one"},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := kpng.Run(t.Context(), test.opts, test.sinks...)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want one with %q", err, test.want)
			}
		})
	}
}

func TestOnceThatIsCutShortIsAnError(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	opts := demo()
	opts.Sink.Once = true
	err := kpng.Run(ctx, opts, sink.Func(func(context.Context, *sink.Changes) error {
		cancel()
		return errors.New("not yet")
	}))
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want that of the context", err)
	}
}

func TestDefaultNodeName(t *testing.T) {
	t.Setenv("NODE_NAME", "from-environment")
	if name, err := kpng.DefaultNodeName(); name != "from-environment" || err != nil {
		t.Errorf("%q, %v", name, err)
	}
	t.Setenv("NODE_NAME", "")
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	if name, err := kpng.DefaultNodeName(); name != strings.ToLower(host) || err != nil {
		t.Errorf("%q, %v; want the host's name %q", name, err, host)
	}
}

func TestWaitAppliedEndsWithRun(t *testing.T) {
	opts := demo()
	opts.Manifests = "does/not/exist.yaml"
	p, err := kpng.New(opts)
	if err != nil {
		t.Fatal(err)
	}
	waited := make(chan error)
	go func() { waited <- p.WaitApplied(t.Context()) }()
	if err := p.Run(t.Context(), sink.FullState(func(context.Context, []*api.ServiceEndpoints) error { return nil })); err == nil {
		t.Error("Run says nothing of manifests that are not there")
	}
	if err := <-waited; err == nil {
		t.Error("applied, though nothing could be read")
	}
}
