// SPDX-License-Identifier: Apache-2.0

package program

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/backends/ebpf"
	"github.com/spf13/pflag"
)

func TestFlagsOfEBPF(t *testing.T) {
	defaults := ebpf.Options{BPFFS: "/sys/fs/bpf", Annotation: "kpng.io/ebpf", MaxFrontends: 262144, MaxEndpoints: 1048576, MaxMembers: 262144, MaxClients: 65536}
	for name, test := range map[string]struct {
		args []string
		want ebpf.Options
	}{
		"defaults": {nil, defaults},
		"all flags": {
			[]string{
				"--instance=x", "--cgroup=/c", "--bpffs=/b", "--host-network-only", "--ebpf-annotation=example.com/a",
				"--max-frontends=1", "--max-endpoints=2", "--max-members=3", "--max-clients=4",
			},
			ebpf.Options{
				Instance: "x", Cgroup: "/c", BPFFS: "/b", HostNetworkOnly: true, Annotation: "example.com/a",
				MaxFrontends: 1, MaxEndpoints: 2, MaxMembers: 3, MaxClients: 4,
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := ebpfFlags{nftablesFlags: nftablesFlags{nodeFlags: nodeFlags{checks: newHealthChecks()}}}
			fs := pflag.NewFlagSet("ebpf", pflag.ContinueOnError)
			f.register(fs)
			if err := fs.Parse(test.args); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, f.options()); diff != "" {
				t.Errorf("options (-want +got):\n%s", diff)
			}
			if len(mustConfigure(t, EBPF(), test.args...).Companions(nil)) != 1 {
				t.Error("no health checks are served")
			}
		})
	}
}

func TestInvalidFlagsOfEBPF(t *testing.T) {
	for _, arg := range []string{"--masquerade-all", "--instance=a.b", "--max-clients=-1", "--masquerade-bit=32"} {
		b := EBPF()
		fs := pflag.NewFlagSet("ebpf", pflag.ContinueOnError)
		b.Register(fs)
		if err := fs.Parse([]string{arg}); err != nil {
			t.Fatal(err)
		}
		if err := b.Configure(); err == nil {
			t.Errorf("%s: no error", arg)
		}
	}
}

// The source must keep the annotation that excludes services.
func TestEBPFKeepsItsAnnotation(t *testing.T) {
	b := EBPF()
	fs := pflag.NewFlagSet("ebpf", pflag.ContinueOnError)
	keep := fs.StringSlice("keep-annotations", nil, "")
	b.Register(fs)
	if err := fs.Parse([]string{"--keep-annotations=a", "--ebpf-annotation=example.com/b"}); err != nil {
		t.Fatal(err)
	}
	if err := b.Configure(); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(*keep, " "); got != "a example.com/b" {
		t.Errorf("kept annotations %q", got)
	}
}
