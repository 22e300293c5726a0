// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const code = `package small

import "errors"

func Small(n int) (bool, error) {
	if n < 0 || n == 7 {
		return false, errors.New("negative or seven")
	}
	total := 0
	total += n
	return total < 10, nil
}
`

const codeTest = `package small

import "testing"

func TestSmall(t *testing.T) {
	for n, want := range map[int]bool{0: true, 9: true, 11: false} {
		if got, err := Small(n); got != want || err != nil {
			t.Error(n, got, err)
		}
	}
	if got, err := Small(-1); got || err == nil {
		t.Error(got, err)
	}
}
`

// TestEquivalentMutantsExist finds paragraphs of equivalent.txt whose code has changed.
func TestEquivalentMutantsExist(t *testing.T) {
	equivalent, err := readEquivalent("equivalent.txt")
	if err != nil {
		t.Fatal(err)
	}
	folders := map[string]bool{}
	for k := range equivalent {
		name, _, _ := strings.Cut(k.function, ".")
		folders["./"+name] = true
	}
	pkgs, err := load(t.Context(), "../..", slices.Collect(maps.Keys(folders)))
	if err != nil {
		t.Fatal(err)
	}
	for _, pkg := range pkgs {
		m := mutator{pkg: pkg}
		for i, file := range pkg.Syntax {
			text, err := os.ReadFile(pkg.CompiledGoFiles[i])
			if err != nil {
				t.Fatal(err)
			}
			m.mutate(file, text)
		}
		for _, mutant := range m.mutants {
			delete(equivalent, mutant.key)
		}
	}
	for k := range equivalent {
		t.Errorf("no mutant: %s\n\t%s\n\t%s", k.function, k.line, k.change)
	}
}

// TestSmallPackage runs the program in a module whose tests lack the numbers 7 and 10.
func TestSmallPackage(t *testing.T) {
	root := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("go.mod", "module example.com/small\n\ngo 1.26\n")
	write("small/small.go", code)
	write("small/small_test.go", codeTest)
	write("tools/mutate/equivalent.txt", "# A comment.\n")
	mutate := func() (string, error) {
		var out strings.Builder
		err := run(context.Background(), &out, options{root: root, part: "1/1", jobs: 2}, []string{"./small"})
		return strings.ReplaceAll(out.String(), "=== ATTR  ", ""), err
	}

	got, err := mutate()
	if err == nil || !strings.Contains(err.Error(), "2 mutants survived") {
		t.Errorf("error %v", err)
	}
	const seven = "small.Small\n\tif n < 0 || n == 7 {\n\tfalse instead of n == 7\n"
	const ten = "small.Small\n\treturn total < 10, nil\n\ttotal <= 10\n"
	for _, want := range []string{"survived: small/small.go:6: " + seven, "survived: small/small.go:11: " + ten} {
		if !strings.Contains(got, want) {
			t.Errorf("the output lacks %q:\n%s", want, got)
		}
	}
	const counts = "small generated 9\nsmall killed 7\nsmall time-limit 0\nsmall equivalent 0\nsmall survived 2\nsmall not-run 0\n"
	if !strings.HasSuffix(got, counts) {
		t.Errorf("the output does not end with\n%s:\n%s", counts, got)
	}

	write("tools/mutate/equivalent.txt", seven+"Seven is not tested.\n\n"+ten+"Ten is not\ntested.\n")
	got, err = mutate()
	if want := strings.NewReplacer("equivalent 0", "equivalent 2", "survived 2", "survived 0").Replace(counts); got != want || err != nil {
		t.Errorf("with two equivalents: error %v, output %q, want %q", err, got, want)
	}

	// The list is wrong about a mutant that a test finds, and about a mutant that does not
	// exist.
	write("tools/mutate/equivalent.txt", seven+"Seven.\n\n"+ten+"Ten.\n\nsmall.Small\ntotal += n\nwithout total += n\nWrong.\n\nsmall.Small\nno line\nno change\nWrong.\n")
	_, err = mutate()
	for _, want := range []string{"small/small.go:10: small.Small\n\ttotal += n", "no mutant: small.Small\n\tno line"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one that contains %q", err, want)
		}
	}

	write("small/small_test.go", strings.ReplaceAll(codeTest, "0: true", "0: false"))
	if _, err := mutate(); err == nil || !strings.Contains(err.Error(), "TestSmall fails without a mutant") {
		t.Errorf("with a test that fails: error %v", err)
	}
}
