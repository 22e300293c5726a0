// SPDX-License-Identifier: Apache-2.0

package program

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/kpng-project/kpng/internal/backendoptions"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"
)

// testFlags checks that the command-line arguments args result in the options want. The
// function register adds the flags, and the function complete returns the options.
func testFlags[Options any](t *testing.T, name string, args []string, b sink.Sink, register func(*pflag.FlagSet), complete func() (Options, error), want Options) {
	t.Run(name, func(t *testing.T) {
		fs := pflag.NewFlagSet(name, pflag.ContinueOnError)
		register(fs)
		if err := fs.Parse(args); err != nil {
			t.Fatal(err)
		}
		got, err := complete()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Prefix{})); diff != "" {
			t.Errorf("options (-want +got):\n%s", diff)
		}
		if len(mustConfigure(t, b, args...).Parts().Beside) != 1 {
			t.Error("no health checks are served")
		}
	})
}

// testInvalidFlags checks that a backend refuses each command-line argument in args. The
// error must contain the argument's value.
func testInvalidFlags(t *testing.T, create func() sink.Sink, args ...string) {
	t.Helper()
	for _, arg := range args {
		_, err := configured(t, create(), arg)
		if err == nil {
			t.Errorf("%s: no error", arg)
		} else if _, value, _ := strings.Cut(arg, "="); !strings.Contains(err.Error(), value) && arg != "--masquerade-bit=14" {
			t.Errorf("%s: error %v does not name the problem", arg, err)
		}
	}
}

func TestSourceKeepsAnnotationsOfBackends(t *testing.T) {
	for flag, s := range map[string]sink.Sink{"scheduler-annotation": IPVS(), "ebpf-annotation": EBPF()} {
		b, _ := sink.As[*command.Backend](s)
		fs := pflag.NewFlagSet(b.Name, pflag.ContinueOnError)
		keep := fs.StringSlice("keep-annotations", nil, "")
		b.Register(fs)
		if err := fs.Parse([]string{"--keep-annotations=other", "--" + flag + "=example.com/a"}); err != nil {
			t.Fatal(err)
		}
		if err := b.Configure(); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]string{"other", "example.com/a"}, *keep); diff != "" {
			t.Errorf("annotations that %s keeps (-want +got):\n%s", b.Name, diff)
		}
	}
}

func TestRepeatedDriftIsAProblem(t *testing.T) {
	parts := mustConfigure(t, NFTables(), "--sysctls=ignore").Parts()
	for _, o := range backendoptions.Backends(parts.Sink) {
		for range 3 {
			o.Observer.Drifted(true)
			o.Observer.Drifted(false)
		}
	}
	var all []string
	for _, problems := range parts.Problems {
		all = append(all, problems()...)
	}
	if len(all) != 1 || !strings.Contains(all[0], "changed the nftables rules 3 times in the last hour") {
		t.Errorf("problems %q", all)
	}
}

func TestStartWarnsIfPodsAreUnknown(t *testing.T) {
	for _, test := range []struct {
		sink  func() sink.Sink
		args  string
		warns int
	}{
		{NFTables, "", 1}, {IPTables, "", 1}, {NFTables, "--cluster-cidr=10.0.0.0/8", 0}, {NFTables, "--node-pod-cidrs", 0}, {IPTables, "--pod-interfaces=cni0", 0},
	} {
		backend := mustConfigure(t, test.sink(), append(strings.Fields(test.args), "--sysctls=ignore")...)
		dataplane := backend.Parts().Sink
		warnings := 0
		log := funcr.New(func(_, line string) { warnings += strings.Count(line, "traffic is from pods is unknown") }, funcr.Options{})
		err := netnstest.New(t).Do(func() error {
			ctx := klog.NewContext(t.Context(), log)
			starter, _ := sink.As[sink.Starter](dataplane)
			if err := starter.Start(ctx); err != nil {
				return err
			}
			stopper, _ := sink.As[sink.Stopper](dataplane)
			return stopper.Stop(ctx)
		})
		if err != nil || warnings != test.warns {
			t.Errorf("%s %s: error %v, %d warnings, want %d", backend.Name, test.args, err, warnings, test.warns)
		}
	}
}
