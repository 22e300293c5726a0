// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"go/ast"
	"go/constant"
	"go/token"
	"go/types"
	"slices"
	"strings"

	"golang.org/x/tools/go/packages"
)

// mutant is a small fault in the code of a package.
type mutant struct {
	pos token.Position
	// key identifies the mutant by its function, its line without a comment, and its change.
	// So it stays the same when other lines and comments change.
	key key
}

type key struct {
	// function has the form "sink.New" or "sink.Driver.Sync".
	function string
	line     string
	change   string
}

// edit inserts text at an offset of a file.
type edit struct {
	offset int
	text   string
}

// mutator puts all mutants of a package into its files. The variable mutant in the changed
// code has the number of the mutant that is active, or 0 for the original code. So the
// tests need to be compiled only once.
type mutator struct {
	pkg     *packages.Package
	mutants []mutant // the mutant at index i has the number i+1

	// The state for one file. Prefixes are in the order of the nodes, and outer nodes come
	// first. Suffixes are collected in the same order and then reversed, because suffixes
	// of outer nodes must come last.
	file               *token.File
	text               []byte
	function           string
	prefixes, suffixes []edit
	// negated has the expressions that are a condition or an operand of && or ||.
	negated map[ast.Expr]bool
}

// mutate returns the text of a file with all mutants.
func (m *mutator) mutate(file *ast.File, text []byte) []byte {
	m.file, m.text = m.pkg.Fset.File(file.Pos()), text
	m.prefixes, m.suffixes, m.negated = nil, nil, map[ast.Expr]bool{}
	for _, decl := range file.Decls {
		switch d := decl.(type) {
		case *ast.FuncDecl:
			if d.Body != nil {
				object := m.pkg.TypesInfo.Defs[d.Name].(*types.Func)
				m.function = m.pkg.Name + "." + d.Name.Name
				if d.Recv != nil {
					m.function = m.pkg.Name + "." + receiver(d.Recv.List[0].Type) + "." + d.Name.Name
				}
				m.walk(d.Body, object.Signature().Results())
			}
		case *ast.GenDecl:
			if d.Tok == token.VAR {
				m.function = m.pkg.Name
				m.walk(d, nil)
			}
		}
	}
	slices.Reverse(m.suffixes)
	edits := append(slices.Clone(m.suffixes), m.prefixes...) // at one offset, suffixes come first
	slices.SortStableFunc(edits, func(a, b edit) int { return a.offset - b.offset })
	var out []byte
	last := 0
	for _, e := range edits {
		out = append(append(out, text[last:e.offset]...), e.text...)
		last = e.offset
	}
	return append(out, text[last:]...)
}

// receiver returns the name of a receiver's type.
func receiver(e ast.Expr) string {
	for {
		switch t := e.(type) {
		case *ast.StarExpr:
			e = t.X
		case *ast.IndexExpr:
			e = t.X
		case *ast.IndexListExpr:
			e = t.X
		case *ast.Ident:
			return t.Name
		default:
			return "?"
		}
	}
}

// walk adds the mutants in n. The function that contains n has the given results.
func (m *mutator) walk(n ast.Node, results *types.Tuple) {
	ast.Inspect(n, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncLit:
			m.walk(n.Body, m.pkg.TypesInfo.TypeOf(n).(*types.Signature).Results())
			return false
		case *ast.BlockStmt:
			m.statements(n.List, results)
		case *ast.CaseClause:
			m.statements(n.Body, results)
		case *ast.CommClause:
			m.statements(n.Body, results)
		case *ast.IfStmt:
			if m.onlyLogs(n) {
				return false
			}
			m.condition(n.Cond)
		case *ast.ForStmt:
			if n.Cond != nil {
				m.condition(n.Cond)
			}
		case *ast.SwitchStmt:
			if n.Tag == nil {
				for _, clause := range n.Body.List {
					for _, e := range clause.(*ast.CaseClause).List {
						m.condition(e)
					}
				}
			}
		case ast.Expr:
			m.expression(n)
		}
		return true
	})
}

// condition prepares the negation of e, unless e consists of conditions.
func (m *mutator) condition(e ast.Expr) {
	if b, ok := ast.Unparen(e).(*ast.BinaryExpr); !ok || b.Op != token.LAND && b.Op != token.LOR {
		m.negated[ast.Unparen(e)] = true
	}
}

var boundaries = map[token.Token]token.Token{
	token.LSS: token.LEQ, token.LEQ: token.LSS, token.GTR: token.GEQ, token.GEQ: token.GTR,
	token.ADD: token.SUB, token.SUB: token.ADD,
}

