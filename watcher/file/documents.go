// SPDX-License-Identifier: Apache-2.0

package file

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	yaml3 "go.yaml.in/yaml/v3"
	"sigs.k8s.io/yaml"
)

// document is one document of a file as a tree without aliases. Line numbers
// in the tree count from the line before first.
type document struct {
	root  *yaml3.Node
	first int
}

// syntaxError is a place where a file is neither YAML nor JSON.
type syntaxError struct {
	line    int
	message string
}

// documents splits a file into its documents and parses them. A document with
// a syntax error does not hide those after it, unless the file is JSON. When ctx
// ends, what is returned means nothing.
func documents(ctx context.Context, name string, data []byte) ([]document, []syntaxError) {
	data = bytes.TrimPrefix(data, []byte("\ufeff"))
	if line, ok := noText(data); ok {
		return nil, []syntaxError{{line, "not UTF-8 text"}}
	}
	// JSON is read as JSON because YAML parsers do not know all its escapes.
	if strings.EqualFold(filepath.Ext(name), ".json") || json.Valid(data) {
		return jsonDocuments(ctx, data)
	}
	var docs []document
	var errs []syntaxError
	for text, first := range yamlTexts(data) {
		if ctx.Err() != nil {
			break
		}
		root, err := parseYAML(ctx, text)
		if err != nil {
			errs = append(errs, syntaxError{first + err.line, err.message})
		} else if root != nil {
			docs = append(docs, document{root, first})
		}
	}
	return docs, errs
}

// yamlTexts yields the text of each document, its "---" included, and the
// number of lines before it. A line that starts with the marker "---" starts a
// document wherever it stands: not even a quoted string may hold one.
func yamlTexts(data []byte) func(yield func([]byte, int) bool) {
	return func(yield func([]byte, int) bool) {
		first, line, start := 0, 0, 0
		for at := 0; at < len(data); line++ {
			end := len(data)
			if i := bytes.IndexByte(data[at:], '\n'); i >= 0 {
				end = at + i + 1
			}
			if at > start && isMarker(data[at:end]) && !onlyDirectives(data[start:at]) {
				if !yield(data[start:at], first) {
					return
				}
				first, start = line, at
			}
			at = end
		}
		yield(data[start:], first)
	}
}

func isMarker(line []byte) bool {
	rest, found := bytes.CutPrefix(line, []byte("---"))
	return found && (len(rest) == 0 || bytes.ContainsRune([]byte(" \t\r\n"), rune(rest[0])))
}

// onlyDirectives reports whether text is what may stand before the "---" of
// its own document: %YAML and %TAG lines, and comments.
func onlyDirectives(text []byte) bool {
	directive := false
	for line := range bytes.Lines(text) {
		line = bytes.TrimSpace(line)
		switch {
		case bytes.HasPrefix(line, []byte("%")):
			directive = true
		case len(line) > 0 && line[0] != '#':
			return false
		}
	}
	return directive
}

// parseYAML returns the tree of a document, nil if it is empty.
func parseYAML(ctx context.Context, text []byte) (*yaml3.Node, *syntaxError) {
	var doc yaml3.Node
	decoder := yaml3.NewDecoder(interruptible{bytes.NewReader(text), ctx})
	err := decoder.Decode(&doc)
	if err == io.EOF || err == nil && len(doc.Content) == 0 {
		return nil, nil
	}
	if err == nil {
		// What follows the end of the document is an error too.
		if more := decoder.Decode(&yaml3.Node{}); more != io.EOF {
			err = more
		}
	}
	if ctx.Err() != nil {
		return nil, nil
	}
	if err != nil {
		return nil, yamlError(text, err)
	}
	root := doc.Content[0]
	expansion := expansion{open: map[*yaml3.Node]bool{}, budget: maxExpansion}
	if err := expansion.resolve(&root, false); err != nil {
		return nil, err
	}
	return root, nil
}

var yamlMessage = regexp.MustCompile(`^(?:error converting YAML to JSON: )?yaml: (?:line (\d+): )?(.*)$`)

// parserMessages are those errors that the YAML libraries find in the order of
// tokens, not in a token.
var parserMessages = regexp.MustCompile(`^did not find expected (node content|key|'-' indicator|',' or '\]'|',' or '\}'|<document start>)$`)

// yamlError returns what the YAML parser says about text, with the right line.
//
// For a bad token, say a string that is not closed, the parser's line is that
// of its start, which is the one to show. For a token in the wrong place it
// counts from 0 and names the line where the surrounding block starts, which
// may be hundreds of lines away; its predecessor, which sigs.k8s.io/yaml uses,
// names the line of the token, also counting from 0.
func yamlError(text []byte, err error) *syntaxError {
	m := yamlMessage.FindStringSubmatch(err.Error())
	if m == nil {
		return &syntaxError{1, err.Error()}
	}
	message := m[2]
	line, _ := strconv.Atoi(m[1])
	if parserMessages.MatchString(message) {
		var ignored any
		if before := yaml.Unmarshal(text, &ignored); before != nil {
			if m := yamlMessage.FindStringSubmatch(before.Error()); m != nil && m[2] == message {
				line, _ = strconv.Atoi(m[1])
			}
		}
		line++
	}
	var anchor string
	if n, _ := fmt.Sscanf(message, "unknown anchor '%s", &anchor); n == 1 {
		if i := bytes.Index(text, []byte("*"+strings.TrimSuffix(anchor, "'"))); i >= 0 {
			line = 1 + bytes.Count(text[:i], []byte("\n"))
		}
	}
	// What is missing at the end is missing after the last thing there is.
	last := 1 + bytes.Count(bytes.TrimRight(text, " \t\r\n"), []byte("\n"))
	return &syntaxError{min(max(line, 1), last), message}
}

