// SPDX-License-Identifier: Apache-2.0

// Package journal keeps a map from strings to strings in a file, so that the next process
// has the map even after a crash.
//
// Each change appends a line to the file, so its cost does not depend on the size of the
// map. The first line names the kind of the file. Each further line has a checksum and
// one change: it sets a key to a value, or deletes a key. For example:
//
//	kpng journal: addresses
//	5d1c3f0e "10.96.0.10" "vEthernet (HNS Internal NIC)"
//	a0b1c2d3 "10.96.0.10"
//
// Open ignores the last line if a crash truncated it. A line is obsolete if a later line
// has the same key. When most lines are obsolete, the next write replaces the file by a
// file without such lines.
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

// Journal is a map that is kept in a file. It is not safe for concurrent use. Two
// journals must not use the same file at the same time.
type Journal struct {
	path, kind string
	facts      map[string]string
	// pending contains the lines that are not yet in the file.
	pending bytes.Buffer
	// lines is the number of lines in the file and in pending.
	lines int
	// stale is true if the file does not exist, or if its last line may be truncated.
	// Then no lines can be appended.
	stale bool
}

// ErrForeign reports that a file is not a journal of the expected kind.
var ErrForeign = errors.New("not a journal of this kind")

// If a file has at most minLines lines, obsolete lines are no reason to replace the file.
const minLines = 1000

// Open reads a journal. If the file is missing, the journal is empty, and its first write
// creates the file and the folder. If path is empty, the journal is only in memory. The
// error is ErrForeign if the file is not a journal of this kind.
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

// New returns an empty journal. Its first write replaces an existing file.
func New(path, kind string) *Journal {
	return &Journal{path: path, kind: kind, facts: map[string]string{}, stale: true}
}

func (j *Journal) header() string { return "kpng journal: " + j.kind + "\n" }

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

// line encodes one change. If set is false, the change deletes the key.
func line(key, value string, set bool) string {
	text := strconv.Quote(key)
	if set {
		text += " " + strconv.Quote(value)
	}
	return fmt.Sprintf("%08x %s\n", crc32.ChecksumIEEE([]byte(text)), text)
}

// parseLine decodes a line. If the line is truncated or damaged, ok is false.
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

// Set sets the value of a key. The next Write or Sync updates the file.
func (j *Journal) Set(key, value string) {
	if old, ok := j.facts[key]; ok && old == value {
		return
	}
	j.facts[key] = value
	j.add(line(key, value, true))
}

// Delete deletes a key. The next Write or Sync updates the file.
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

// Write writes all pending changes to the file. Then they survive a crash of this
// process, but not of the machine. If Write fails, the next Write or Sync tries again.
func (j *Journal) Write() error { return j.write(false) }

// Sync writes all pending changes like Write, and flushes them to the disk. Then they
// also survive a crash of the machine. Without pending changes, it does nothing.
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

// Remove deletes the file and all keys.
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
