// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/perf/benchunit"
)

// pages has the pages with generated text, and the functions that generate it.
var pages = []struct {
	file string
	text func([]partResult, store) (string, error)
}{
	{"docs/history/nightly.md", ofParts(nightlyTable)},
	{"docs/reference/conformance.md", ofParts(conformanceTable)},
	{"docs/history/benchmarks.md", ofParts(benchmarkTables)},
	{"docs/reference/referee.md", func(_ []partResult, s store) (string, error) { return refereePage(s) }},
}

// ofParts adds an unused store argument to a function that needs only the results of parts.
func ofParts(text func([]partResult) string) func([]partResult, store) (string, error) {
	return func(results []partResult, _ store) (string, error) { return text(results), nil }
}

// partResult is a part and its last result, which is nil if the part has not run.
type partResult struct {
	part
	last *result
}

// writeDocs writes the last results into the pages.
func writeDocs(parts []part, store store) error {
	var results []partResult
	for _, p := range parts {
		all, err := store.read(p.Name)
		if err != nil {
			return err
		}
		r := partResult{part: p}
		if len(all) > 0 {
			r.last = &all[len(all)-1]
		}
		results = append(results, r)
	}
	for _, page := range pages {
		before, err := os.ReadFile(page.file)
		if err != nil {
			return err
		}
		text, err := page.text(results, store)
		if err != nil {
			return err
		}
		after, err := replaceGenerated(before, text)
		if err != nil {
			return fmt.Errorf("%s: %w", page.file, err)
		}
		if !bytes.Equal(before, after) {
			if err := os.WriteFile(page.file, after, 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}

// These lines enclose generated text.
const (
	generatedBegin = "<!-- The text up to the next comment is generated from results/ by hack/generate. -->\n"
	generatedEnd   = "<!-- End of generated text. -->\n"
)

// replaceGenerated replaces the generated text of a page.
func replaceGenerated(page []byte, text string) ([]byte, error) {
	before, rest, ok := bytes.Cut(page, []byte(generatedBegin))
	_, after, ok2 := bytes.Cut(rest, []byte(generatedEnd))
	if !ok || !ok2 {
		return nil, fmt.Errorf("the page needs the lines %q and %q", generatedBegin, generatedEnd)
	}
	return slices.Concat(before, []byte(generatedBegin+"\n"+text+"\n"+generatedEnd), after), nil
}

// nightlyTable lists the results of all parts. Parts without a result are one line.
func nightlyTable(results []partResult) string {
	var text strings.Builder
	var missing, long []string
	count := map[string]int{}
	for _, r := range results {
		switch {
		case r.last != nil:
			count[r.last.Outcome]++
		case r.Long:
			long = append(long, r.Name)
		default:
			missing = append(missing, r.Name)
		}
	}
	var counts []string
	for _, outcome := range []string{passed, failed, timedOut, skipped} {
		if count[outcome] > 0 {
			counts = append(counts, fmt.Sprintf("%d %s", count[outcome], outcome))
		}
	}
	if len(counts) > 0 {
		fmt.Fprintf(&text, "Last results: %s.\n\n| part | what it does | result | date, commit | time | figures |\n|---|---|---|---|---|---|\n", strings.Join(counts, ", "))
	}
	for _, r := range results {
		if r.last == nil {
			continue
		}
		figures := summary(r.last.Figures)
		if strings.HasPrefix(r.Name, "bench-") && len(r.last.Figures) > 0 {
			figures = "[benchmarks.md](benchmarks.md#" + r.Name + ")"
		}
		fmt.Fprintf(&text, "| `%s` | %s | %s | %s, `%.8s` | %s | %s |\n", r.Name, r.About, r.last.outcome(), r.last.Date.Format(time.DateOnly), r.last.Commit, duration(r.last.Seconds), figures)
	}
	list := func(title string, names []string) {
		if len(names) > 0 {
			fmt.Fprintf(&text, "\n%s (%d): %s.\n", title, len(names), strings.Join(shorten(names), ", "))
		}
	}
	list("No result yet", missing)
	list("Long parts without a result", long)
	return strings.TrimPrefix(text.String(), "\n")
}

// shorten replaces more than two names with the same first word by a pattern.
func shorten(names []string) (short []string) {
	first := func(name string) string { return name[:strings.Index(name, "-")+1] }
	same := map[string]int{}
	for _, name := range names {
		same[first(name)]++
	}
	for _, name := range names {
		text := "`" + name + "`"
		if n := same[first(name)]; n > 2 && first(name) != "" {
			text = fmt.Sprintf("`%s*` (%d)", first(name), n)
		}
		if !slices.Contains(short, text) {
			short = append(short, text)
		}
	}
	return short
}

// outcome returns the outcome, and the reason if there is one.
func (r *result) outcome() string {
	if r.Reason == "" {
		return r.Outcome
	}
	return r.Outcome + ": " + r.Reason
}

// describe returns the outcome, date, commit and kernel of a result.
func (r *result) describe() string {
	return fmt.Sprintf("%s, %s, commit %s, Linux %s", r.outcome(), r.Date.Format(time.DateOnly), r.Commit, r.Kernel)
}

// conformanceTable lists the results of the conformance kit.
func conformanceTable(results []partResult) string {
	var text strings.Builder
	var missing []string
	for _, r := range results {
		if !strings.HasPrefix(r.Name, "conformance-") && r.Name != "calibration" {
			continue
		}
		if r.last == nil {
			missing = append(missing, "`"+r.Name+"`")
			continue
		}
		if text.Len() == 0 {
			text.WriteString("| part | last result | ok | not supported | ok, though declared not supported | not available here | failed |\n|---|---|---|---|---|---|---|\n")
		}
		fmt.Fprintf(&text, "| `%s` | %s |", r.Name, r.last.describe())
		for _, outcome := range []string{"ok", "not-supported", "ok,-though-declared-not-supported", "not-available-here", "FAILED"} {
			fmt.Fprintf(&text, " %s |", values(r.last.Figures, outcome))
		}
		text.WriteString("\n")
	}
	if len(missing) > 0 {
		if text.Len() > 0 {
			text.WriteString("\n")
		}
		fmt.Fprintf(&text, "Without a result: %s.\n", strings.Join(missing, ", "))
	}
	return text.String()
}

// values returns the values of all figures of a unit.
func values(figures []figure, unit string) string {
	var all []string
	for _, f := range figures {
		if f.Unit == unit {
			all = append(all, f.format())
		}
	}
	return strings.Join(all, "; ")
}

// benchmarkTables lists the results of benchmarks.
func benchmarkTables(results []partResult) string {
	var text strings.Builder
	var missing []string
	for _, r := range results {
		if !strings.HasPrefix(r.Name, "bench-") {
			continue
		}
		if r.last == nil || len(r.last.Figures) == 0 {
			missing = append(missing, "`"+r.Name+"`")
			continue
		}
		m := r.last.Machine
		fmt.Fprintf(&text, "### %s\n\n%s; %s, %d cores, %g GB.\n\n", r.Name, strings.ToUpper(r.last.describe()[:1])+r.last.describe()[1:], m.CPU, m.Cores, m.MemoryGB)
		for line := range strings.Lines(r.Command) {
			fmt.Fprintf(&text, "    %s\n", strings.TrimSpace(line))
		}
		text.WriteString("\n| benchmark | results |\n|---|---|\n")
		for _, f := range byName(r.last.Figures) {
			fmt.Fprintf(&text, "| %s | %s |\n", strings.ReplaceAll(f[0].Name, "|", "\\|"), summary(f))
		}
		text.WriteString("\n")
	}
	if len(missing) > 0 {
		fmt.Fprintf(&text, "Parts without figures: %s.\n", strings.Join(missing, ", "))
	}
	return text.String()
}

// byName groups figures with the same name.
func byName(figures []figure) [][]figure {
	var groups [][]figure
	index := map[string]int{}
	for _, f := range figures {
		i, ok := index[f.Name]
		if !ok {
			i = len(groups)
			index[f.Name] = i
			groups = append(groups, nil)
		}
		groups[i] = append(groups[i], f)
	}
	return groups
}

// summary returns the first figures.
func summary(figures []figure) string {
	const most = 8
	var all []string
	for _, f := range figures {
		if len(all) == most {
			all = append(all, "…")
			break
		}
		all = append(all, f.format()+" "+strings.ReplaceAll(f.Unit, "-", " "))
	}
	return strings.Join(all, ", ")
}

// format returns the lowest and the highest value.
func (f figure) format() string {
	low, high := slices.Min(f.Values), slices.Max(f.Values)
	number := func(v float64) string {
		if v == float64(int64(v)) && v < 1e6 && v > -1e6 {
			return strconv.FormatInt(int64(v), 10)
		}
		return benchunit.Scale(v, benchunit.ClassOf(f.Unit))
	}
	if low == high {
		return number(low)
	}
	return number(low) + "–" + number(high)
}

// duration returns seconds as a duration.
func duration(seconds float64) string {
	return (time.Duration(seconds+0.5) * time.Second).String()
}
