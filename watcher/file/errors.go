// SPDX-License-Identifier: Apache-2.0

package file

import (
	"fmt"
	"strings"
)

// Error is one thing that is wrong with a manifest.
type Error struct {
	// File is the file as it was named or found.
	File string
	// Line counts from 1; 0 means the file as a whole.
	Line int
	// Object is the kind, namespace and name of the object, as in
	// "Service default/web", the kind alone if it has no name, and empty if the
	// trouble is not within one.
	Object string
	// Message says what is wrong, with the path of the field if there is one.
	Message string
}

// Error returns "file:line: object: message".
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.File)
	if e.Line > 0 {
		fmt.Fprintf(&b, ":%d", e.Line)
	}
	if e.Object != "" {
		b.WriteString(": " + e.Object)
	}
	b.WriteString(": " + e.Message)
	return b.String()
}

// keysAndValues returns what there is of e for a log.
func (e *Error) keysAndValues() []any {
	kv := []any{"file", e.File}
	if e.Line > 0 {
		kv = append(kv, "line", e.Line)
	}
	if e.Object != "" {
		kv = append(kv, "object", e.Object)
	}
	return append(kv, "warning", e.Message)
}

// Errors is everything that is wrong with a set of manifests, in the order of
// files and lines.
type Errors []*Error

// maxErrorLines is how many errors a message spells out: more would drown
// what the reader has to mend first.
const maxErrorLines = 20

// Error lists the errors, one a line, the first 20 of them.
func (e Errors) Error() string {
	var b strings.Builder
	for i, err := range e {
		if i > 0 {
			b.WriteByte('\n')
		}
		if i == maxErrorLines {
			fmt.Fprintf(&b, "and %d more errors", len(e)-i)
			break
		}
		b.WriteString(err.Error())
	}
	return b.String()
}

// Unwrap returns the errors one by one.
func (e Errors) Unwrap() []error {
	list := make([]error, len(e))
	for i, err := range e {
		list[i] = err
	}
	return list
}
