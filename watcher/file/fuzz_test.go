// SPDX-License-Identifier: Apache-2.0

package file

import (
	"bytes"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/watcher"
)

// FuzzParse: whatever a file holds, it is read without a panic, or refused by
// errors each of which names the file and a line that it has.
func FuzzParse(f *testing.F) {
	f.Add("m.yaml", []byte(service+"---\n"+slice))
	f.Add("m.yaml", []byte("kind: List\napiVersion: v1\nitems:\n- {kind: Node, apiVersion: v1, metadata: {name: n, uid: u}}\n"))
	f.Add("m.yaml", []byte("a: &a [*a]\nb: {<<: *a}\n---\n%TAG ! x\n...\n\xff"))
	f.Add("m.json", []byte(`{"kind":"List","apiVersion":"v1","items":[[null]]}{`))
	f.Fuzz(func(t *testing.T, name string, data []byte) {
		p, err := newParser(watcher.Options{ServiceProxyName: "kpng-example"})
		if err != nil {
			t.Fatal(err)
		}
		p.file(t.Context(), name, data)
		m, err := p.result()
		if err == nil {
			for _, s := range m.Services {
				if s.Name == "" || s.Namespace == "" {
					t.Errorf("a service without name or namespace: %+v", s)
				}
			}
			return
		}
		lines := 1
		for _, end := range []string{"\n", "\r", "\u0085", "\u2028", "\u2029"} { // as YAML has it
			lines += bytes.Count(data, []byte(end))
		}
		for _, e := range err.(Errors) {
			if e.File != name || !strings.HasPrefix(e.Error(), name) {
				t.Errorf("%q does not name the file %q", e, name)
			}
			if e.Line > lines || e.Line == 0 && !strings.HasPrefix(e.Message, "empty;") || e.Message == "" {
				t.Errorf("%q is of line %d of %d", e, e.Line, lines)
			}
		}
	})
}
