// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
)

func TestMatrixAsMarkdown(t *testing.T) {
	matrix := Matrix{
		{Section: "Ports", Case: "a port leads somewhere", Family: api.IPv4, Outcome: Passed},
		{Section: "Ports", Case: "a port leads somewhere", Family: api.IPv6, Outcome: Failed, Reason: "no answer\nat all"},
		{Section: "Ports", Case: "an SCTP port", Family: api.IPv4, Outcome: Unavailable, Reason: "no SCTP here"},
		{Section: "Ports", Case: "an SCTP port", Family: api.IPv6, Outcome: Unavailable, Reason: "no SCTP here"},
		{Section: "Dual stack", Case: "both families", Outcome: UnsupportedPassed, Reason: "IPv6: too long"},
	}
	const want = `### Ports

| Case | IPv4 | IPv6 |
|---|---|---|
| a port leads somewhere | ok | FAILED (1) |
| an SCTP port | not available here (2) | not available here (2) |

### Dual stack

| Case | IPv4 | IPv6 |
|---|---|---|
| both families | ok, though declared not supported (3) | ok, though declared not supported (3) |

1 ok; 1 FAILED; 1 ok, though declared not supported; 2 not available here

1. no answer at all
2. no SCTP here
3. IPv6: too long
`
	var got strings.Builder
	if err := matrix.WriteMarkdown(&got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got.String()); diff != "" {
		t.Errorf("matrix as Markdown (-want +got):\n%s", diff)
	}
	if text := matrix.String(); !strings.HasSuffix(text, "\nFAILED: a port leads somewhere: IPv6: no answer\nat all\n") {
		t.Errorf("the text of the matrix has no reason of the failure at its end:\n%s", text)
	}
}

// TestUnsupportedCasesMayPass declares Reject and IPv6 as unsupported, although the
// reference proxy has both features.
func TestUnsupportedCasesMayPass(t *testing.T) {
	netnstest.NeedRoot(t)
	matrix := Run(t, withFault(""), Options{
		Unsupported: map[Feature]string{Reject: "not yet", IPv6: "not here"},
		Cases:       regexp.MustCompile("^a service without endpoints refuses connections$"),
	})
	want := Matrix{{Section: "Cluster IPs", Case: "a service without endpoints refuses connections", Family: api.IPv4, Outcome: UnsupportedPassed, Reason: "reject: not yet"}}
	for i := range matrix {
		matrix[i].Took = 0
	}
	if diff := cmp.Diff(want, matrix); diff != "" {
		t.Errorf("matrix (-want +got):\n%s", diff)
	}
}

// TestCasesRunWithoutTheirFeatures declares UDP as unsupported. Then most cases create
// services without UDP ports. The cases that require UDP still run.
func TestCasesRunWithoutTheirFeatures(t *testing.T) {
	netnstest.NeedRoot(t)
	matrix := Run(t, withFault(""), Options{
		Unsupported: map[Feature]string{UDP: "not yet"},
		Cases:       regexp.MustCompile("UDP"),
	})
	// One passed case is enough: an unsupported case has only one second to pass, so some
	// cases fail on a busy machine.
	if got := matrix.Count(UnsupportedPassed); got == 0 {
		t.Errorf("no case passed:\n%v", matrix)
	}
}
