// SPDX-License-Identifier: Apache-2.0

// Mutate tests the tests of packages. It makes small faults in their code, and runs the
// tests with each one. A fault that no test finds is a survivor. A new test must find it,
// or equivalent.txt must say why the mutant behaves as the original code does. This file has a
// paragraph for each such mutant. The paragraph has the three lines that this program prints,
// without file and line number, and the reason.
//
// Usage, in the root of the repository:
//
//	go run -C tools ./mutate [-skip tests] [-only pattern] [-part 1/8] ./package... [-- flags of the tests]
//
// For each mutant, only the tests that execute its code run, and fast tests run first. All tests
// run before a mutant counts as a survivor.
//
// A mutant has one of these changes:
//
//   - An equality or a condition is negated.
//   - A comparison includes or excludes equal values, such as < instead of <=.
//   - An operand of && or || has no effect.
//   - The sign + replaces -, or the reverse.
//   - A statement that assigns or calls is removed. Calls for the log and for locks stay.
//   - A returned value is zero. A bool is its opposite, and zero is one.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/tools/go/packages"
)

func main() {
	log.SetFlags(0)
	root := flag.String("root", "..", "the `folder` of the repository")
	skip := flag.String("skip", "", "a `pattern` of tests not to run")
	only := flag.String("only", "", "a `pattern` of file:line; only these mutants run")
	part := flag.String("part", "1/1", "`k/n`: only every n-th mutant runs, beginning with the k-th")
	jobs := flag.Int("jobs", runtime.GOMAXPROCS(0), "how many mutants run at a time")
	flag.Parse()
	patterns, arguments := flag.Args(), []string(nil)
	if i := slices.Index(patterns, "--"); i >= 0 {
		patterns, arguments = patterns[:i], patterns[i+1:]
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Stdout, options{*root, *skip, *only, *part, *jobs, arguments}, patterns); err != nil {
		log.Fatal(err)
	}
}

type options struct {
	root, skip, only, part string
	jobs                   int
	arguments              []string
}

func run(ctx context.Context, out io.Writer, opts options, patterns []string) error {
	root, err := filepath.Abs(opts.root)
	if err != nil {
		return err
	}
	opts.root = root
	only, err := regexp.Compile(opts.only)
	if err != nil {
		return err
	}
	var part, parts int
	if n, err := fmt.Sscanf(opts.part, "%d/%d", &part, &parts); n != 2 || part < 1 || part > parts {
		return fmt.Errorf("part %q is not of the form 1/8: %v", opts.part, err)
	}
	equivalent, err := readEquivalent(filepath.Join(root, "tools/mutate/equivalent.txt"))
	if err != nil {
		return err
	}
	pkgs, err := load(ctx, root, patterns)
	if err != nil {
		return err
	}
	var errs []error
	for _, pkg := range pkgs {
		selected := func(place string, i int) bool { return only.MatchString(place) && i%parts == part-1 }
		if err := runPackage(ctx, out, opts, pkg, selected, equivalent); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", pkg.PkgPath, err))
		}
	}
	return errors.Join(errs...)
}

func load(ctx context.Context, root string, patterns []string) ([]*packages.Package, error) {
	pkgs, err := packages.Load(&packages.Config{
		Context: ctx, Dir: root,
		Mode: packages.NeedName | packages.NeedFiles | packages.NeedCompiledGoFiles | packages.NeedImports | packages.NeedTypes | packages.NeedSyntax | packages.NeedTypesInfo,
	}, patterns...)
	if err != nil {
		return nil, err
	}
	if packages.PrintErrors(pkgs) > 0 {
		return nil, errors.New("the packages have errors")
	}
	return pkgs, nil
}