func (m *mutator) expression(e ast.Expr) {
	if tv, ok := m.pkg.TypesInfo.Types[e]; !ok || tv.Value != nil || !tv.IsValue() {
		return
	}
	b, binary := e.(*ast.BinaryExpr)
	if m.negated[e] || binary && (b.Op == token.EQL || b.Op == token.NEQ) {
		change := "!(" + m.source(e) + ")"
		if binary && b.Op == token.EQL {
			change = m.source(b.X) + " != " + m.source(b.Y)
		} else if binary && b.Op == token.NEQ {
			change = m.source(b.X) + " == " + m.source(b.Y)
		}
		n := m.add(e, change)
		m.around(e, fmt.Sprintf("(mutantIs(%d) != (", n), "))")
	}
	if !binary {
		return
	}
	if b.Op == token.LAND || b.Op == token.LOR {
		for _, operand := range []ast.Expr{b.X, b.Y} {
			if o, ok := ast.Unparen(operand).(*ast.BinaryExpr); ok && o.Op == b.Op {
				continue // its operands are operands of the whole expression, too
			}
			if b.Op == token.LAND {
				n := m.add(operand, "true instead of "+m.source(operand))
				m.around(operand, fmt.Sprintf("(mutantIs(%d) || (", n), "))")
			} else {
				n := m.add(operand, "false instead of "+m.source(operand))
				m.around(operand, fmt.Sprintf("(!mutantIs(%d) && (", n), "))")
			}
		}
		return
	}
	other, ok := boundaries[b.Op]
	basic, number := m.pkg.TypesInfo.TypeOf(b.X).Underlying().(*types.Basic)
	if !ok || !number || basic.Info()&types.IsNumeric == 0 {
		return
	}
	change := m.source(b.X) + " " + other.String() + " " + m.source(b.Y)
	n := m.add(b, change)
	if b.Op == token.ADD || b.Op == token.SUB {
		m.around(b, fmt.Sprintf("mutantValue(%d, %s, ", n, change), ")")
	} else {
		m.around(b, fmt.Sprintf("(mutantIs(%d) && (%s) || !mutantIs(%[1]d) && (", n, change), "))")
	}
}

func (m *mutator) statements(list []ast.Stmt, results *types.Tuple) {
	for _, s := range list {
		switch s := s.(type) {
		case *ast.ReturnStmt:
			m.returned(s, results)
			continue
		case *ast.AssignStmt:
			if ident, ok := s.Lhs[0].(*ast.Ident); s.Tok == token.DEFINE || ok && ident.Name == "_" && len(s.Lhs) == 1 {
				continue
			}
		case *ast.ExprStmt:
			if m.isSupport(s.X) {
				continue
			}
		case *ast.IncDecStmt, *ast.SendStmt:
		default:
			continue
		}
		n := m.add(s, "without "+m.source(s))
		m.around(s, fmt.Sprintf("if !mutantIs(%d) { ", n), " }")
	}
}

// onlyLogs reports whether s only writes to the log.
func (m *mutator) onlyLogs(s *ast.IfStmt) bool {
	for _, statement := range s.Body.List {
		call, ok := statement.(*ast.ExprStmt)
		if !ok || !m.isSupport(call.X) {
			return false
		}
	}
	calls := false
	ast.Inspect(s.Cond, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		calls = calls || ok && m.source(call.Fun) != "len"
		return true
	})
	return s.Init == nil && s.Else == nil && !calls
}

// isSupport reports whether e is a call for the log, a lock, or a panic. Tests do not test the
// log. The race detector tests the locks. Without a panic, some functions do not compile.
func (m *mutator) isSupport(e ast.Expr) bool {
	call, ok := e.(*ast.CallExpr)
	if !ok {
		return false
	}
	switch f := ast.Unparen(call.Fun).(type) {
	case *ast.Ident:
		return f.Name == "panic"
	case *ast.SelectorExpr:
		if o := m.pkg.TypesInfo.Uses[f.Sel]; o != nil && o.Pkg() != nil {
			switch o.Pkg().Path() {
			case "github.com/go-logr/logr", "k8s.io/klog/v2", "sync":
				return true
			}
		}
	}
	return false
}

