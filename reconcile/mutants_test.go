// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

var testMutants = flag.Bool("mutants", false, "test that the other tests of the package find each mutant")

// mutants are faults in the code of this package, as replacements of texts.
var mutants = []struct{ file, old, new string }{
	// Delivery.
	{"changes.go", "before[i].key == k && before[i].users.owner != nil", "before[i].key == k"},
	{"changes.go", "before[i].key == k && before", "before"},
	{"changes.go", "again || !o.exists ||", "!o.exists ||"},
	{"changes.go", "!o.exists || o.users.owner != s ||", "o.users.owner != s ||"},
	{"changes.go", "o.users.owner != s || !t.opts.Equal", "!t.opts.Equal"},
	{"changes.go", "o.users.owner != s || !t.opts.Equal(o.value, v)", "o.users.owner != s"},
	{"changes.go", "case o.marked, !o.users.has(s):", "case o.marked:"},
	{"changes.go", "case s.failed:\n\t\t\tnow", "case false:\n\t\t\tnow"},
	{"changes.go", "o.marked = false\n\t}\n\ts.objects", "_ = o\n\t}\n\ts.objects"},
	{"changes.go", "if n := len(c.by); n == 0 || c.by[n-1] != by {", "if len(c.by) == 0 {"},
	// Operations.
	{"changes.go", "c.exists && !(c.old && t.opts.Depth(c.key) > 0)", "c.exists"},
	{"changes.go", "c.exists && !(c.old && t.opts.Depth(c.key) > 0)", "c.exists && !c.old"},
	{"changes.go", "c.exists && !(c.old && t.opts.Depth(c.key) > 0)", "c.exists && t.opts.Depth(c.key) == 0"},
	{"changes.go", "[]*api.View{u.next, u.view}", "[]*api.View{u.view}"},
	{"changes.go", "[]*api.View{u.next, u.view}", "[]*api.View{u.next}"},
	{"changes.go", "ok && (!u.failed ||", "ok && (true ||"},
	{"changes.go", "ok && (!u.failed ||", "ok && (!u.failed || false &&"},
	{"changes.go", "\t\tc.users.own(heir)\n", ""},
	{"changes.go", "before: o.users.clone()", "before: o.users"},
	{"changes.go", "c.exists && t.opts.Depth(c.key) == 0", "c.exists"},
	{"changes.go", "c.exists && t.opts.Depth(c.key) == 0", "false"},
	{"changes.go", "t.parent[t.root(i)] = t.root(c.by[0])", "_ = i"},
	{"changes.go", "!o.exists || !r.opts.Equal(o.value, want)", "true"},
	// Failing services.
	{"changes.go", "s.failed && c.exists && c.before.has(s)", "false && c.before.has(s)"},
	{"changes.go", "s.failed && c.exists && c.before.has(s)", "s.failed && c.before.has(s)"},
	{"changes.go", "c.exists && c.before.has(s) && !c.users.has(s)", "c.exists && c.before.has(s)"},
	{"changes.go", "c.exists && c.before.has(s) && !c.users.has(s)", "c.exists && !c.users.has(s)"},
	{"changes.go", "c.users.add(s)\n\t\t\t\ts.objects", "c.users.own(s)\n\t\t\t\ts.objects"},
	{"changes.go", "if s.failed {\n\t\t\tcontinue", "if false {\n\t\t\tcontinue"},
	{"changes.go", "\t\tdelete(t.unprogrammed, s)\n", ""},
	{"changes.go", "for _, i := range c.by {\n\t\ts :=", "for _, i := range c.by[:1] {\n\t\ts :="},
	{"changes.go", "if c.before.has(s) && !c.users.has(s) {\n\t\t\tc.users.add(s)", "if false {\n"},
	{"changes.go", "\t\t\tc.users.add(s)\n\t\t\ts.objects = append(s.objects, c.object)", "\t\t\tc.users.add(s)"},
	{"changes.go", "if t.opts.Depth(c.key) == 0 {", "if true {"},
	{"changes.go", "if t.opts.Depth(c.key) == 0 {", "if false {"},
	{"changes.go", "return r.applyTogether(ctx, parts[len(parts)/2:], failed)", "return nil"},
	{"changes.go", "len(parts) > 1:\n", "false:\n"},
	{"changes.go", "size+len(parts[n]) <= r.opts.MaxOps", "true"},
	// Order.
	{"changes.go", "return -1 - r.opts.Depth(op.Key)", "return -1"},
	{"changes.go", "return r.opts.Depth(op.Key)\n", "return 0\n"},
	{"changes.go", "len(ops) > 0 && len(failed) == 0 && err == nil", "len(ops) > 0 && err == nil"},
	{"changes.go", "n < len(ops) && r.opts.Depth(ops[n].Key) == r.opts.Depth(ops[0].Key)", "n < len(ops)"},
	// Passes.
	{"reconcile.go", "\tr.known = false\n\tfor ch", "\tfor ch"},
	{"reconcile.go", "if !s.delivered {", "if !s.delivered && false {"},
	{"reconcile.go", "if !s.delivered {", "if true || !s.delivered {"},
	{"reconcile.go", "\tif !r.known {\n\t\tr.objects", "\tif true {\n\t\tr.objects"},
	{"reconcile.go", "\tif !r.known {\n\t\tr.objects", "\tif r.objects == nil {\n\t\tr.objects"},
	{"reconcile.go", "s.delivered = false", "_ = s"},
	{"reconcile.go", "r.service(key).delivered = true", "_ = key"},
	{"reconcile.go", "if !o.exists && o.users.owner == nil", "if !o.exists"},
	{"reconcile.go", "c.Last || r.waits && len(r.unprogrammed) == 0", "c.Last"},
	{"reconcile.go", "r.waits = len(r.unprogrammed) > 0", "r.waits = false"},
	{"reconcile.go", "r.services[key], r.unprogrammed[s] = s, true", "r.services[key] = s"},
	{"reconcile.go", "needed[o.key] = true", "_ = o"},
	{"reconcile.go", "(needed[k] || r.opts.Depth(k) > 0)", "needed[k]"},
	{"reconcile.go", "if o.users.owner == nil && !(r.waits", "if !(r.waits"},
	{"reconcile.go", "time.Since(r.passedAt) < waitLimit", "true"},
	{"reconcile.go", "time.Since(r.passedAt) < waitLimit", "false"},
	{"reconcile.go", "o.old = false", "_ = o"},
	{"reconcile.go", "len(failed) > 0 || r.waits {", "r.waits {"},
	{"reconcile.go", "len(failed) > 0 || r.waits {", "len(failed) > 0 {"},
	// Comparisons.
	{"verify.go", "o.exists && r.opts.Equal(o.value, v)", "o.exists"},
	{"verify.go", "o != nil && o.exists &&", "o != nil &&"},
	{"verify.go", "o.old = o.old || o.users.owner == nil", "o.old = o.users.owner == nil"},
	{"verify.go", "o.old = o.old || o.users.owner == nil", ""},
	{"verify.go", "(ignored == nil || !ignored(k))", "(true || ignored(k))"},
	{"verify.go", "(ignored == nil || !ignored(k))", "!r.opts.Virtual(k)"},
	{"verify.go", "r.prune = r.prune || !r.passing", "r.prune = true"},
	{"verify.go", "r.prune = r.prune || !r.passing", ""},
	{"verify.go", "return !u.failed }", "return true }"},
	{"verify.go", "\t\t\to.users.own(u)\n", ""},
	{"verify.go", "r.interrupted >= maxInterrupted", "false"},
	{"verify.go", "r.known = err == nil", "r.known = true"},
	{"verify.go", "\t\tr.known = true\n", ""},
	{"verify.go", "begin.Before(r.compareAt) && !r.suspect.Load()", "begin.Before(r.compareAt)"},
	{"verify.go", "min(max(2*r.driftPause, r.opts.VerifyInterval), maxDriftPause)", "0"},
	{"verify.go", "max(pauseFactor*now.Sub(begin), r.driftPause)", "r.driftPause"},
	{"verify.go", "now.Add(r.opts.VerifyInterval)", "now"},
}