// runPackage runs the tests of a package with each of its mutants.
func runPackage(ctx context.Context, out io.Writer, opts options, pkg *packages.Package, selected func(place string, i int) bool, equivalent map[key]string) error {
	dir, err := os.MkdirTemp("", "mutate-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	mutants, err := compile(ctx, pkg, dir)
	if err != nil {
		return err
	}
	tests := tests{binary: filepath.Join(dir, "tests"), dir: filepath.Dir(pkg.GoFiles[0])}
	tests.arguments = append([]string{"-test.short", "-test.failfast", "-test.skip", opts.skip}, opts.arguments...)
	if err := tests.measure(ctx, filepath.Join(dir, "reached"), len(mutants)); err != nil {
		return err
	}

	known := map[key]bool{}
	var survivors, wrong []string
	counts := map[string]int{"generated": len(mutants)}
	var mu sync.Mutex
	var wait sync.WaitGroup
	slots := make(chan struct{}, opts.jobs)
	for i, m := range mutants {
		known[m.key] = true
		name, err := filepath.Rel(opts.root, m.pos.Filename)
		if err != nil {
			return err
		}
		place := fmt.Sprintf("%s:%d", name, m.pos.Line)
		if !selected(place, i) {
			counts["not-run"]++
			continue
		}
		slots <- struct{}{}
		wait.Go(func() {
			defer func() { <-slots }()
			reason, listed := equivalent[m.key]
			found := tests.find(ctx, i+1, !listed)
			mu.Lock()
			defer mu.Unlock()
			text := fmt.Sprintf("%s: %s\n\t%s\n\t%s\n", place, m.key.function, m.key.line, m.key.change)
			switch {
			case ctx.Err() != nil:
				counts["not-run"]++
			case found == "" && listed:
				counts["equivalent"]++
			case found == "":
				counts["survived"]++
				survivors = append(survivors, text)
				fmt.Fprintf(out, "survived: %s", text)
			default:
				counts["killed"]++
				counts[found]++
				if listed {
					wrong = append(wrong, fmt.Sprintf("%s\t%s\n", text, reason))
				}
			}
		})
	}
	wait.Wait()
	// The results of nightly runs contain these lines; see tools/nightly.
	for _, unit := range []string{"generated", "killed", "time-limit", "equivalent", "survived", "not-run"} {
		fmt.Fprintf(out, "=== ATTR  %s %s %d\n", pkg.Name, unit, counts[unit])
	}
	for k := range equivalent {
		if name, _, _ := strings.Cut(k.function, "."); name == pkg.Name && !known[k] {
			wrong = append(wrong, fmt.Sprintf("no mutant: %s\n\t%s\n\t%s\n", k.function, k.line, k.change))
		}
	}
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case len(wrong) > 0:
		return fmt.Errorf("equivalent.txt is wrong about mutants:\n%s", strings.Join(wrong, ""))
	case len(survivors) > 0:
		return fmt.Errorf("%d mutants survived", len(survivors))
	}
	return nil
}

// compile compiles the tests of a package with all mutants into the file dir/tests.
func compile(ctx context.Context, pkg *packages.Package, dir string) ([]mutant, error) {
	m := mutator{pkg: pkg}
	replace := map[string]string{}
	add := func(path string, text []byte) error {
		replace[path] = filepath.Join(dir, strconv.Itoa(len(replace))+".go")
		return os.WriteFile(replace[path], text, 0o600)
	}
	for i, file := range pkg.Syntax {
		text, err := os.ReadFile(pkg.CompiledGoFiles[i])
		if err != nil {
			return nil, err
		}
		if err := add(pkg.CompiledGoFiles[i], m.mutate(file, text)); err != nil {
			return nil, err
		}
	}
	folder := filepath.Dir(pkg.GoFiles[0])
	if err := add(filepath.Join(folder, "mutant.go"), fmt.Appendf(nil, support, pkg.Name, len(m.mutants)+1)); err != nil {
		return nil, err
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, "overlay.json"), overlay, 0o600); err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, "go", "test", "-p", "1", "-vet=off", "-c", "-o", filepath.Join(dir, "tests"), "-overlay", filepath.Join(dir, "overlay.json"), ".")
	cmd.Dir = folder
	if output, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("compile the mutants: %w\n%s", err, output)
	}
	return m.mutants, nil
}

// tests are the compiled tests of a package.
type tests struct {
	binary, dir string
	arguments   []string
	// all has all tests. fast and slow have the tests that execute the code of a mutant.
	all        selection
	fast, slow map[int]selection
}

// selection has some tests, and the time that they need together.
type selection struct {
	names []string
	needs usage
}

// usage is the time that tests need: wall-clock time and CPU time.
type usage struct{ wall, cpu time.Duration }

func (s selection) with(name string, needs usage) selection {
	return selection{append(s.names, name), usage{s.needs.wall + needs.wall, s.needs.cpu + needs.cpu}}
}

// A fast test needs less time than maxFast.
const maxFast = 50 * time.Millisecond