// returned adds a mutant for each result of s, except where the result is nil.
func (m *mutator) returned(s *ast.ReturnStmt, results *types.Tuple) {
	text := make([]string, len(s.Results))
	for i, e := range s.Results {
		text[i] = m.source(e)
	}
	add := func(values []string) {
		change := "return " + strings.Join(values, ", ")
		n := m.add(s, strings.ReplaceAll(change, "mutantZero", "zero of "))
		m.prefixes = append(m.prefixes, edit{m.file.Offset(s.Pos()), fmt.Sprintf("if mutantIs(%d) { %s }; ", n, change)})
	}
	if len(s.Results) == 1 && results.Len() > 1 {
		add([]string{fmt.Sprintf("mutantZero%d(%s)", results.Len(), text[0])})
		return
	}
	for i, e := range s.Results {
		tv := m.pkg.TypesInfo.Types[e]
		basic, isBasic := tv.Type.Underlying().(*types.Basic)
		value := "mutantZero(" + text[i] + ")"
		switch {
		case tv.IsNil() || isEmpty(e):
			continue
		case isBasic && basic.Info()&types.IsBoolean != 0:
			if b, ok := ast.Unparen(e).(*ast.BinaryExpr); ok && (b.Op == token.LAND || b.Op == token.LOR || b.Op == token.EQL || b.Op == token.NEQ) {
				continue // has its own mutants
			}
			value = "!(" + text[i] + ")"
		case tv.Value != nil && tv.Value.Kind() == constant.String:
			value = `""`
			if constant.StringVal(tv.Value) == "" {
				value = `"mutant"`
			}
		case tv.Value != nil:
			value = "0"
			if constant.Sign(tv.Value) == 0 {
				value = "1"
			}
		}
		values := slices.Clone(text)
		values[i] = value
		add(values)
	}
}

// isEmpty reports whether e is a composite literal without elements.
func isEmpty(e ast.Expr) bool {
	c, ok := ast.Unparen(e).(*ast.CompositeLit)
	return ok && len(c.Elts) == 0
}

// add adds a mutant at n and returns its number.
func (m *mutator) add(n ast.Node, change string) int {
	pos := m.file.Position(n.Pos())
	begin := m.file.Offset(m.file.LineStart(pos.Line))
	line, _, _ := strings.Cut(string(m.text[begin:]), "\n")
	line, _, _ = strings.Cut(line, " // ")
	k := key{m.function, strings.TrimSpace(line), strings.Join(strings.Fields(change), " ")}
	same := 1
	for _, other := range m.mutants {
		if other.key.function == k.function && other.key.line == k.line && (other.key.change == k.change || strings.HasPrefix(other.key.change, k.change+" (number ")) {
			same++
		}
	}
	if same > 1 {
		k.change += fmt.Sprintf(" (number %d)", same)
	}
	m.mutants = append(m.mutants, mutant{pos, k})
	return len(m.mutants)
}

func (m *mutator) source(n ast.Node) string {
	return string(m.text[m.file.Offset(n.Pos()):m.file.Offset(n.End())])
}

func (m *mutator) around(n ast.Node, prefix, suffix string) {
	m.prefixes = append(m.prefixes, edit{m.file.Offset(n.Pos()), prefix})
	m.suffixes = append(m.suffixes, edit{m.file.Offset(n.End()), suffix})
}

// support is the text of a file for each mutated package.
const support = `package %s

import (
	mutantos "os"
	mutantstrconv "strconv"
	mutantatomic "sync/atomic"
)

var mutant, _ = mutantstrconv.Atoi(mutantos.Getenv("` + variable + `"))

// mutantReached gets a line for each mutant whose code is executed.
var mutantReached, _ = mutantos.OpenFile(mutantos.Getenv("` + reachedVariable + `"), mutantos.O_WRONLY|mutantos.O_APPEND, 0)

var mutantNoted [%d]mutantatomic.Bool

func mutantIs(n int) bool {
	if mutantReached != nil && !mutantNoted[n].Swap(true) {
		mutantReached.WriteString(mutantstrconv.Itoa(n) + "\n")
	}
	return mutant == n
}

func mutantValue[T any](n int, changed, original T) T {
	if mutantIs(n) {
		return changed
	}
	return original
}

func mutantZero[T any](T) (zero T) { return }

func mutantZero2[A, B any](A, B) (a A, b B) { return }

func mutantZero3[A, B, C any](A, B, C) (a A, b B, c C) { return }
`

// variable is the environment variable that selects the mutant.
const variable = "KPNG_MUTANT"

// reachedVariable is the environment variable with the name of a file. The tests write a line
// to it for each mutant whose code they execute.
const reachedVariable = "KPNG_MUTANTS_REACHED"
