// SPDX-License-Identifier: Apache-2.0

// Package journal keeps a map from strings to strings in a file. After a crash the next
// process can read it.
//
// The file is a log, so the cost of a change does not depend on the number of facts. It
// begins with a line that names its kind. Each further line has a checksum, a key and,
// unless the key was deleted, its value. For example:
//
//	kpng journal: addresses
//	5d1c3f0e "10.96.0.10" "vEthernet (HNS Internal NIC)"
//	a0b1c2d3 "10.96.0.10"
//
// Open ignores a last line that a crash truncated. The file is rewritten when most of its
// lines are obsolete.
package journal

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"iter"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Journal is a map with a file. It is not safe for concurrent use. Two journals must not
// use one file at the same time.
type Journal struct {
	path, kind string
	facts      map[string]string
	// pending are lines that are not yet in the file.
	pending bytes.Buffer
	// lines counts the lines of the file and of pending.
	lines int
	// stale reports that lines cannot be appended to the file: it does not exist, or its
	// last line may be truncated.
	stale bool
}

// ErrForeign reports that a file is not a journal of the expected kind.
var ErrForeign = errors.New("not a journal of this kind")

// minLines is the minimum number of lines for which a file is rewritten.
const minLines = 1000

// Open reads a journal. A missing file is an empty journal; the first write creates it
// with its folder. An empty path keeps the journal in memory. Open returns an error if
// the file is damaged, and ErrForeign if it is something else.
func Open(path, kind string) (*Journal, error) {
	j := New(path, kind)
	if path == "" {
		return j, nil
	}
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return j, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read journal: %w", err)
	}
	if err := j.parse(string(data)); err != nil {
		return nil, fmt.Errorf("read journal %s: %w", path, err)
	}
	return j, nil
}

// New returns an empty journal. Its first write replaces the file.
func New(path, kind string) *Journal {
	return &Journal{path: path, kind: kind, facts: map[string]string{}, stale: true}
}

func (j *Journal) header() string { return "kpng journal: " + j.kind + "\n" }

// parse reads the content of a file.
func (j *Journal) parse(text string) error {
	header := j.header()
	if strings.HasPrefix(header, text) && text != header {
		return nil // the file is empty or its first line is truncated
	}
	text, ok := strings.CutPrefix(text, header)
	if !ok {
		first, _, _ := strings.Cut(text, "\n")
		return fmt.Errorf("%w: the first line is %.80q, not %q", ErrForeign, first, strings.TrimSpace(header))
	}
	damaged := 0
	number := 1
	for line := range strings.Lines(text) {
		number++
		key, value, set, ok := parseLine(line)
		switch {
		case !ok && damaged == 0:
			damaged = number
		case !ok:
		case damaged > 0:
			return fmt.Errorf("line %d is damaged", damaged)
		case set:
			j.facts[key] = value
		default:
			delete(j.facts, key)
		}
	}
	j.lines, j.stale = number, damaged > 0
	return nil
}

// line returns the line that sets or deletes a key.
func line(key, value string, set bool) string {
	text := strconv.Quote(key)
	if set {
		text += " " + strconv.Quote(value)
	}
	return fmt.Sprintf("%08x %s\n", crc32.ChecksumIEEE([]byte(text)), text)
}

// parseLine is the inverse of line. ok is false if the line is truncated or damaged.
func parseLine(s string) (key, value string, set, ok bool) {
	sum, text, _ := strings.Cut(s, " ")
	text, complete := strings.CutSuffix(text, "\n")
	if !complete || sum != fmt.Sprintf("%08x", crc32.ChecksumIEEE([]byte(text))) {
		return "", "", false, false
	}
	quoted, err := strconv.QuotedPrefix(text)
	if err != nil {
		return "", "", false, false
	}
	if key, err = strconv.Unquote(quoted); err != nil {
		return "", "", false, false
	}
	rest, set := strings.CutPrefix(text[len(quoted):], " ")
	if !set {
		return key, "", false, rest == ""
	}
	value, err = strconv.Unquote(rest)
	return key, value, true, err == nil
}

// Get returns the value of a key.
func (j *Journal) Get(key string) (value string, ok bool) {
	value, ok = j.facts[key]
	return value, ok
}

// All returns the keys and values in no particular order.
func (j *Journal) All() iter.Seq2[string, string] { return maps.All(j.facts) }

// Set sets the value of a key. The file changes with the next Write or Sync.
func (j *Journal) Set(key, value string) {
	if old, ok := j.facts[key]; ok && old == value {
		return
	}
	j.facts[key] = value
	j.add(line(key, value, true))
}

// Delete deletes a key. The file changes with the next Write or Sync.
func (j *Journal) Delete(key string) {
	if _, ok := j.facts[key]; !ok {
		return
	}
	delete(j.facts, key)
	j.add(line(key, "", false))
}

func (j *Journal) add(line string) {
	if j.path != "" {
		j.pending.WriteString(line)
		j.lines++
	}
}

// Write appends all changes to the file. They survive the end of this process, but not a
// crash of the machine. After an error the next Write writes them again.
func (j *Journal) Write() error { return j.write(false) }

// Sync writes all changes like Write and flushes the file to the disk, so that they
// survive a crash of the machine.
func (j *Journal) Sync() error { return j.write(true) }

func (j *Journal) write(sync bool) error {
	if j.pending.Len() == 0 {
		return nil
	}
	var err error
	if j.stale || j.lines > minLines+2*len(j.facts) {
		err = j.rewrite()
	} else {
		err = writeFile(j.path, os.O_APPEND, j.pending.Bytes(), sync)
	}
	if j.stale = err != nil; err != nil {
		return fmt.Errorf("write journal: %w", err)
	}
	j.pending.Reset()
	return nil
}

// rewrite replaces the file atomically.
func (j *Journal) rewrite() error {
	var content bytes.Buffer
	content.WriteString(j.header())
	for _, key := range slices.Sorted(maps.Keys(j.facts)) {
		content.WriteString(line(key, j.facts[key], true))
	}
	if err := os.MkdirAll(filepath.Dir(j.path), 0o755); err != nil {
		return err
	}
	next := j.path + ".new"
	if err := writeFile(next, os.O_TRUNC, content.Bytes(), true); err != nil {
		return err
	}
	j.lines = 1 + len(j.facts)
	return os.Rename(next, j.path)
}

func writeFile(path string, how int, data []byte, sync bool) error {
	f, err := os.OpenFile(path, how|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	if _, err = f.Write(data); err == nil && sync {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// Remove removes the file and all facts.
func (j *Journal) Remove() error {
	clear(j.facts)
	j.pending.Reset()
	j.lines, j.stale = 0, true
	if j.path == "" {
		return nil
	}
	if err := os.Remove(j.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove journal: %w", err)
	}
	return nil
}