// TestMutants tests the tests: each mutant makes one of them fail. Without the flag, it only
// checks that the mutants fit the code.
func TestMutants(t *testing.T) {
	dir := t.TempDir()
	for i, m := range mutants {
		text, err := os.ReadFile(m.file)
		if err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(string(text), m.old); n != 1 {
			t.Errorf("%s has the text %q %d times", m.file, m.old, n)
		} else if *testMutants {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				name := filepath.Join(dir, fmt.Sprint(i))
				path, _ := filepath.Abs(m.file)
				overlay, _ := json.Marshal(map[string]any{"Replace": map[string]string{path: name + ".go"}})
				mutant := strings.Replace(string(text), m.old, m.new, 1)
				if err := errors.Join(os.WriteFile(name+".go", []byte(mutant), 0o600), os.WriteFile(name+".json", overlay, 0o600)); err != nil {
					t.Fatal(err)
				}
				out, err := exec.Command("go", "test", "-overlay", name+".json", "-timeout", "2m", "-failfast", ".", "-histories", "3000").CombinedOutput()
				if err == nil || !strings.Contains(string(out), "--- FAIL") && !strings.Contains(string(out), "panic") {
					t.Errorf("%s: %q instead of %q is not found: %v %s", m.file, m.new, m.old, err, out)
				}
			})
		}
	}
}
