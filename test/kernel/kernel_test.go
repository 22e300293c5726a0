// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// build builds a command and returns its path. The argument source is the path of the
// command's package.
func build(t *testing.T, source string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "command")
	cmd := exec.Command("go", "build", "-o", path, source)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", source, err, out)
	}
	return path
}

// TestGuest checks a program's environment, output and exit status with the kernels of
// two Debian releases.
func TestGuest(t *testing.T) {
	command := build(t, ".")
	for _, guest := range []struct {
		args   []string
		script string
		want   string
		status int
	}{{
		args:   []string{"-debian", "bullseye"},
		script: `uname -r | cut -d. -f1,2; pwd; echo "$GREETING, $1"; echo new >written; cat written; exit 1`,
		want:   "5.10\nDIR\ngood  day, two words\nnew\n",
		status: 1,
	}, {
		args:   []string{"-debian", "bookworm", "-without", "dummy,nft_fib"},
		script: `uname -r | cut -d. -f1,2; ip -br addr | tr -s ' '; modprobe dummy 2>/dev/null || modprobe veth && printf 'no end of line'`,
		want:   "6.1\nlo UNKNOWN 127.0.0.1/8 ::1/128 \nno end of line",
	}} {
		dir := t.TempDir()
		cmd := exec.Command(command, append(guest.args, "sh", "-c", guest.script, "sh", "two words")...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GREETING=good  day")
		var stderr strings.Builder
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if diff := cmp.Diff(strings.ReplaceAll(guest.want, "DIR", dir), string(out)); diff != "" {
			t.Errorf("%v: output (-want +got):\n%s", guest.args, diff)
		}
		if cmd.ProcessState.ExitCode() != guest.status {
			t.Errorf("%v: %v, want exit status %d\n%s", guest.args, err, guest.status, stderr.String())
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("%v: the program wrote %v outside the guest (%v)", guest.args, left, err)
		}
	}
}

// TestBackendsNameWhatIsMissing starts backends in guests that lack something, such as
// a required kernel module. A "|" separates the texts that the
// output must contain.
func TestBackendsNameWhatIsMissing(t *testing.T) {
	command, start := build(t, "."), build(t, "./testdata/start")
	for _, test := range []struct{ suite, backend, without, want string }{
		{"bullseye", "nftables", "nft_fib,nft_numgen", "start: the kernel lacks expression fib (module nft_fib_inet), expression numgen (module nft_numgen)\n"},
		{"bookworm", "nftables", "nf_tables", "start: the kernel lacks nf_tables (module nf_tables): "},
		{"bookworm", "ipvs", "ip_vs", "sync: the kernel lacks IPVS: load the module ip_vs\n"},
		{"bookworm", "ipvs", "dummy", "sync: add interface kpng-ipvs: the kernel lacks interfaces of type dummy: load the module dummy\n"},
		{"bookworm", "ipvs", "nf_tables", "sync: list table inet kpng-ipvs: the kernel lacks nf_tables (module nf_tables)|stop: <nil>\ncleanup: <nil>\n"},
		{"bookworm", "iptables", "ip_set", "Using rules in place of sets"},
		{"bullseye", "ebpf", "", "start: /sys/fs/bpf is not a BPF file system; mount one: mount -t bpf"},
		{"bullseye", "ebpf-host-network-only", "", "start: read the cookie of the network namespace (Linux 5.14): protocol not available\n"},
		{"bookworm", "iptables", "xt_recent", "Extension recent revision 0 not supported, missing kernel module?"},
	} {
		out, err := exec.Command(command, "-debian", test.suite, "-without", test.without, start, test.backend).CombinedOutput()
		for want := range strings.SplitSeq(test.want, "|") {
			if err != nil || !strings.Contains(string(out), want) {
				t.Errorf("%s on %s without %s: %v, want %q:\n%s", test.backend, test.suite, test.without, err, want, out)
			}
		}
	}
}

// TestGuestThatEndsOrHangsFails replaces QEMU by scripts that end early or hang.
func TestGuestThatEndsOrHangsFails(t *testing.T) {
	command := build(t, ".")
	for name, test := range map[string]struct{ qemu, path, want string }{
		"ends":    {"echo Kernel panic >&3; echo no memory >&2; exit 3", os.Getenv("PATH"), "the guest ended early, QEMU with exit status 3\nno memory\nKernel panic"},
		"hangs":   {"exec sleep infinity", os.Getenv("PATH"), "the guest showed no sign of life for 100ms"},
		"missing": {"", "", "qemu-system-x86_64 is missing: install Debian package qemu-system-x86"},
	} {
		t.Run(name, func(t *testing.T) {
			bin := t.TempDir()
			if test.qemu != "" {
				if err := os.WriteFile(filepath.Join(bin, "qemu-system-x86_64"), []byte("#!/bin/sh\n"+test.qemu+"\n"), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			cmd := exec.Command(command, "-debian", "bookworm", "-silence", "100ms", "true")
			cmd.Env = append(os.Environ(), "PATH="+bin+":"+test.path)
			out, err := cmd.CombinedOutput()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != 125 || !strings.Contains(string(out), test.want) {
				t.Errorf("%v, want exit status 125 and %q:\n%s", err, test.want, out)
			}
		})
	}
}
