// SPDX-License-Identifier: Apache-2.0

package browser

import (
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// measure loads each page in a frame of each width, and posts a line for each page that is
// wider than the frame.
const measure = `<!doctype html><script>
(async () => {
  let wide = ''
  const frame = document.createElement('iframe')
  document.documentElement.append(frame)
  for (const width of [390, 1280]) for (const page of %s) {
    frame.style.width = width + 'px'
    await new Promise(loaded => { frame.onload = loaded; frame.src = page })
    const have = frame.contentDocument.documentElement.scrollWidth
    if (have > width) wide += page + ' needs ' + have + ' of ' + width + ' pixels\n'
  }
  await fetch('/measured', {method: 'POST', body: wide})
})()
</script>`

// TestSiteFitsScreens makes the site of the documents with hack/site, and loads all pages
// with the widths of a phone and of a desktop. hack/site fails for dead links.
func TestSiteFitsScreens(t *testing.T) {
	for _, program := range []string{"chromium", "mkdocs"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("%s is missing", program)
		}
	}
	site := t.TempDir()
	if out, err := exec.CommandContext(t.Context(), "../../hack/site", site).CombinedOutput(); err != nil {
		t.Fatalf("hack/site: %v\n%s", err, out)
	}
	var pages []string
	err := fs.WalkDir(os.DirFS(site), "main", func(path string, _ fs.DirEntry, err error) error {
		if filepath.Base(path) == "index.html" {
			pages = append(pages, "/"+path)
		}
		return err
	})
	if err != nil || len(pages) < 40 {
		t.Fatalf("the site has the pages %q (%v)", pages, err)
	}
	list, err := json.Marshal(pages)
	if err != nil {
		t.Fatal(err)
	}

	requests, measured := make(chan struct{}, 1), make(chan string, 1)
	files := http.FileServer(http.Dir(site))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/measure":
			fmt.Fprintf(w, measure, list)
		case "/measured":
			wide, err := io.ReadAll(r.Body)
			if err != nil {
				wide = []byte(err.Error())
			}
			select {
			case measured <- string(wide):
			default: // sent twice
			}
		default:
			files.ServeHTTP(w, r)
		}
		select {
		case requests <- struct{}{}:
		default: // the test has not read the last request yet
		}
	}))
	defer server.Close()
	cmd := exec.CommandContext(t.Context(), "chromium", append(headless(t), "--remote-debugging-port=0", server.URL+"/measure")...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		cmd.Process.Signal(os.Interrupt) // Chromium then also ends its other processes
		cmd.Wait()
	}()
	const patience = time.Minute // without a request
	for {
		select {
		case <-requests:
		case wide := <-measured:
			for line := range strings.Lines(wide) {
				t.Error(strings.TrimSpace(line))
			}
			return
		case <-time.After(patience):
			t.Fatalf("Chromium requested nothing for %s", patience)
		}
	}
}