// measure runs each test without a mutant. It determines which mutants the test can find.
func (t *tests) measure(ctx context.Context, reached string, mutants int) error {
	list, err := exec.CommandContext(ctx, t.binary, append(slices.Clone(t.arguments), "-test.list", ".")...).Output()
	if err != nil {
		return fmt.Errorf("list the tests: %w", err)
	}
	t.fast, t.slow = map[int]selection{}, map[int]selection{}
	for name := range strings.FieldsSeq(string(list)) {
		if strings.HasPrefix(name, "Benchmark") {
			continue
		}
		if err := os.WriteFile(reached, nil, 0o600); err != nil {
			return err
		}
		found, output, needs := t.run(ctx, 0, []string{name}, usage{5 * time.Minute, 5 * time.Minute}, reachedVariable+"="+reached)
		if found != "" {
			return fmt.Errorf("%s fails without a mutant (%s):\n%s", name, found, output)
		}
		t.all = t.all.with(name, needs)
		numbers, err := os.ReadFile(reached)
		if err != nil {
			return err
		}
		for number := range strings.FieldsSeq(string(numbers)) {
			n, err := strconv.Atoi(number)
			if err != nil {
				return err
			}
			list := t.slow
			if needs.cpu < maxFast && needs.wall < 4*maxFast {
				list = t.fast
			}
			list[n] = list[n].with(name, needs)
		}
	}
	return nil
}

// find runs the tests that execute the code of a mutant. It returns the way in which they
// find the mutant, or "" if they pass. A test with random input may execute different code
// each time. Therefore, if the argument all is true, all tests run at the end.
func (t *tests) find(ctx context.Context, mutant int, all bool) string {
	selections := []selection{t.fast[mutant], t.slow[mutant]}
	if all {
		selections = append(selections, t.all)
	}
	for _, s := range selections {
		if len(s.names) == 0 {
			continue
		}
		// A mutant that makes the tests much slower counts as found. The limit of the duration
		// is long, because other programs may use the CPU.
		limit := usage{time.Minute + 10*s.needs.wall, 3*time.Second + 4*s.needs.cpu}
		if found, _, _ := t.run(ctx, mutant, s.names, limit); found != "" {
			return found
		}
	}
	return ""
}

// run runs some tests with a mutant. It returns the way in which they find the mutant, or
// "" if they pass.
func (t *tests) run(ctx context.Context, mutant int, names []string, limit usage, environment ...string) (found string, output []byte, needs usage) {
	limited, cancel := context.WithTimeout(ctx, limit.wall)
	defer cancel()
	arguments := append(slices.Clone(t.arguments), "-test.run", "^("+strings.Join(names, "|")+")$")
	// The limit of memory stops a mutant that appends without end.
	limits := fmt.Sprintf(`ulimit -v 8000000; ulimit -t %d; exec "$0" "$@"`, limit.cpu/time.Second)
	cmd := exec.CommandContext(limited, "sh", append([]string{"-c", limits, t.binary}, arguments...)...)
	cmd.Dir = t.dir
	cmd.Env = append(append(os.Environ(), variable+"="+strconv.Itoa(mutant)), environment...)
	begin := time.Now()
	output, err := cmd.CombinedOutput()
	needs = usage{wall: time.Since(begin)}
	if cmd.ProcessState != nil {
		needs.cpu = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	}
	switch {
	case err == nil:
		found = ""
	case limited.Err() != nil || needs.cpu >= limit.cpu:
		found = "time-limit"
	default:
		found = "failure"
	}
	return found, output, needs
}

// readEquivalent reads the list of mutants that behave as the original code, with the reasons.
// The list has paragraphs of four lines or more: function, line of code, change, and the reason.
func readEquivalent(path string) (map[key]string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	all := map[key]string{}
	for paragraph := range strings.SplitSeq(string(text), "\n\n") {
		paragraph = strings.TrimSpace(paragraph)
		if paragraph == "" || strings.HasPrefix(paragraph, "#") {
			continue
		}
		lines := strings.Split(paragraph, "\n")
		if len(lines) < 4 {
			return nil, fmt.Errorf("%s: a paragraph has fewer than four lines: %s", path, paragraph)
		}
		for i := range lines {
			lines[i] = strings.TrimSpace(lines[i])
		}
		k := key{lines[0], lines[1], lines[2]}
		if all[k] != "" {
			return nil, fmt.Errorf("%s: listed twice: %s", path, paragraph)
		}
		all[k] = strings.Join(lines[3:], " ")
	}
	return all, nil
}