// expansion replaces aliases by what they stand for.
type expansion struct {
	open   map[*yaml3.Node]bool
	budget int
}

// maxExpansion is how many values aliases may stand for in one document. It
// stops documents that grow exponentially.
const maxExpansion = 100_000

func (x *expansion) resolve(n **yaml3.Node, aliased bool) *syntaxError {
	at := (*n).Line
	for (*n).Kind == yaml3.AliasNode {
		*n, aliased = (*n).Alias, true
	}
	if aliased {
		if x.budget--; x.budget < 0 {
			return &syntaxError{at, fmt.Sprintf("aliases stand for more than %d values", maxExpansion)}
		}
	}
	node := *n
	if x.open[node] {
		return &syntaxError{at, "alias to a value that contains it"}
	}
	if len(node.Content) == 0 {
		return nil
	}
	x.open[node] = true
	defer delete(x.open, node)
	for i := range node.Content {
		if err := x.resolve(&node.Content[i], aliased); err != nil {
			return err
		}
	}
	return nil
}

// jsonDocuments parses JSON texts, one after the other.
func jsonDocuments(ctx context.Context, data []byte) ([]document, []syntaxError) {
	r := jsonReader{data: data, dec: json.NewDecoder(interruptible{bytes.NewReader(data), ctx}), line: 1}
	r.dec.UseNumber()
	var docs []document
	for {
		root, err := r.value()
		if err == io.EOF {
			return docs, nil
		}
		if err != nil {
			return docs, []syntaxError{r.failed(err)}
		}
		docs = append(docs, document{root, 0})
	}
}

// jsonReader makes the same tree of JSON that the YAML parser makes of YAML.
type jsonReader struct {
	data []byte
	dec  *json.Decoder
	at   int64
	line int
	// depth is how many lists and objects are open.
	depth int
}

// maxJSONDepth is the depth at which encoding/json gives up as well.
const maxJSONDepth = 10_000

// advance counts lines up to offset.
func (r *jsonReader) advance(offset int64) {
	offset = min(offset, int64(len(r.data)))
	if offset > r.at {
		r.line += bytes.Count(r.data[r.at:offset], []byte("\n"))
		r.at = offset
	}
}

func (r *jsonReader) value() (*yaml3.Node, error) {
	token, err := r.dec.Token()
	if err != nil {
		return nil, err
	}
	r.advance(r.dec.InputOffset())
	n := &yaml3.Node{Kind: yaml3.ScalarNode, Line: r.line}
	switch t := token.(type) {
	case json.Delim:
		n.Kind, n.Tag = yaml3.MappingNode, "!!map"
		if t == '[' {
			n.Kind, n.Tag = yaml3.SequenceNode, "!!seq"
		}
		if r.depth++; r.depth > maxJSONDepth {
			return nil, fmt.Errorf("nested more than %d deep", maxJSONDepth)
		}
		for r.dec.More() {
			item, err := r.value()
			if err != nil {
				return nil, noEOF(err)
			}
			n.Content = append(n.Content, item)
		}
		if _, err := r.dec.Token(); err != nil {
			return nil, noEOF(err)
		}
		r.depth--
	case string:
		n.Tag, n.Value = "!!str", t
	case bool:
		n.Tag, n.Value = "!!bool", strconv.FormatBool(t)
	case json.Number:
		n.Tag, n.Value = "!!int", t.String()
		if strings.ContainsAny(n.Value, ".eE") {
			n.Tag = "!!float"
		}
	default:
		n.Tag, n.Value = "!!null", "null"
	}
	return n, nil
}

// failed returns err with its line.
func (r *jsonReader) failed(err error) syntaxError {
	var syntax *json.SyntaxError
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF):
		r.advance(int64(len(bytes.TrimRight(r.data, " \t\r\n"))))
		return syntaxError{r.line, "the JSON text ends too early"}
	case errors.As(err, &syntax):
		// The offset is that after the bad character; but for tokens in the
		// wrong place, that before the blanks in front of it.
		at := max(syntax.Offset-1, 0)
		if !strings.HasSuffix(err.Error(), "in string literal") {
			for at < int64(len(r.data)) && strings.IndexByte(" \t\r\n", r.data[at]) >= 0 {
				at++
			}
		}
		r.advance(at)
	}
	return syntaxError{r.line, err.Error()}
}

func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
