// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// The outcomes of a part.
const (
	passed   = "passed"
	failed   = "failed"
	skipped  = "skipped"
	timedOut = "timed out"
)

// result is the result of a part: one line of a file in results.
type result struct {
	Part    string `json:"part"`
	Outcome string `json:"outcome"`
	// Reason says why a part was skipped.
	Reason string    `json:"reason,omitempty"`
	Commit string    `json:"commit"`
	Code   string    `json:"code"`
	Date   time.Time `json:"date"`
	// Seconds is the duration.
	Seconds float64  `json:"seconds"`
	Kernel  string   `json:"kernel"`
	Machine machine  `json:"machine"`
	Figures []figure `json:"figures,omitempty"`
}

// machine describes the machine when the part began.
type machine struct {
	CPU      string  `json:"cpu"`
	Cores    int     `json:"cores"`
	MemoryGB float64 `json:"memoryGB"`
	// Load is the mean number of runnable processes in the minute before the part. If it is
	// not near zero, other parts or programs used the machine.
	Load float64 `json:"load"`
}

// keptResults is the number of results that a file keeps. The history of the repository has
// older results.
const keptResults = 20

// store reads and writes results.
type store struct{ dir string }

func (s store) file(part string) string { return filepath.Join(s.dir, part+".jsonl") }

// read returns the results of a part. The newest is the last.
func (s store) read(part string) ([]result, error) {
	text, err := os.ReadFile(s.file(part))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var results []result
	for line := range bytes.Lines(text) {
		var r result
		if err := json.Unmarshal(line, &r); err != nil {
			return nil, fmt.Errorf("read %s: line %d: %w", s.file(part), len(results)+1, err)
		}
		results = append(results, r)
	}
	// Git may have joined the lines of two branches.
	slices.SortStableFunc(results, func(a, b result) int { return a.Date.Compare(b.Date) })
	return results, nil
}

// add writes a result.
func (s store) add(r result) error {
	results, err := s.read(r.Part)
	if err != nil {
		return err
	}
	results = append(results, r)
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	for _, r := range results[max(0, len(results)-keptResults):] {
		if err := encoder.Encode(r); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(s.dir, 0o755); err != nil {
		return err
	}
	next := s.file(r.Part) + ".next"
	if err := os.WriteFile(next, text.Bytes(), 0o644); err != nil {
		return err
	}
	return os.Rename(next, s.file(r.Part))
}

// usualDuration returns the median duration of the results that passed, or 0.
func usualDuration(results []result) time.Duration {
	var seconds []float64
	for _, r := range results {
		if r.Outcome == passed {
			seconds = append(seconds, r.Seconds)
		}
	}
	if len(seconds) == 0 {
		return 0
	}
	slices.Sort(seconds)
	return time.Duration(seconds[len(seconds)/2]) * time.Second
}

// isCode reports whether a file or folder at the top of the repository is code.
func isCode(name string) bool {
	return name != "results" && name != "docs" && path.Ext(name) != ".md"
}

// codeHash returns the hash of the lines of "git ls-tree" that are about code.
func codeHash(tree string) string {
	hash := sha256.New()
	for line := range strings.Lines(tree) {
		if _, name, _ := strings.Cut(strings.TrimSpace(line), "\t"); isCode(name) {
			hash.Write([]byte(line))
		}
	}
	return fmt.Sprintf("%x", hash.Sum(nil)[:6])
}

// kernel returns the release of the kernel.
func kernel() string {
	var system unix.Utsname
	if unix.Uname(&system) != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(system.Release[:])
}

// thisMachine returns the machine.
func thisMachine() machine {
	m := machine{CPU: "unknown", Cores: runtime.NumCPU()}
	cpus, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(cpus)) {
		if key, value, _ := strings.Cut(line, ":"); strings.TrimSpace(key) == "model name" {
			m.CPU = strings.TrimSpace(value)
			break
		}
	}
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		m.MemoryGB = float64(uint64(info.Totalram)*uint64(info.Unit)>>20) / 1024
		m.MemoryGB = float64(int(m.MemoryGB*10)) / 10
		m.Load = float64(int(float64(info.Loads[0])/65536*10)) / 10
	}
	return m
}
