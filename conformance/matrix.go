// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/kpng-project/kpng/api"
)

// Outcome says whether a case passed for an IP family.
type Outcome int

// The outcomes.
const (
	// Passed means that the proxy passed the case.
	Passed Outcome = iota
	// Failed means that the proxy failed the case.
	Failed
	// Unsupported means that the proxy failed the case, and that it declared a required
	// feature as unsupported.
	Unsupported
	// UnsupportedPassed means that the proxy passed the case although it declared a required
	// feature as unsupported.
	UnsupportedPassed
	// Unavailable means that the kernel lacks a required feature, or that the kit cannot test
	// the case with this kind of proxy.
	Unavailable
)

// outcomes has all outcomes.
var outcomes = []Outcome{Passed, Failed, Unsupported, UnsupportedPassed, Unavailable}

// String returns the outcome as it appears in the matrix.
func (o Outcome) String() string {
	switch o {
	case Passed:
		return "ok"
	case Failed:
		return "FAILED"
	case Unsupported:
		return "not supported"
	case UnsupportedPassed:
		return "ok, though declared not supported"
	case Unavailable:
		return "not available here"
	}
	return fmt.Sprintf("Outcome(%d)", int(o))
}

// Result is the result of a case in a family.
type Result struct {
	// Section is the section of docs/reference/semantics.md that the case tests.
	Section string
	// Case is the name of the case, a sentence.
	Case string
	// Family is the IP family. It is 0 for a case that does not depend on the family.
	Family  api.Family
	Outcome Outcome
	// Reason says why the case failed, is not supported or is not available.
	Reason string
	// Took is the duration of the case.
	Took time.Duration
}

// familyPrefix returns the IP family as the beginning of a message.
func (r Result) familyPrefix() string {
	if r.Family == 0 {
		return ""
	}
	return r.Family.String() + ": "
}

// Matrix has the results of all cases, in the order in which the cases ran. The results
// of one case are adjacent.
type Matrix []Result

// Count returns the number of results with the outcome o.
func (m Matrix) Count(o Outcome) int {
	n := 0
	for _, r := range m {
		if r.Outcome == o {
			n++
		}
	}
	return n
}

// String returns the matrix as a table for a log, with the reasons of failures at the end.
func (m Matrix) String() string {
	var text strings.Builder
	section := ""
	for _, row := range m.byCase() {
		if row[0].Section != section {
			section = row[0].Section
			fmt.Fprintf(&text, "%s\n", section)
		}
		fmt.Fprintf(&text, "  %-100s", row[0].Case)
		for _, r := range row {
			if r.Family == 0 {
				fmt.Fprintf(&text, "  %s", r.Outcome)
			} else {
				fmt.Fprintf(&text, "  %s %s", r.Family, r.Outcome)
			}
		}
		text.WriteByte('\n')
	}
	fmt.Fprintf(&text, "%s\n", m.summary())
	for _, r := range m {
		if r.Outcome == Failed {
			fmt.Fprintf(&text, "FAILED: %s: %s%s\n", r.Case, r.familyPrefix(), r.Reason)
		}
	}
	return text.String()
}

// WriteMarkdown writes the matrix as Markdown tables, one per section.
func (m Matrix) WriteMarkdown(w io.Writer) error {
	var text strings.Builder
	section := ""
	notes := noteList{}
	for _, row := range m.byCase() {
		if row[0].Section != section {
			section = row[0].Section
			fmt.Fprintf(&text, "\n### %s\n\n| Case | IPv4 | IPv6 |\n|---|---|---|\n", section)
		}
		cells := map[api.Family]string{}
		for _, r := range row {
			cells[r.Family] = r.Outcome.String() + notes.numberOf(r.Reason)
		}
		if both, ok := cells[0]; ok {
			cells[api.IPv4], cells[api.IPv6] = both, both
		}
		fmt.Fprintf(&text, "| %s | %s | %s |\n", row[0].Case, cells[api.IPv4], cells[api.IPv6])
	}
	fmt.Fprintf(&text, "\n%s\n", m.summary())
	for i, reason := range notes.reasons {
		fmt.Fprintf(&text, "\n%d. %s", i+1, strings.ReplaceAll(reason, "\n", " "))
	}
	if len(notes.reasons) > 0 {
		text.WriteByte('\n')
	}
	_, err := io.WriteString(w, strings.TrimPrefix(text.String(), "\n"))
	return err
}

// byCase returns a list of results for each case.
func (m Matrix) byCase() [][]Result {
	var rows [][]Result
	for i, r := range m {
		if i > 0 && m[i-1].Case == r.Case && m[i-1].Section == r.Section {
			rows[len(rows)-1] = append(rows[len(rows)-1], r)
		} else {
			rows = append(rows, []Result{r})
		}
	}
	return rows
}

func (m Matrix) summary() string {
	var parts []string
	for _, o := range outcomes {
		if n := m.Count(o); n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, o))
		}
	}
	return strings.Join(parts, "; ")
}

// noteList assigns numbers to reasons.
type noteList struct{ reasons []string }

// numberOf returns a reference to a reason: the reason's number in parentheses.
func (n *noteList) numberOf(reason string) string {
	if reason == "" {
		return ""
	}
	for i, known := range n.reasons {
		if known == reason {
			return fmt.Sprintf(" (%d)", i+1)
		}
	}
	n.reasons = append(n.reasons, reason)
	return fmt.Sprintf(" (%d)", len(n.reasons))
}
