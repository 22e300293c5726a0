// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"cmp"
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"
)

// reportFormat is the version of the format of reports. It changes when a reader of the
// previous format would misread a report.
const reportFormat = 1

// module is the path of the module of the kit.
const module = "github.com/kpng-project/kpng"

// These types are the content of the file Options.Report.
type (
	reportFile struct {
		FormatVersion int               `json:"formatVersion"`
		KitVersion    string            `json:"kitVersion"`
		Date          time.Time         `json:"date"`
		Kernel        string            `json:"kernel"`
		Proxy         string            `json:"proxy"`
		Unsupported   []reportedFeature `json:"unsupported"`
		Cases         []reportedCase    `json:"cases"`
		Totals        map[string]int    `json:"totals"`
	}
	reportedFeature struct {
		Feature Feature `json:"feature"`
		Reason  string  `json:"reason"`
	}
	reportedCase struct {
		Section string           `json:"section"`
		Case    string           `json:"case"`
		Results []reportedResult `json:"results"`
	}
	reportedResult struct {
		Family  string  `json:"family,omitempty"`
		Result  string  `json:"result"`
		Reason  string  `json:"reason,omitempty"`
		Seconds float64 `json:"seconds"`
	}
)

// writeReport writes the results of a run to the file opts.Report. The argument started is
// the start time of the run.
func (m Matrix) writeReport(opts Options, started time.Time) error {
	var system unix.Utsname
	if err := unix.Uname(&system); err != nil {
		return fmt.Errorf("read kernel release: %w", err)
	}
	content, err := yaml.Marshal(m.report(opts, started, unix.ByteSliceToString(system.Release[:])))
	if err != nil {
		return err
	}
	return os.WriteFile(opts.Report, content, 0o644)
}

func (m Matrix) report(opts Options, started time.Time, kernel string) reportFile {
	r := reportFile{
		FormatVersion: reportFormat, KitVersion: kitVersion(), Date: started.UTC().Truncate(time.Second), Kernel: kernel, Proxy: opts.Proxy,
		Unsupported: []reportedFeature{}, Totals: map[string]int{},
	}
	for feature, reason := range opts.Unsupported {
		r.Unsupported = append(r.Unsupported, reportedFeature{feature, reason})
	}
	slices.SortFunc(r.Unsupported, func(a, b reportedFeature) int { return cmp.Compare(a.Feature, b.Feature) })
	for _, row := range m.byCase() {
		c := reportedCase{Section: row[0].Section, Case: row[0].Case}
		for _, result := range row {
			family := ""
			if result.Family != 0 {
				family = result.Family.String()
			}
			c.Results = append(c.Results, reportedResult{family, result.Outcome.String(), result.Reason, float64(result.Took.Milliseconds()) / 1000})
			r.Totals[result.Outcome.String()]++
		}
		r.Cases = append(r.Cases, c)
	}
	return r
}

// kitVersion returns the version of the module of the kit in this program.
func kitVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range append(info.Deps, &info.Main) {
			if m.Path == module {
				return m.Version
			}
		}
	}
	return "unknown"
}
