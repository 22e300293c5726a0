// SPDX-License-Identifier: Apache-2.0

package file

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kpng-project/kpng/watcher"
)

func TestWhatIsNoRegularFileIsRefused(t *testing.T) {
	dir, err := os.MkdirTemp("", "file") // t.TempDir may be too long for a socket
	must(t, err)
	defer os.RemoveAll(dir)
	listener, err := net.Listen("unix", filepath.Join(dir, "m.yaml"))
	if err != nil {
		t.Skipf("no sockets here: %v", err)
	}
	defer listener.Close()
	for name, path := range map[string]string{
		"a socket":             filepath.Join(dir, "m.yaml"),
		"a socket in a folder": dir,
		"a device":             os.DevNull,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Load(t.Context(), path, watcher.Options{})
			if err == nil || !strings.Contains(err.Error(), ": not a regular file (") {
				t.Errorf("error is %v", err)
			}
		})
	}
}

func TestAFileThatIsTooLargeIsRefused(t *testing.T) {
	path := filepath.Join(write(t, map[string]string{"m.yaml": strings.Repeat(service, blockSize/len(service)+1)}), "m.yaml")
	must(t, os.Truncate(path, maxSize+1)) // a hole takes no space
	_, err := Load(t.Context(), path, watcher.Options{})
	if want := "reading manifests: " + path + ": larger than 512 MiB"; err == nil || err.Error() != want {
		t.Errorf("error is %v, want %s", err, want)
	}
}

// endless repeats a text.
type endless string

func (e endless) Read(p []byte) (int, error) {
	n := 0
	for n < len(p) {
		n += copy(p[n:], e)
	}
	return n, nil
}

func TestReadingIsBounded(t *testing.T) {
	stop := iotest.ErrReader(errors.New("read too much"))
	cutRune := strings.Repeat("x", blockSize-1) + "ä"
	for _, c := range []struct {
		name  string
		r     io.Reader
		limit int64
		want  int // bytes
		err   string
	}{
		{"text up to the limit", strings.NewReader(strings.Repeat("x", 1<<20)), 1 << 20, 1 << 20, ""},
		{"a byte more", strings.NewReader(strings.Repeat("x", 1<<20+1)), 1 << 20, 0, "m: larger than 1 MiB"},
		{"text without end", endless("a: b\n"), 1 << 20, 0, "m: larger than 1 MiB"},
		{"zeros without end", endless("\x00"), 1 << 20, blockSize, ""},
		{"noise is read to the end of a block", io.MultiReader(io.LimitReader(endless("\xff"), blockSize), stop), 1 << 20, blockSize, ""},
		{"a rune over the end of a block is text", strings.NewReader(cutRune), 1 << 20, len(cutRune), ""},
		{"an error", iotest.ErrReader(errors.New("broken")), 1 << 20, 0, "broken"},
	} {
		t.Run(c.name, func(t *testing.T) {
			data, err := read(t.Context(), "m", c.r, 0, c.limit)
			var message string
			if err != nil {
				message = err.Error()
			}
			if diff := cmp.Diff(c.err, message); diff != "" || len(data) != c.want {
				t.Errorf("got %d bytes, want %d; error (-want +got):\n%s", len(data), c.want, diff)
			}
		})
	}
}

// cancelling ends a context when it is read.
type cancelling struct {
	io.Reader
	cancel func()
}

func (c cancelling) Read(p []byte) (int, error) {
	c.cancel()
	return c.Reader.Read(p)
}

func TestReadingEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	_, err := read(ctx, "m", cancelling{endless("a: b\n"), cancel}, 0, maxSize)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v", err)
	}
}

func TestReadingStandardInputEndsWithItsContext(t *testing.T) {
	r, w, err := os.Pipe() // nothing is ever written
	must(t, err)
	defer r.Close()
	defer w.Close()
	stdin := os.Stdin
	defer func() { os.Stdin = stdin }()
	os.Stdin = r
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := Load(ctx, Stdin, watcher.Options{})
		done <- err
	}()
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v", err)
	}
}

// countdown is a context that ends when it has been asked a number of times.
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

// TestParsingEndsWithItsContext: whatever a big file is made of, one that ends
// early is not parsed to the end, where something is wrong.
func TestParsingEndsWithItsContext(t *testing.T) {
	const count = 2000
	item := `{"apiVersion": "v1", "kind": "Pod"}`
	for name, text := range map[string]string{
		"many documents":      strings.Repeat("---\n"+item+"\n", count) + "---\na: b: c\n",
		"one large document":  "apiVersion: v1\nkind: List\nitems:\n" + strings.Repeat("- "+item+"\n", count) + "oops: b: c\n",
		"a large JSON text":   `{"apiVersion": "v1", "kind": "List", "items": [` + strings.Repeat(item+",\n", count) + "oops]}",
		"many JSON texts":     strings.Repeat(item+"\n", count) + "oops",
		"a document of lists": strings.Repeat("- {a: 1}\n", count) + "oops: [",
	} {
		t.Run(name, func(t *testing.T) {
			file := "m.yaml"
			if strings.Contains(name, "JSON") {
				file = "m.json"
			}
			docs, errs := documents(&countdown{t.Context(), 3}, file, []byte(text))
			if len(errs) > 0 && errs[0].line > count/2 {
				t.Errorf("parsed up to line %d", errs[0].line)
			}
			if len(docs) > count/2 {
				t.Errorf("parsed %d documents", len(docs))
			}
		})
	}
	t.Run("the objects of a document", func(t *testing.T) {
		p, err := newParser(watcher.Options{})
		must(t, err)
		docs, _ := documents(t.Context(), "m.yaml", []byte("apiVersion: v1\nkind: List\nitems:\n"+strings.Repeat("- "+item+"\n", count)))
		p.node(&countdown{t.Context(), 10}, place{}, docs[0].root, metav1.TypeMeta{})
		if n := p.ignored["v1 Pod"].count; n != 9 {
			t.Errorf("looked at %d objects", n)
		}
	})
}

func TestLoadReturnsTheErrorOfItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Load(ctx, filepath.Join(write(t, map[string]string{"m.yaml": service}), "m.yaml"), watcher.Options{})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v", err)
	}
}
