// SPDX-License-Identifier: Apache-2.0

package allip

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/test/internal/apiserver"
)

var (
	// The flag allows the hostProcess containers in the manifests for Windows.
	shared = apiserver.Shared{Options: apiserver.Options{Flags: []string{"--allow-privileged"}}}
	// bin is the folder for the programs that the tests build.
	bin string
)

func TestMain(m *testing.M) {
	var err error
	if bin, err = os.MkdirTemp("", "kpng-test-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := shared.Run(m)
	if err := os.RemoveAll(bin); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	os.Exit(code)
}

// need fails the test unless it runs as root and the tools exist.
func need(t testing.TB, tools ...string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test creates network namespaces, which needs root")
	}
	for _, tool := range tools {
		if _, err := exec.LookPath(tool); err != nil {
			t.Fatalf("this test needs %s: %v (Debian: apt-get install iproute2 nftables iptables iputils-ping jq)", tool, err)
		}
	}
}

// build builds the program of an example, unless it exists already, and returns its path.
// If the test was built with the race detector, the program is built with it too.
func build(t testing.TB, example string) string {
	t.Helper()
	path := filepath.Join(bin, example)
	if _, err := os.Stat(path); err == nil {
		return path
	}
	args := []string{"build", "-o", path}
	info, _ := debug.ReadBuildInfo()
	if slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"}) {
		args = append(args, "-race")
	}
	cmd := exec.CommandContext(t.Context(), "go", append(args, "./examples/"+example)...)
	cmd.Dir = "../.."
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", example, err, out)
	}
	return path
}

// sh runs a program and returns its output.
func sh(t testing.TB, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}
