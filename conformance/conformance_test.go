// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/conformance/internal/reference"
	"github.com/kpng-project/kpng/conformance/internal/world"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/watcher"
)

// withFault returns a NewSink for the reference proxy with a fault.
func withFault(fault reference.Fault) NewSink {
	return func(site Site) (sink.Sink, error) {
		return reference.New(reference.Options{
			Table:             site.Instance,
			NodePortCIDRs:     site.NodePortCIDRs,
			ClusterCIDRs:      site.ClusterCIDRs,
			PodInterfaces:     site.PodInterfaces,
			MasqueradeOutside: site.Masquerade == MasqueradeOutside,
			MasqueradeAll:     site.Masquerade == MasqueradeAll,
			Fault:             fault,
		}), nil
	}
}

// TestReference checks that the reference proxy passes all cases. It logs the matrix.
func TestReference(t *testing.T) {
	t.Parallel() // runs beside TestEveryCaseCanFail
	matrix := Run(t, withFault(""), Options{})
	for _, r := range matrix {
		if r.Outcome != Passed && r.Outcome != Unavailable {
			t.Errorf("%s: %s", r.Case, r.Outcome)
		}
	}
}

// TestCommand tests a Command that reads manifests. The Command does not report when it
// has programmed the objects, so the kit uses a marker service. The command is the test
// binary, which runs this test in a second process.
func TestCommand(t *testing.T) {
	netnstest.NeedRoot(t)
	const siteVariable, manifestsVariable = "KPNG_TEST_SITE", "KPNG_TEST_MANIFESTS"
	if text := os.Getenv(siteVariable); text != "" {
		var site Site
		if err := json.Unmarshal([]byte(text), &site); err != nil {
			t.Fatal(err)
		}
		s, err := withFault("")(site)
		if err != nil {
			t.Fatal(err)
		}
		t.Fatal(kpng.Run(t.Context(), kpng.Options{
			Manifests: os.Getenv(manifestsVariable),
			NodeName:  site.NodeName,
			Services:  watcher.Options{ServiceProxyName: site.ServiceProxyName},
		}, s))
	}
	manifests := filepath.Join(t.TempDir(), "manifests.json")
	again := func(site Site) *exec.Cmd {
		text, err := json.Marshal(site)
		if err != nil {
			t.Error(err)
		}
		cmd := exec.Command(os.Args[0], "-test.run=^TestCommand$")
		cmd.Env = append(os.Environ(), siteVariable+"="+string(text), manifestsVariable+"="+manifests)
		return cmd
	}
	matrix := RunSubject(t, &Command{Proxy: again, Publisher: Manifests(manifests)}, Options{
		Unsupported: map[Feature]string{Cleanup: "the command has no clean-up"},
		Cases:       regexp.MustCompile("every ready endpoint|killed while|clean-up|loses its zone|traffic to a deleted service"),
	})
	if got := matrix.Count(Passed); got < 8 {
		t.Errorf("%d results passed, want at least 8", got)
	}
	if got := matrix.Count(Unsupported); got != 4 {
		t.Errorf("%d results are not supported, want 4", got)
	}
}

// idleProxy is a proxy that never programs anything.
type idleProxy struct{ Subject }

func (idleProxy) Settle(ctx context.Context) error { return context.DeadlineExceeded }
func (idleProxy) Output() string                   { return "unknown flag: --colour" }
func (idleProxy) Kill() error                      { return nil }

func TestFailureShowsOutputOfProxy(t *testing.T) {
	k := &kit{subject: idleProxy{}, process: idleProxy{}}
	if err := k.awaitProgrammed(t.Context()); err == nil || !strings.Contains(err.Error(), "unknown flag: --colour") {
		t.Errorf("error %v, want one with the output of the proxy", err)
	}
}

func TestEndOfProxyEndsTheWait(t *testing.T) {
	netnstest.NeedRoot(t)
	w, err := world.New(world.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	k := &kit{world: w, site: Site{host: w.Node}, opts: Options{Patience: time.Hour}, subject: &Command{
		Proxy: func(Site) *exec.Cmd { return exec.Command("sh", "-c", "echo unknown flag: --colour; exit 3") },
	}}
	if err := k.start(t.Context(), k.site); err == nil || !strings.Contains(err.Error(), "the proxy has ended: exit status 3; output of the proxy:\nunknown flag: --colour") {
		t.Errorf("error %v, want one with the result and the output of the proxy", err)
	}
}

// TestMessagesOfAFailure checks the reason and the log of a failed case.
func TestMessagesOfAFailure(t *testing.T) {
	c := testCase{needs: []Feature{NodePorts, HealthChecks}}
	if got := c.needed(); got != "(needs: node ports, health-check node ports) " {
		t.Errorf("needed features: %q", got)
	}
	if got := (testCase{}).needed(); got != "" {
		t.Errorf("no needed features: %q", got)
	}
	if got := unexpected("it must be dropped", world.Answer{Name: "beyond"}, nil).Error(); got != "it must be dropped: answer from beyond" {
		t.Errorf("an unexpected answer: %s", got)
	}
	if err := unexpected("it must be dropped", world.Answer{}, os.ErrClosed); !errors.Is(err, os.ErrClosed) {
		t.Errorf("an unexpected error: %v", err)
	}
	if got := lastLines(strings.Repeat("old\n", 9) + strings.Repeat("new\n", 20)); got != strings.TrimSpace(strings.Repeat("new\n", 20)) {
		t.Errorf("last lines: %q", got)
	}
}
