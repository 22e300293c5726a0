// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
)

// maxTail limits the part of a callout's standard error that is kept for a log message.
const maxTail = 4096

// tail is a writer that keeps the last maxTail bytes.
type tail struct {
	kept    []byte
	omitted int
}

// Write implements io.Writer.
func (t *tail) Write(p []byte) (int, error) {
	n := len(p)
	if over := len(p) - maxTail; over > 0 {
		t.omitted += over
		p = p[over:]
	}
	if over := len(t.kept) + len(p) - maxTail; over > 0 {
		t.omitted += over
		t.kept = append(t.kept[:0], t.kept[over:]...)
	}
	t.kept = append(t.kept, p...)
	return n, nil
}

// String returns the kept text without surrounding white space.
func (t *tail) String() string {
	text := strings.TrimSpace(string(t.kept))
	if t.omitted > 0 {
		text = fmt.Sprintf("(%d bytes omitted) %s", t.omitted, text)
	}
	return text
}
