// SPDX-License-Identifier: Apache-2.0

package file

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v2"
	kjson "sigs.k8s.io/json"
)

// jsonDocuments yields, for each JSON document, its line number and its text or an error.
func jsonDocuments(data []byte, yield func(int, []byte, error) bool) {
	decoder := json.NewDecoder(bytes.NewReader(data))
	line, counted := 1, 0
	for more := true; more; {
		var document json.RawMessage
		err := decoder.Decode(&document)
		at := int(decoder.InputOffset()) - len(document)
		if syntax := new(json.SyntaxError); errors.As(err, &syntax) {
			at = int(syntax.Offset) - 1 // Offset is the number of bytes up to and including the invalid byte
		}
		line, counted = line+bytes.Count(data[counted:at], []byte("\n")), at
		more = err != io.EOF && yield(line, document, err) && err == nil
	}
}

var (
	// yamlMarker matches a line that starts a document. YAML forbids such lines even in
	// quoted strings.
	yamlMarker = regexp.MustCompile(`\n---([ \t\r\n]|$)`)
	yamlLine   = regexp.MustCompile(`\bline \d+`)
)

// yamlDocuments is like jsonDocuments, but converts the documents from YAML to JSON.
func yamlDocuments(data []byte, yield func(int, []byte, error) bool) {
	for line := 1; len(data) > 0; {
		// The decoder ends at the first error. So decode each document separately.
		text := data
		if marker := yamlMarker.FindIndex(data); marker != nil && data[0] != '%' {
			text = data[:marker[0]+1]
		}
		decoder := yaml.NewDecoder(bytes.NewReader(text))
		decoder.SetStrict(true)
		for more := true; more; {
			var tree any
			var document []byte
			err := decoder.Decode(&tree)
			if err == io.EOF {
				break
			} else if err == nil {
				if tree, err = withTextKeys(tree); err == nil {
					document, err = json.Marshal(tree)
				}
			} else {
				message := strings.ReplaceAll(err.Error(), "\n ", "")
				// In errors with this text, the decoder counts lines from 0.
				first := line - 1 + strings.Count(message, "did not find expected ")
				err = errors.New(yamlLine.ReplaceAllStringFunc(message, func(s string) string {
					n, _ := strconv.Atoi(s[len("line "):])
					return fmt.Sprintf("line %d", first+n)
				}))
			}
			if !yield(line, document, err) {
				return
			}
			more = err == nil
		}
		line += bytes.Count(text, []byte("\n"))
		data = data[len(text):]
	}
}

// withTextKeys converts all keys of a YAML tree to strings, because JSON has no other
// keys. It returns an error if two keys become equal, or if a key is not a scalar.
func withTextKeys(tree any) (_ any, err error) {
	switch t := tree.(type) {
	case []any:
		for i := range t {
			if t[i], err = withTextKeys(t[i]); err != nil {
				return nil, err
			}
		}
	case map[any]any:
		m := make(map[string]any, len(t))
		for key, value := range t {
			switch key.(type) {
			case string, bool, int, int64, uint64, float64:
			default:
				return nil, fmt.Errorf("key %v is not a string", key)
			}
			text := fmt.Sprint(key)
			if _, twice := m[text]; twice {
				return nil, fmt.Errorf("key %q occurs twice", text)
			}
			if m[text], err = withTextKeys(value); err != nil {
				return nil, err
			}
		}
		return m, nil
	}
	return tree, nil
}

// decode decodes JSON into object, a pointer to a struct. The result wrong has an error
// for each value of the wrong type, but at most limit+1 errors. If wrong is empty, the
// result strict has the errors for unknown and duplicate fields.
func decode(data []byte, object any, limit int) (wrong, strict []error) {
	for {
		strict, err := kjson.UnmarshalStrict(data, object)
		if err == nil {
			return wrong, strict
		}
		misfit := new(json.UnmarshalTypeError)
		_ = errors.As(err, &misfit) // for an error of another type, misfit.Offset stays 0, so find returns an empty path
		path, start, end := find(data, misfit.Offset)
		if path == "" || len(wrong) >= limit {
			return append(wrong, err), nil
		}
		hint := map[bool]string{true: " (in quotes)"}[misfit.Type.Kind() == reflect.String]
		wrong = append(wrong, fmt.Errorf("%s: %.50s is not a value of type %s%s", path, data[start:end], misfit.Type.Kind(), hint))
		// UnmarshalStrict ends at the first wrong value. To find the next wrong value, replace
		// this value by null in data.
		data = slices.Concat(data[:start], []byte("null"), data[end:])
	}
}

// find searches a valid JSON text for the value whose first token ends at offset. It
// returns the value's path, start offset and end offset, or an empty path if none exists.
func find(data []byte, offset int64) (found string, start, end int64) {
	decoder := json.NewDecoder(bytes.NewReader(data))
	var value func(path string)
	value = func(path string) {
		before := decoder.InputOffset()
		token, _ := decoder.Token()
		head := decoder.InputOffset()
		switch token {
		case json.Delim('{'):
			for decoder.More() {
				key, _ := decoder.Token()
				value(strings.TrimPrefix(fmt.Sprintf("%s.%s", path, key), "."))
			}
			decoder.Token() // the closing brace
		case json.Delim('['):
			for i := 0; decoder.More(); i++ {
				value(fmt.Sprintf("%s[%d]", path, i))
			}
			decoder.Token()
		}
		if head == offset {
			found, end = path, decoder.InputOffset()
			start = head - int64(len(bytes.TrimLeft(data[before:head], " \t\r\n,:")))
		}
	}
	value("")
	return found, start, end
}
