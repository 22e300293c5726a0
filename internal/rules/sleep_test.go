// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// maxSleeps is the number of sleeps in tests. It may only become smaller: a test that sleeps
// is slow, or fails on a busy machine. Wait for progress instead, or use testing/synctest.
//
// Two kinds of calls of time.Sleep do not count. Those in a file that imports
// testing/synctest usually take no time. Those between the rounds of a loop wait for progress:
//
//	for deadline := time.Now().Add(time.Minute); !done(); time.Sleep(time.Millisecond) {
const maxSleeps = 56

// TestSleeps counts the sleeps in tests.
func TestSleeps(t *testing.T) {
	t.Chdir(root)
	var sleeps []string
	err := filepath.WalkDir(".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(name, "_test.go") {
			return err
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, name, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		if slices.ContainsFunc(file.Imports, func(s *ast.ImportSpec) bool { return s.Path.Value == `"testing/synctest"` }) {
			return nil
		}
		waits := map[ast.Expr]bool{}
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.ForStmt:
				if post, ok := n.Post.(*ast.ExprStmt); ok {
					waits[post.X] = true
				}
			case *ast.CallExpr:
				if isSleep(n) && !waits[n] {
					sleeps = append(sleeps, set.Position(n.Pos()).String())
				}
			}
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if n := len(sleeps); n > maxSleeps {
		t.Errorf("%d sleeps in tests, at most %d are allowed:\n%s", n, maxSleeps, strings.Join(sleeps, "\n"))
	} else if n < maxSleeps {
		t.Logf("%d sleeps in tests: set maxSleeps to this number", n)
	}
}

// isSleep reports whether a call has the form time.Sleep(...).
func isSleep(call *ast.CallExpr) bool {
	selector, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || selector.Sel.Name != "Sleep" {
		return false
	}
	pkg, ok := selector.X.(*ast.Ident)
	return ok && pkg.Name == "time"
}
