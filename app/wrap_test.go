// SPDX-License-Identifier: Apache-2.0

package app_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
)

var errCleaned = errors.New("cleaned up")

// feature has a flag, a metric, a clean-up and other things that package app looks for. It
// records which of its methods were called.
type feature struct{ calls []string }

func (f *feature) note(call string) {
	if !slices.Contains(f.calls, call) {
		f.calls = append(f.calls, call)
	}
}

func (f *feature) Register(fs *pflag.FlagSet)       { fs.String("table", "", "the table") }
func (f *feature) Configure() error                 { f.note("Configure"); return nil }
func (f *feature) Describe(chan<- *prometheus.Desc) { f.note("Describe") }
func (f *feature) Collect(chan<- prometheus.Metric) {}
func (f *feature) Cleanup(context.Context) error    { f.note("Cleanup"); return errCleaned }

func (f *feature) SyncState(context.Context, *api.Node, []*api.View) error { return nil }

// handler makes a feature a sink.Handler.
type handler struct {
	sink.Handler
	*feature
}

// own is a wrapper like those that programs write.
type own struct{ sink.Sink }

func (o own) Unwrap() sink.Sink { return o.Sink }

func TestFeaturesSurviveWrapping(t *testing.T) {
	for name, wrap := range map[string]func(*feature) sink.Sink{
		"FullStateOf":                 func(f *feature) sink.Sink { return sink.FullStateOf(f) },
		"Events":                      func(f *feature) sink.Sink { return sink.Events(&handler{nil, f}) },
		"two wrappers of FullStateOf": func(f *feature) sink.Sink { return own{own{sink.FullStateOf(f)}} },
	} {
		t.Run(name, func(t *testing.T) {
			f := &feature{}
			fs := app.Command(app.Options{Name: "test", Sink: wrap(f)}).Flags()
			if fs.Lookup("table") == nil || fs.Lookup("cleanup") == nil {
				t.Errorf("the command has the flags\n%s", fs.FlagUsages())
			}
			if err := runCommand(t.Context(), wrap(f), "--cleanup"); err != errCleaned || !slices.Equal(f.calls, []string{"Configure", "Cleanup"}) {
				t.Errorf("--cleanup: error %v, calls %q", err, f.calls)
			}
			f.calls = nil
			// The directory has no services, so no method of the handler is called.
			err := runCommand(t.Context(), wrap(f), "--manifests", t.TempDir(), "--node-name=vm-002", "--once", "--wait")
			if want := "Configure Describe"; err != nil || strings.Join(f.calls, " ") != want {
				t.Errorf("run: error %v, calls %q, want %q", err, f.calls, want)
			}
		})
	}
}
