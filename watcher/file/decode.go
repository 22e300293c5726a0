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

// jsonDocuments yields each document of a file, or an error, with the line where it
// begins.
func jsonDocuments(data []byte, yield func(int, []byte, error) bool) {
	decoder := json.NewDecoder(bytes.NewReader(data))
	line, counted := 1, 0
	for more := true; more; {
		var document json.RawMessage
		err := decoder.Decode(&document)
		at := int(decoder.InputOffset()) - len(document)
		if syntax := new(json.SyntaxError); errors.As(err, &syntax) {
			at = int(syntax.Offset) - 1 // Offset includes the byte with the error
		}
		line, counted = line+bytes.Count(data[counted:at], []byte("\n")), at
		more = err != io.EOF && yield(line, document, err) && err == nil
	}
}

var (
	// yamlMarker begins a document wherever it occurs. Even a quoted string must not contain
	// it.
	yamlMarker = regexp.MustCompile(`\n---([ \t\r\n]|$)`)
	yamlLine   = regexp.MustCompile(`\bline \d+`)
)

// yamlDocuments yields the documents of a YAML file like jsonDocuments, converted to
// JSON.
func yamlDocuments(data []byte, yield func(int, []byte, error) bool) {
	for line := 1; len(data) > 0; {
		// The parser stops at the first error, so it receives one document at a time.
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
				document, err = json.Marshal(withTextKeys(tree))
			} else {
				message := strings.ReplaceAll(err.Error(), "\n ", "")
				// For some errors the parser counts lines from 0.
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

// withTextKeys returns a YAML tree with all keys converted to text, as in JSON.
func withTextKeys(tree any) any {
	switch t := tree.(type) {
	case []any:
		for i := range t {
			t[i] = withTextKeys(t[i])
		}
	case map[any]any:
		m := make(map[string]any, len(t))
		for key, value := range t {
			m[fmt.Sprint(key)] = withTextKeys(value)
		}
		return m
	}
	return tree
}

// decode decodes a JSON object into object, a pointer to a struct. It returns up to limit
// values of the wrong type or, if there are none, the unknown and duplicate fields.
func decode(data []byte, object any, limit int) (wrong, strict []error) {
	for {
		strict, err := kjson.UnmarshalStrict(data, object)
		if err == nil {
			return wrong, strict
		}
		misfit := new(json.UnmarshalTypeError)
		_ = errors.As(err, &misfit) // any other error has no offset, so no path is found
		path, start, end := find(data, misfit.Offset)
		if path == "" || len(wrong) >= limit {
			return append(wrong, err), nil
		}
		hint := map[bool]string{true: " (in quotes)"}[misfit.Type.Kind() == reflect.String]
		wrong = append(wrong, fmt.Errorf("%s: %.50s is not a value of type %s%s", path, data[start:end], misfit.Type.Kind(), hint))
		// The library stops at the first wrong value. Replace it by null to find the next one.
		data = slices.Concat(data[:start], []byte("null"), data[end:])
	}
}

// find searches a valid JSON text for the value whose first token ends at offset. It
// returns the path, the start and the end of this value. The path found is empty if there
// is no such value.
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
			decoder.Token() // the token that ends the value
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
