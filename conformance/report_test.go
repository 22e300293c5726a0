// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
	"sigs.k8s.io/yaml"
)

// TestReportInDocs checks that docs/reference/conformance.md has an example of the
// present format.
func TestReportInDocs(t *testing.T) {
	page, err := os.ReadFile("../docs/reference/conformance.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(page), "```yaml\n")
	want, _, _ := strings.Cut(rest, "```\n")
	const section, name = "Cluster IPs", "a cluster IP leads to every ready endpoint, on this node and elsewhere"
	matrix := Matrix{
		{Section: section, Case: name, Family: api.IPv4, Outcome: Passed, Took: 52 * time.Millisecond},
		{Section: section, Case: name, Family: api.IPv6, Outcome: Unsupported, Reason: "IPv6: not yet", Took: 1009 * time.Millisecond},
	}
	r := matrix.report(Options{Proxy: "my-proxy v1.2.3", Unsupported: map[Feature]string{IPv6: "not yet"}},
		time.Date(2026, 11, 27, 6, 30, 0, 0, time.UTC), "6.18.5")
	r.KitVersion = "v0.9.0"
	got, err := yaml.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("report (-want +got):\n%s", diff)
	}
}

// TestReport checks the report of a run.
func TestReport(t *testing.T) {
	netnstest.NeedRoot(t)
	path := filepath.Join(t.TempDir(), "report.yaml")
	matrix := Run(t, withFault(""), Options{
		Report: path, Proxy: "reference", Unsupported: map[Feature]string{Reject: "not yet", SCTP: "not yet"},
		Cases: regexp.MustCompile("^a service without endpoints refuses connections$|^a dual-stack service serves each"),
	})
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var got reportFile
	if err := yaml.UnmarshalStrict(content, &got); err != nil {
		t.Fatal(err)
	}
	if age := time.Since(got.Date); age < 0 || age > time.Hour {
		t.Errorf("date %v", got.Date)
	}
	want := matrix.report(Options{Proxy: "reference", Unsupported: map[Feature]string{Reject: "not yet", SCTP: "not yet"}}, got.Date, got.Kernel)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("report (-want +got):\n%s", diff)
	}
	if got.Kernel == "" || got.KitVersion == "unknown" || len(got.Cases) != 2 || len(got.Cases[0].Results) != 2 || len(got.Cases[1].Results) != 1 || got.Totals[UnsupportedPassed.String()] != 2 {
		t.Errorf("report:\n%s", content)
	}
}
