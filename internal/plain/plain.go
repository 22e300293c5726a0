// SPDX-License-Identifier: Apache-2.0

// Package plain keeps text of other processes from controlling a terminal or forging
// lines of a log.
package plain

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// Check returns an error if a text has a character that cannot be printed, such as a
// newline, an escape character, or a change of the writing direction.
func Check(texts ...string) error {
	for _, text := range texts {
		for _, r := range text {
			if !unicode.IsPrint(r) {
				return fmt.Errorf("%q has characters that cannot be printed", text)
			}
		}
	}
	return nil
}

// CheckMap checks the keys and values of a map.
func CheckMap(m map[string]string) error {
	var errs []error
	for key, value := range m {
		errs = append(errs, Check(key, value))
	}
	return errors.Join(errs...)
}

// YAML returns a JSON text that is also YAML, with the same values. Strings in JSON may
// contain some characters, such as 0x7f, that must be escape sequences in YAML.
func YAML(text []byte) []byte {
	out := make([]byte, 0, len(text))
	for _, r := range string(text) {
		if r < 0x7f || r > 0xffff || unicode.IsPrint(r) { // YAML has no escape sequences for halves of characters
			out = utf8.AppendRune(out, r)
		} else {
			out = fmt.Appendf(out, "\\u%04x", r)
		}
	}
	return out
}

// Line returns text without characters that cannot be printed, in particular newlines and
// tabs. It replaces them by escape sequences as a Writer does.
func Line(text string) string {
	if Check(text) == nil {
		return text
	}
	var out strings.Builder
	Writer(&out).Write([]byte(text)) // a Builder returns no errors
	return strings.NewReplacer("\n", `\u000a`, "\t", `\u0009`).Replace(out.String())
}

// Writer returns a writer that writes to w. The writer replaces all characters that
// control a terminal, except newlines and tabs, by escape sequences that are also valid
// in JSON. If a call of Write ends in the middle of a character, the next call must
// complete this character.
func Writer(w io.Writer) io.Writer { return &writer{to: w} }

type writer struct {
	to   io.Writer
	rest []byte // the beginning of a character
}

// Write implements io.Writer.
func (w *writer) Write(p []byte) (int, error) {
	text := p
	if len(w.rest) > 0 {
		text = append(w.rest, p...)
		w.rest = nil
	}
	if !slices.ContainsFunc(text, func(b byte) bool { return b < ' ' && b != '\n' && b != '\t' || b >= 0x7f }) {
		return w.write(text, len(p))
	}
	out := make([]byte, 0, len(text)+16)
	for len(text) > 0 {
		r, size := utf8.DecodeRune(text)
		switch {
		case r == utf8.RuneError && size == 1 && !utf8.FullRune(text):
			w.rest = slices.Clone(text)
			return w.write(out, len(p))
		case r == '\n' || r == '\t' || unicode.IsPrint(r) && (r != utf8.RuneError || size > 1):
			out = append(out, text[:size]...)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			out = fmt.Appendf(out, "\\u%04x\\u%04x", high, low)
		default:
			out = fmt.Appendf(out, "\\u%04x", r)
		}
		text = text[size:]
	}
	return w.write(out, len(p))
}

// write returns n unless an error occurs. The argument n is the length of the caller's
// text.
func (w *writer) write(text []byte, n int) (int, error) {
	if _, err := w.to.Write(text); err != nil {
		return 0, err
	}
	return n, nil
}
