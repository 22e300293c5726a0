// SPDX-License-Identifier: Apache-2.0

package file

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/internal/manifest"
	"github.com/kpng-project/kpng/watcher"
)

func TestIrregularFileIsAnError(t *testing.T) {
	dir, err := os.MkdirTemp("", "file") // the path of t.TempDir may be too long for a socket
	must(t, err)
	defer os.RemoveAll(dir)
	listener, err := net.Listen("unix", filepath.Join(dir, "m.yaml"))
	if err != nil {
		t.Skipf("unix sockets are not available: %v", err)
	}
	defer listener.Close()
	for name, path := range map[string]string{
		"a socket":             filepath.Join(dir, "m.yaml"),
		"a socket in a folder": dir,
		"a device":             os.DevNull,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := load(t.Context(), path, watcher.Options{})
			if err == nil || !strings.Contains(err.Error(), ": not a regular file (") {
				t.Errorf("error %v", err)
			}
		})
	}
}

func TestTooLargeFileIsAnError(t *testing.T) {
	path := filepath.Join(write(t, map[string]string{"m.yaml": service}), "m.yaml")
	must(t, os.Truncate(path, maxSize+1)) // a sparse file takes no disk space
	_, err := load(t.Context(), path, watcher.Options{})
	if want := "read manifests: " + path + ": larger than 512 MiB"; err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
}

func TestReadingStandardInputEndsWithItsContext(t *testing.T) {
	r, w, err := os.Pipe() // a read of r blocks, because nothing is written to w
	must(t, err)
	defer r.Close()
	defer w.Close()
	stdin := os.Stdin
	defer func() { os.Stdin = stdin }()
	os.Stdin = r
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := load(ctx, manifest.Stdin, watcher.Options{})
		done <- err
	}()
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}

// countdown is a context that ends after a number of calls of Err.
type countdown struct {
	context.Context
	left int
}

func (c *countdown) Err() error {
	if c.left--; c.left < 0 {
		return context.Canceled
	}
	return nil
}

// TestParsingEndsWithItsContext ends the context while a big file is parsed. The parser
// must not reach the error at the end of the file.
func TestParsingEndsWithItsContext(t *testing.T) {
	const count = 2000
	item := `{"apiVersion": "v1", "kind": "Pod"}`
	for name, text := range map[string]string{
		"many documents":            strings.Repeat("---\n"+item+"\n", count) + "---\na: b: c\n",
		"many JSON texts":           strings.Repeat(item+"\n", count) + "oops",
		"the objects of a document": "apiVersion: v1\nkind: List\nitems:\n" + strings.Repeat("- "+item+"\n", count) + "- oops\n",
	} {
		t.Run(name, func(t *testing.T) {
			file := "m.yaml"
			if strings.Contains(name, "JSON") {
				file = "m.json"
			}
			p, err := newParser(watcher.Options{})
			must(t, err)
			p.file(&countdown{t.Context(), 10}, file, []byte(text))
			if n := len(p.ignored["v1 Pod"]); len(p.problems) > 0 || n == 0 || n > 11 {
				t.Errorf("parsed %d objects, problems %v", n, p.problems)
			}
		})
	}
}

func TestLoadReturnsTheErrorOfItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := load(ctx, filepath.Join(write(t, map[string]string{"m.yaml": service}), "m.yaml"), watcher.Options{})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}
