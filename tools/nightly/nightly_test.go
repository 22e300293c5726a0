// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// newRunner returns a runner for the code with a hash.
func newRunner(dir, code string) *runner {
	return &runner{store: store{filepath.Join(dir, "results")}, commit: commit{Hash: "c" + code, Code: code}, logs: filepath.Join(dir, "logs"), out: io.Discard, jobs: 2, grace: 10 * time.Second}
}

// outcomes returns the outcomes of all results of parts.
func outcomes(t *testing.T, s store, parts ...part) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	for _, p := range parts {
		results, err := s.read(p.Name)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range results {
			all[p.Name] = append(all[p.Name], r.Outcome)
		}
	}
	return all
}

func TestOutcomes(t *testing.T) {
	dir := t.TempDir()
	parts := []part{
		{Name: "fails", Command: "false; echo not reached", Limit: time.Minute},
		{Name: "lasts", Command: "sleep 1000 | cat", Limit: 100 * time.Millisecond},
		{Name: "lacks", Command: "true", Limit: time.Minute, Needs: []string{"no-such-program"}},
		{Name: "passes", Command: "echo '=== ATTR  TestX ok 440'", Limit: time.Minute},
	}
	r := newRunner(dir, "1")
	err := r.runAll(t.Context(), parts, false)
	for _, name := range []string{"fails", "lasts", "lacks"} {
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("error %v, want one that names %s", err, name)
		}
	}
	want := map[string][]string{"fails": {failed}, "lasts": {timedOut}, "lacks": {skipped}, "passes": {passed}}
	if got := outcomes(t, r.store, parts...); !reflect.DeepEqual(got, want) {
		t.Errorf("outcomes %v, want %v", got, want)
	}
	results, err := r.store.read("passes")
	if err != nil {
		t.Fatal(err)
	}
	if got := results[0]; got.Commit != "c1" || got.Code != "1" || got.Kernel == "" || got.Machine.Cores == 0 || got.Machine.MemoryGB == 0 ||
		!reflect.DeepEqual(got.Figures, []figure{{"TestX", "ok", []float64{440}}}) {
		t.Errorf("result %+v", got)
	}
}

// TestStoppedRunContinues stops a run in its second part. The next run with the same code
// runs only the rest, and a run with other code runs all parts.
func TestStoppedRunContinues(t *testing.T) {
	dir := t.TempDir()
	ran, started := filepath.Join(dir, "ran"), filepath.Join(dir, "started")
	parts := []part{
		{Name: "first", Command: "echo first >>" + ran, Limit: time.Minute},
		{Name: "second", Command: "echo second >>" + ran + "; [ -e " + started + " ] || { mkfifo " + started + "; echo >" + started + "; sleep 1000; }", Limit: time.Minute},
		{Name: "third", Command: "echo third >>" + ran, Limit: time.Minute},
	}
	run := func(code string, parts []part, again bool) error {
		r := newRunner(dir, code)
		r.jobs = 1
		return r.runAll(t.Context(), parts, again)
	}
	ctx, stop := context.WithCancel(t.Context())
	go func() {
		for {
			if f, err := os.Open(started); err == nil { // wait until the second part runs
				f.Close()
				break
			}
		}
		stop()
	}()
	r := newRunner(dir, "1")
	r.jobs = 1
	if err := r.runAll(ctx, parts, false); err == nil || !strings.Contains(err.Error(), "part second: stopped") {
		t.Fatalf("error %v, want that the second part was stopped", err)
	}
	if err := run("1", parts, false); err != nil {
		t.Fatal(err)
	}
	if err := run("2", parts, false); err != nil {
		t.Fatal(err)
	}
	if err := run("2", parts[1:2], true); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(ran)
	if err != nil {
		t.Fatal(err)
	}
	if want := "first second second third first second third second"; strings.Join(strings.Fields(string(got)), " ") != want {
		t.Errorf("ran %q, want %q", got, want)
	}
	want := map[string][]string{"first": {passed, passed}, "second": {passed, passed, passed}, "third": {passed, passed}}
	if got := outcomes(t, newRunner(dir, "").store, parts...); !reflect.DeepEqual(got, want) {
		t.Errorf("outcomes %v, want %v", got, want)
	}
}

