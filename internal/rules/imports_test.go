// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// TestImportsAreGrouped checks that a blank line separates imports of the standard
// library from all other imports.
func TestImportsAreGrouped(t *testing.T) {
	t.Chdir(root)
	files := 0
	err := filepath.WalkDir(".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(name, ".go") {
			return err
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, name, nil, parser.ImportsOnly|parser.ParseComments)
		if err != nil || ast.IsGenerated(file) {
			return err
		}
		files++
		group, end := 0, 0
		for i, spec := range file.Imports {
			path, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			before := group
			group = 0
			if first, _, _ := strings.Cut(path, "/"); strings.Contains(first, ".") {
				group = 1
			}
			start := spec.Pos()
			if spec.Doc != nil {
				start = spec.Doc.Pos()
			}
			blank := set.Position(start).Line > end+1
			if i > 0 && path != "C" && (group < before || (group > before) != blank) {
				t.Errorf("%s: import %q is in the wrong group", set.Position(spec.Pos()), path)
			}
			end = set.Position(spec.End()).Line
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if files == 0 {
		t.Error("no files found")
	}
}
