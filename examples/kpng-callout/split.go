// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"strings"
)

// split splits a command line into words as a shell does. It supports '…', "…" and \, but
// no variables, patterns or operators. It does not run a shell.
func split(line string) ([]string, error) {
	var words []string
	var word strings.Builder
	inWord := false
	for rest := line; rest != ""; {
		c := rest[0]
		rest = rest[1:]
		switch c {
		case ' ', '\t', '\n':
			if inWord {
				words = append(words, word.String())
				word.Reset()
			}
			inWord = false
			continue
		case '\'':
			quoted, after, closed := strings.Cut(rest, "'")
			if !closed {
				return nil, fmt.Errorf("CALLOUT %q: a ' is not closed", line)
			}
			word.WriteString(quoted)
			rest = after
		case '"':
			var err error
			if rest, err = doubleQuoted(&word, rest); err != nil {
				return nil, fmt.Errorf("CALLOUT %q: %w", line, err)
			}
		case '\\':
			if rest == "" {
				return nil, fmt.Errorf("CALLOUT %q: nothing after the last \\", line)
			}
			word.WriteByte(rest[0])
			rest = rest[1:]
		default:
			word.WriteByte(c)
		}
		inWord = true
	}
	if inWord {
		words = append(words, word.String())
	}
	if len(words) == 0 || words[0] == "" {
		return nil, errors.New("the environment variable CALLOUT names no program to run")
	}
	return words, nil
}

// doubleQuoted splits text at the closing quote. It appends the part before the quote to
// the builder word, and returns the part after the quote. Between the quotes, \ escapes
// only " and \.
func doubleQuoted(word *strings.Builder, text string) (after string, err error) {
	for i := 0; i < len(text); i++ {
		switch {
		case text[i] == '"':
			return text[i+1:], nil
		case text[i] == '\\' && i+1 < len(text) && (text[i+1] == '"' || text[i+1] == '\\'):
			i++
		}
		word.WriteByte(text[i])
	}
	return "", errors.New(`a " is not closed`)
}
