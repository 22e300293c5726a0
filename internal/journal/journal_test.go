// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func open(t *testing.T, path string) *Journal {
	t.Helper()
	j, err := Open(path, "test")
	if err != nil {
		t.Fatal(err)
	}
	return j
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (j *Journal) expect(t *testing.T, want map[string]string) {
	t.Helper()
	if !maps.Equal(j.facts, want) {
		t.Errorf("the journal has %v, want %v", j.facts, want)
	}
}

func TestNextProcessReadsJournal(t *testing.T) {
	path := filepath.Join(t.TempDir(), "folder", "journal")
	j := open(t, path)
	j.Set("a", "1")
	j.Set("b", "two words, \"quotes\"\nand \x00 bytes")
	j.Set("c", "")
	must(t, j.Sync())
	j.Set("a", "2")
	j.Delete("c")
	j.Delete("never set")
	must(t, j.Write())
	j.Set("d", "not written")
	open(t, path).expect(t, map[string]string{"a": "2", "b": "two words, \"quotes\"\nand \x00 bytes"})

	must(t, j.Remove())
	j.expect(t, nil)
	open(t, path).expect(t, nil)
	must(t, j.Remove())
	j.Set("e", "5")
	must(t, j.Write())
	open(t, path).expect(t, map[string]string{"e": "5"})
}

func TestUnchangedValueWritesNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := open(t, path)
	j.Set("a", "1")
	must(t, j.Write())
	before, _ := os.ReadFile(path)
	j.Set("a", "1")
	must(t, j.Sync())
	if after, _ := os.ReadFile(path); string(after) != string(before) {
		t.Errorf("the file changed from\n%s\nto\n%s", before, after)
	}
}

func TestTruncatedLineIsIgnored(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := open(t, path)
	j.Set("a", "1")
	must(t, j.Write())
	j.Set("b", "2")
	must(t, j.Write())
	whole, err := os.ReadFile(path)
	must(t, err)
	lastLine := strings.LastIndex(strings.TrimSuffix(string(whole), "\n"), "\n") + 1
	for size := range whole {
		want := map[string]string{"a": "1"}
		if size < lastLine {
			want = map[string]string{}
		}
		must(t, os.WriteFile(path, whole[:size], 0o644))
		next := open(t, path)
		next.expect(t, want)
		// A line that is written after the truncated line is readable.
		next.Set("c", "3")
		must(t, next.Write())
		want["c"] = "3"
		open(t, path).expect(t, want)
	}
	// After a power failure, a file may end with zeros.
	must(t, os.WriteFile(path, append(whole, make([]byte, 4096)...), 0o644))
	open(t, path).expect(t, map[string]string{"a": "1", "b": "2"})
}

func TestDamagedOrForeignFileIsAnError(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	for name, content := range map[string]string{
		`the first line is "[mysqld]"`: "[mysqld]\n",
		`not "kpng journal: test"`:     "kpng journal: of another kind\n",
		"line 2 is damaged":            "kpng journal: test\n00000000 \"a\" \"1\"\n" + line("b", "2", true),
	} {
		must(t, os.WriteFile(path, []byte(content), 0o644))
		if _, err := Open(path, "test"); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("Open of %q returned %v, want an error with %q", content, err, name)
		}
		if data, _ := os.ReadFile(path); string(data) != content {
			t.Errorf("the file was overwritten with %q", data)
		}
	}
}

func TestFileIsCompacted(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := open(t, path)
	for i := range 3 * minLines {
		j.Set("a", fmt.Sprint(i))
		must(t, j.Write())
	}
	data, err := os.ReadFile(path)
	must(t, err)
	if lines := strings.Count(string(data), "\n"); lines > minLines+3 {
		t.Errorf("after %d changes of a key the file has %d lines", 3*minLines, lines)
	}
	open(t, path).expect(t, map[string]string{"a": fmt.Sprint(3*minLines - 1)})
}

func TestFailedWriteIsRepeated(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "folder")
	path := filepath.Join(folder, "journal")
	j := open(t, path)
	j.Set("a", "1")
	must(t, j.Write())
	must(t, os.RemoveAll(folder))
	must(t, os.WriteFile(folder, nil, 0o644)) // a file in place of the folder, so that the folder cannot be created
	j.Set("b", "2")
	if err := j.Write(); err == nil {
		t.Error("Write returned no error without the folder")
	}
	must(t, os.Remove(folder))
	must(t, j.Write())
	open(t, path).expect(t, map[string]string{"a": "1", "b": "2"})
}

func TestEmptyPathKeepsJournalInMemory(t *testing.T) {
	j := open(t, "")
	j.Set("a", "1")
	must(t, j.Sync())
	if v, ok := j.Get("a"); !ok || v != "1" {
		t.Errorf("Get returned %q, %t", v, ok)
	}
	must(t, j.Remove())
	j.expect(t, nil)
}

// TestRandomChangesAndTruncations compares the journal with a map. In a random order, it
// changes both, writes the file, reopens the file, and appends truncated lines.
func TestRandomChangesAndTruncations(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	path := filepath.Join(t.TempDir(), "journal")
	j, model := open(t, path), map[string]string{}
	for range 2000 {
		switch r.IntN(8) {
		case 0:
			must(t, j.Sync())
			j = open(t, path)
		case 1: // the process is killed in the middle of a line
			must(t, j.Write())
			f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY|os.O_CREATE, 0o644)
			must(t, err)
			full := line("k0", "torn", true)
			_, err = f.WriteString(full[:r.IntN(len(full))])
			must(t, err)
			must(t, f.Close())
			j = open(t, path)
		case 2, 3:
			key := fmt.Sprint("k", r.IntN(10))
			delete(model, key)
			j.Delete(key)
		default:
			key, value := fmt.Sprint("k", r.IntN(10)), fmt.Sprint(r.IntN(3))
			model[key] = value
			j.Set(key, value)
		}
		j.expect(t, model)
	}
}
