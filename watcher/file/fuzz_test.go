// SPDX-License-Identifier: Apache-2.0

package file

import (
	"strings"
	"testing"

	"github.com/kpng-project/kpng/watcher"
)

// FuzzParse checks that parsing never panics, and that each error names the file and a
// line that exists.
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
		err = p.finish()
		if err == nil {
			for _, s := range p.manifests.services {
				if s.Name == "" || s.Namespace == "" {
					t.Errorf("a service without name or namespace: %+v", s)
				}
			}
			return
		}
		for _, problem := range p.problems {
			line := problem.Error()
			if message, found := strings.CutPrefix(line, name+": "); !found || message == "" || strings.Contains(message, "(line 0)") {
				t.Errorf("%q does not name the file %q and the place in it", line, name)
			}
		}
	})
}
