// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// TestEveryRuleHasItsTest compares docs/reference/semantics.md with the code. If the last column of
// a table is "Test", each row of the table must name a test or the conformance kit in
// this column. Every function, test and case that a row names must exist.
func TestEveryRuleHasItsTest(t *testing.T) {
	code := readCode(t, "..")
	text, err := os.ReadFile("../docs/reference/semantics.md")
	if err != nil {
		t.Fatal(err)
	}
	quoted := regexp.MustCompile("`([^`]+)`")
	var header []string // header of the current table; nil if its last column is not "Test"
	rules := 0
	for n, line := range strings.Split(string(text), "\n") {
		cells := strings.Split(strings.Trim(line, "| "), " | ")
		switch {
		case !strings.HasPrefix(line, "|"):
			header = nil
			continue
		case cells[len(cells)-1] == "Test":
			header = cells
			continue
		case header == nil || strings.HasPrefix(line, "|---"):
			continue
		case len(cells) != len(header):
			t.Errorf("line %d: %d cells, want %d", n+1, len(cells), len(header))
			continue
		}
		rules++
		if header[1] == "Function" {
			for _, name := range quoted.FindAllStringSubmatch(cells[1], -1) {
				if !code.hasFunction(name[1]) {
					t.Errorf("line %d: function %s does not exist", n+1, name[1])
				}
			}
		}
		last := cells[len(cells)-1]
		tests := quoted.FindAllStringSubmatch(last, -1)
		if len(tests) == 0 && last != "*Conformance*" {
			t.Errorf("line %d: no test: %s", n+1, last)
		}
		for _, name := range tests {
			if !code.hasTest(name[1]) {
				t.Errorf("line %d: test %s does not exist", n+1, name[1])
			}
		}
	}
	if rules < 80 {
		t.Errorf("found only %d rules", rules)
	}
}

// code holds the names that docs/reference/semantics.md may use.
type code struct {
	functions map[string]bool            // package.function, package.Type.method and package.Type
	tests     map[string]map[string]bool // package.test → the strings in the test, which include the names of cases
}

func (c *code) hasFunction(name string) bool {
	return c.functions[name] || c.functions["nodeview."+name]
}

func (c *code) hasTest(name string) bool {
	// A slash before the dot belongs to the package path. A slash after the dot separates
	// the test and its case.
	dot := strings.Index(name, ".")
	test, subtest, _ := strings.Cut(name[dot+1:], "/")
	cases, ok := c.tests[name[:dot+1]+test]
	return dot > 0 && ok && (subtest == "" || cases[subtest])
}

// readCode parses all packages of the module at root.
func readCode(t *testing.T, root string) *code {
	c := &code{map[string]bool{}, map[string]map[string]bool{}}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			// Skip hidden folders, and test/, which is another module.
			if name := d.Name(); path != root && (strings.HasPrefix(name, ".") || name == "testdata" || path == filepath.Join(root, "test")) {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") {
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		pkg, err := filepath.Rel(root, filepath.Dir(path))
		if err != nil {
			return err
		}
		c.read(filepath.ToSlash(pkg), file, strings.HasSuffix(path, "_test.go"))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (c *code) read(pkg string, file *ast.File, test bool) {
	for _, decl := range file.Decls {
		switch d := decl.(type) {
		case *ast.FuncDecl:
			if test {
				c.tests[pkg+"."+d.Name.Name] = stringsIn(d)
			} else {
				c.functions[pkg+"."+receiver(d)+d.Name.Name] = true
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				if s, ok := spec.(*ast.TypeSpec); ok {
					c.functions[pkg+"."+s.Name.Name] = true
				}
			}
		}
	}
}

// receiver returns "Type." for a method of Type, and "" for a function.
func receiver(d *ast.FuncDecl) string {
	if d.Recv == nil {
		return ""
	}
	typ := d.Recv.List[0].Type
	if star, ok := typ.(*ast.StarExpr); ok {
		typ = star.X
	}
	if name, ok := typ.(*ast.Ident); ok {
		return name.Name + "."
	}
	return ""
}

func stringsIn(n ast.Node) map[string]bool {
	found := map[string]bool{}
	ast.Inspect(n, func(n ast.Node) bool {
		if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
			if s, err := strconv.Unquote(lit.Value); err == nil {
				found[s] = true
			}
		}
		return true
	})
	return found
}
