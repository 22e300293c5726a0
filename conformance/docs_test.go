// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestCasesAreDocumented checks that docs/reference/conformance.md lists exactly the
// cases of the kit.
func TestCasesAreDocumented(t *testing.T) {
	page, err := os.ReadFile("../docs/reference/conformance.md")
	if err != nil {
		t.Fatal(err)
	}
	_, got, found := strings.Cut(string(page), "\n## Cases\n")
	if !found {
		t.Fatal("docs/reference/conformance.md has no section Cases")
	}
	var want strings.Builder
	for _, section := range sections {
		fmt.Fprintf(&want, "\n### %s\n\n", section.name)
		for _, c := range section.cases {
			fmt.Fprintf(&want, "* %s%s\n", c.name, featureList(c.needs))
		}
	}
	if diff := cmp.Diff(want.String(), got); diff != "" {
		t.Errorf("docs/reference/conformance.md does not list the cases (-want +got):\n%s", diff)
	}
}

func featureList(features []Feature) string {
	var names []string
	for _, f := range features {
		names = append(names, string(f))
	}
	if len(names) == 0 {
		return ""
	}
	return " (" + strings.Join(names, ", ") + ")"
}