// TestPartsRunBesideEachOther has two parts that end only if both run at the same time, and
// a part that must run alone. Each part has its own temporary folder, which is removed.
func TestPartsRunBesideEachOther(t *testing.T) {
	dir := t.TempDir()
	pipe, busy := filepath.Join(dir, "pipe"), filepath.Join(dir, "busy")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	parts := []part{
		{Name: "measures", Alone: true, Limit: time.Minute, Command: "mkdir " + busy + "; sleep 0.1; rmdir " + busy + "; echo $TMPDIR >" + dir + "/t3"},
		{Name: "reads", Limit: time.Minute, Command: "mkdir " + busy + "; read line <" + pipe + "; rmdir " + busy + "; touch $TMPDIR/left; echo $TMPDIR >" + dir + "/t1"},
		{Name: "writes", Limit: time.Minute, Command: "echo line >" + pipe + "; [ ! -e $TMPDIR/left ]; echo $TMPDIR >" + dir + "/t2"},
	}
	r := newRunner(dir, "1")
	if err := r.runAll(t.Context(), parts, false); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"t1", "t2", "t3"} {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(strings.TrimSpace(string(text))); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the temporary folder %s remains: %v", text, err)
		}
	}
}

// TestFailuresAreNamed expects the lines that name failures, or else the last lines. It also
// expects the name of the file with the output.
func TestFailuresAreNamed(t *testing.T) {
	dir := t.TempDir()
	parts := []part{
		{Name: "tests", Limit: time.Minute, Command: "echo start; echo '--- PASS: TestA'; echo '    --- FAIL: TestB/c (0.1s)'; seq 30; false"},
		{Name: "script", Limit: time.Minute, Command: "seq 100 130; echo; false"},
	}
	r := newRunner(dir, "1")
	var out strings.Builder
	r.out = &out
	if err := r.runAll(t.Context(), parts, false); err == nil {
		t.Error("no error")
	}
	for _, want := range []string{"\n        --- FAIL: TestB/c (0.1s)\n    output: " + dir + "/logs/tests.log\n", "\n    123\n    124\n", "\n    130\n    output: "} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the output lacks %q:\n%s", want, out.String())
		}
	}
	for _, unwanted := range []string{"TestA", "start", "    122\n"} {
		if strings.Contains(out.String(), unwanted) {
			t.Errorf("the output has %q:\n%s", unwanted, out.String())
		}
	}
}

