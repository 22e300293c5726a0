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

// TestEveryRuleHasItsTest compares docs/reference/semantics.md with the list of rules, and this
// list with the code. Each item of a list in the page, and each row of the table of
// differences, is a rule. It must be in the list of rules, and must have an existing function and
// an existing test.
func TestEveryRuleHasItsTest(t *testing.T) {
	code := readCode(t, "..")
	page, err := os.ReadFile("../docs/reference/semantics.md")
	if err != nil {
		t.Fatal(err)
	}
	found := rulesOf(string(page))
	known := 0
	for _, s := range rules {
		known += len(s.rules)
		for i, r := range s.rules {
			if i >= len(found[s.section]) || !strings.HasPrefix(found[s.section][i], r.begins) {
				t.Fatalf("section %q: rule %d begins with %q in rules_test.go, but the page has the rules:\n%s",
					s.section, i+1, r.begins, strings.Join(found[s.section], "\n"))
			}
			functions := strings.Fields(r.functions)
			if len(functions) == 0 && s.section != "Where kpng differs from kube-proxy" {
				t.Errorf("section %q: rule %q has no function", s.section, r.begins)
			}
			for _, name := range functions {
				if !code.hasFunction(name) {
					t.Errorf("section %q: rule %q: function %s does not exist", s.section, r.begins, name)
				}
			}
			if len(r.tests) == 0 {
				t.Errorf("section %q: rule %q has no test", s.section, r.begins)
			}
			for _, name := range r.tests {
				if !code.hasTest(name) {
					t.Errorf("section %q: rule %q: test %s does not exist", s.section, r.begins, name)
				}
			}
		}
		if n := len(found[s.section]); n != len(s.rules) {
			t.Errorf("section %q has %d rules, but rules_test.go has %d", s.section, n, len(s.rules))
		}
		delete(found, s.section)
	}
	for section, texts := range found {
		t.Errorf("rules_test.go lacks the rules of section %q: %q", section, texts)
	}
	if known < 80 {
		t.Errorf("found only %d rules", known)
	}
}

// rulesOf returns the rules of a page by section, each as one line without marks of Markdown.
func rulesOf(page string) map[string][]string {
	all := map[string][]string{}
	section := ""
	inItem, differences := false, false
	plain := strings.NewReplacer("`", "", "*", "")
	link := regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
	for line := range strings.Lines(page) {
		line = strings.TrimSuffix(line, "\n")
		item, begins := strings.CutPrefix(line, "* ")
		rest, continues := strings.CutPrefix(line, "  ")
		switch {
		case strings.HasPrefix(line, "#"):
			section = strings.TrimLeft(line, "# ")
		case begins:
			all[section] = append(all[section], item)
		case continues && inItem:
			all[section][len(all[section])-1] += " " + rest
		case strings.HasPrefix(line, "| Where |"):
			differences = true
		case strings.HasPrefix(line, "|---"):
		case strings.HasPrefix(line, "|") && differences:
			cell, _, _ := strings.Cut(strings.TrimPrefix(line, "| "), " | ")
			all[section] = append(all[section], cell)
		default:
			differences = false
		}
		inItem = begins || continues && inItem
	}
	for _, texts := range all {
		for i := range texts {
			texts[i] = plain.Replace(link.ReplaceAllString(texts[i], "$1"))
		}
	}
	return all
}

// code holds the names that the list of rules may use.
type code struct {
	functions map[string]bool            // package.function, package.Type.method and package.Type
	tests     map[string]map[string]bool // package.test → the strings in the test, which include the names of cases
	cases     map[string]bool            // of the conformance kit
}

func (c *code) hasFunction(name string) bool {
	return c.functions[name] || c.functions["nodeview."+name]
}

func (c *code) hasTest(name string) bool {
	if name, ok := strings.CutPrefix(name, "conformance/"); ok {
		return c.cases[name]
	}
	// A slash before the dot belongs to the package path. A slash after the dot separates
	// the test and its case.
	dot := strings.Index(name, ".")
	test, subtest, _ := strings.Cut(name[dot+1:], "/")
	cases, ok := c.tests[name[:dot+1]+test]
	return dot > 0 && ok && (subtest == "" || cases[subtest])
}

// readCode parses all packages of the module at root.
func readCode(t *testing.T, root string) *code {
	c := &code{map[string]bool{}, map[string]map[string]bool{}, map[string]bool{}}
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
		if pkg == "conformance" && strings.HasPrefix(d.Name(), "cases_") {
			c.readCases(file)
		}
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

// readCases adds the names of the cases in a file of the conformance kit.
func (c *code) readCases(file *ast.File) {
	ast.Inspect(file, func(n ast.Node) bool {
		if field, ok := n.(*ast.KeyValueExpr); ok {
			if key, ok := field.Key.(*ast.Ident); ok && key.Name == "name" {
				for name := range stringsIn(field.Value) {
					c.cases[name] = true
				}
			}
		}
		return true
	})
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