func TestFigures(t *testing.T) {
	got, err := readFigures(strings.NewReader(`goos: linux
BenchmarkIngest/endpoints=10-2         	       5	  20000000 ns/op	        1900 B/service
BenchmarkIngest/endpoints=10-2         	       5	  40000000 ns/op	        1900 B/service
=== RUN   TestConformance
=== ATTR  TestConformance not-supported 37
=== ATTR  TestConformance of-no-concern word
--- PASS: TestConformance (1.00s)
    --- PASS: TestConformance/Ports (0.50s)
    --- SKIP: TestConformance/IPv6 (0.00s)
./sink -fuzz=^FuzzDriver$ | fuzz: elapsed: 10s, execs: 12345 (1234/sec), new interesting: 1 (total: 2)
the last line has no end`))
	if err != nil {
		t.Fatal(err)
	}
	want := []figure{
		{"Ingest/endpoints=10", "sec/op", []float64{0.02, 0.04}},
		{"Ingest/endpoints=10", "B/service", []float64{1900, 1900}},
		{"TestConformance", "not-supported", []float64{37}},
		{"FuzzDriver", "executions", []float64{12345}},
		{"tests", "passed", []float64{2}},
		{"tests", "skipped", []float64{1}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
}

func TestCodeHash(t *testing.T) {
	tree := "100644 blob 1\tgo.mod\n040000 tree 2\tsink\n"
	if codeHash(tree) != codeHash(tree+"040000 tree 3\tdocs\n040000 tree 4\tresults\n100644 blob 5\tREADME.md\n") {
		t.Error("documents and results change the hash of the code")
	}
	if codeHash(tree) == codeHash(strings.Replace(tree, "tree 2", "tree 3", 1)) {
		t.Error("a changed folder does not change the hash of the code")
	}
}

// TestStoreKeepsNewestResults also expects that results are in the order of their dates, as
// Git may join the lines of two branches.
func TestStoreKeepsNewestResults(t *testing.T) {
	s := store{t.TempDir()}
	date := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for i := range keptResults + 1 {
		if err := s.add(result{Part: "p", Outcome: passed, Date: date.AddDate(0, 0, (i+1)%3-i%3+10*i)}); err != nil {
			t.Fatal(err)
		}
	}
	results, err := s.read("p")
	if err != nil {
		t.Fatal(err)
	}
	if len(results) != keptResults || results[0].Date.Before(date.AddDate(0, 0, 5)) {
		t.Errorf("%d results, the first of %s", len(results), results[0].Date)
	}
	if err := os.WriteFile(s.file("p"), []byte("{}\nno JSON\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.read("p"); err == nil || !strings.Contains(err.Error(), "p.jsonl: line 2") {
		t.Errorf("error %v, want one that names the file and the line", err)
	}
}

func TestSelectedParts(t *testing.T) {
	parts := []part{{Name: "a"}, {Name: "long", Long: true}, {Name: "bench-a"}}
	for patterns, want := range map[string]string{"": "a bench-a", "long": "long", "bench-* a": "a bench-a"} {
		selected, err := selectParts(parts, strings.Fields(patterns))
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, p := range selected {
			names = append(names, p.Name)
		}
		if got := strings.Join(names, " "); got != want {
			t.Errorf("%q selects %q, want %q", patterns, got, want)
		}
	}
	if _, err := selectParts(parts, []string{"b"}); err == nil {
		t.Error("an unknown name is accepted")
	}
}

// TestParts fails if the list of parts has a mistake.
func TestParts(t *testing.T) {
	names := map[string]bool{}
	for _, p := range allParts() {
		if p.Name == "" || names[p.Name] || p.About == "" || p.Limit == 0 || p.Command == "" {
			t.Errorf("the part %q is incomplete, or its name is not unique", p.Name)
		}
		names[p.Name] = true
	}
}

// TestCommandsSelectTests expects that the patterns of -run and -bench in the commands match
// functions of each package, because go test succeeds without a match.
func TestCommandsSelectTests(t *testing.T) {
	words := regexp.MustCompile(`'([^']*)'|"([^"]*)"|[^\s;]+|;`)
	checked := 0
	for _, p := range allParts() {
		dir := "../.."
		for line := range strings.Lines(strings.ReplaceAll(p.Command, ";", "\n")) {
			if to, ok := strings.CutPrefix(strings.TrimSpace(line), "cd "); ok {
				dir = filepath.Join("../..", to)
			}
			_, arguments, ok := strings.Cut(line, "go test ")
			if !ok {
				continue
			}
			patterns := map[string]string{"-run": ".", "-bench": "^$"}
			var packages []string
			last := ""
			for _, w := range words.FindAllString(arguments, -1) {
				w = strings.Trim(w, "'\"")
				if _, ok := patterns[last]; ok {
					patterns[last], _, _ = strings.Cut(w, "/")
				} else if w == "." || strings.HasPrefix(w, "./") && !strings.HasSuffix(w, "...") {
					packages = append(packages, w)
				}
				last = w
			}
			for _, pkg := range packages {
				checked++
				files, err := filepath.Glob(filepath.Join(dir, pkg, "*_test.go"))
				if err != nil || len(files) == 0 {
					t.Errorf("%s: package %s has no tests: %v", p.Name, pkg, err)
				}
				matches := false
				for _, file := range files {
					text, err := os.ReadFile(file)
					if err != nil {
						t.Fatal(err)
					}
					for _, f := range regexp.MustCompile(`(?m)^func ((?:Test|Benchmark)\w*)`).FindAllSubmatch(text, -1) {
						pattern := patterns["-run"]
						if bytes.HasPrefix(f[1], []byte("Benchmark")) {
							pattern = patterns["-bench"]
						}
						matches = matches || regexp.MustCompile(pattern).Match(f[1])
					}
				}
				if !matches {
					t.Errorf("%s: nothing in package %s matches -run %s or -bench %s", p.Name, pkg, patterns["-run"], patterns["-bench"])
				}
			}
		}
	}
	if checked < 50 {
		t.Errorf("only %d packages were checked", checked)
	}
}

func TestGeneratedText(t *testing.T) {
	last := &result{Outcome: timedOut, Date: time.Date(2026, 11, 27, 0, 0, 0, 0, time.UTC), Commit: "abc", Kernel: "6.1", Seconds: 61, Figures: []figure{{"B/n=1", "sec/op", []float64{0.002, 0.001}}}}
	results := []partResult{{part{Name: "bench-a", About: "text", Command: "go test"}, last}, {part{Name: "b", About: "more"}, nil}, {part{Name: "c-1", Long: true}, nil}, {part{Name: "c-2", Long: true}, nil}, {part{Name: "d", Long: true}, nil}, {part{Name: "c-3", Long: true}, nil}}
	for _, want := range []string{"Last results: 1 timed out.", "| timed out | 2026-11-27, `abc` | 1m1s |", "No result yet (1): `b`.", "Long parts without a result (4): `c-*` (3), `d`."} {
		if got := nightlyTable(results); !strings.Contains(got, want) {
			t.Errorf("the table lacks %q:\n%s", want, got)
		}
	}
	if got, want := benchmarkTables(results), "| B/n=1 | 1.000m–2.000m sec/op |"; !strings.Contains(got, want) {
		t.Errorf("the table lacks %q:\n%s", want, got)
	}
	page := []byte("before\n" + generatedBegin + "old\n" + generatedEnd + "after\n")
	got, err := replaceGenerated(page, "new")
	if want := "before\n" + generatedBegin + "\nnew\n" + generatedEnd + "after\n"; err != nil || string(got) != want {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
	if _, err := replaceGenerated([]byte("no comment"), ""); err == nil || errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v for a page without comments", err)
	}
}
