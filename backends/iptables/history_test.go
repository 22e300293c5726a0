// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
)

var histories = flag.Int("histories", 1, "how many random `histories` to test with each flavour")

func TestHistories(t *testing.T) {
	for _, v := range variants {
		t.Run(v.String(), func(t *testing.T) {
			programs := newFaultyPrograms(t)
			sinktest.TestHistories(t, *histories, func(tb testing.TB) *sinktest.Subject {
				return programs.subject(tb, v)
			})
		})
	}
}

// faultyPrograms are scripts in place of iptables-restore and ipset. A file with the name
// of a kind of fault contains patterns. The scripts fail if their input matches one of
// the patterns.
type faultyPrograms struct{ dir string }

// The kinds of faults. With each kind, a program fails. With "refuse", it does nothing.
// With "lose", it first does everything. With "part", it first does one transaction.
var faultKinds = []string{"refuse", "lose", "part"}

const faultyProgram = `#!/bin/sh
set -u
for kind in refuse lose part; do
	[ -e DIR/$kind ] && break
	kind=
done
[ -n "$kind" ] || exec PROGRAM "$@"
cat >DIR/input.$$
trap 'rm DIR/input.$$' EXIT
if grep -qE -f DIR/$kind DIR/input.$$; then
	case $kind in
	lose) PROGRAM "$@" <DIR/input.$$ ;;
	part) sed /^COMMIT/q DIR/input.$$ | PROGRAM "$@" ;;
	esac
	echo "refused by the test" >&2
	exit 1
fi
PROGRAM "$@" <DIR/input.$$
`

func newFaultyPrograms(t *testing.T) *faultyPrograms { return &faultyPrograms{t.TempDir()} }

// lookPath returns the path of a program that may fail. Programs that only read never fail.
func (p *faultyPrograms) lookPath(name string) (string, error) {
	real, err := exec.LookPath(name)
	if err != nil || !strings.HasSuffix(name, "restore") && name != "ipset" {
		return real, err
	}
	path := filepath.Join(p.dir, name)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	script := strings.NewReplacer("DIR", p.dir, "PROGRAM", real).Replace(faultyProgram)
	return path, os.WriteFile(path, []byte(script), 0o755)
}

// disturb makes the programs fail with some inputs.
func (p *faultyPrograms) disturb(tb testing.TB, random *rand.Rand) (calm func()) {
	patterns := []string{
		fmt.Sprintf(`10\.244\.0\.%d`, 1+random.IntN(6)), fmt.Sprintf("fd44::%d", 1+random.IntN(6)), fmt.Sprint("default/s", random.IntN(5)),
		fmt.Sprintf(`10\.96\.0\.%d`, 1+random.IntN(6)), fmt.Sprintf("fd96::%d", 1+random.IntN(6)), "^-X", "^del ", "^add ", `\*mangle`, `\*nat`, ".",
	}
	kind := filepath.Join(p.dir, faultKinds[random.IntN(len(faultKinds))])
	if err := os.WriteFile(kind, []byte(patterns[random.IntN(len(patterns))]+"\n"), 0o644); err != nil {
		tb.Fatal(err)
	}
	return func() { os.Remove(kind) }
}

func (p *faultyPrograms) subject(tb testing.TB, v variant) *sinktest.Subject {
	ns := netnstest.New(tb)
	opts := options{lookPath: p.lookPath, public: Options{
		Flavour: v.flavour.String(), WithoutIPSet: v.withoutIPSet,
		Options: backends.Options{
			NetNS: ns.FD, NodeAddresses: &backendtest.NodeAddresses{}, Sysctls: backends.IgnoreSysctls,
			Conntrack: sink.Func(func(context.Context, *sink.Changes) error { return nil }),
		},
	}}
	s := &historySink{}
	return &sinktest.Subject{
		Open: func() sink.Sink {
			b, err := newBackend(opts)
			if err != nil {
				tb.Fatal(err)
			}
			s.backend = b
			return s
		},
		Objects: func() []string { return objects(tb, ns, v.flavour) },
		Disturb: func(random *rand.Rand) func() {
			calm := p.disturb(tb, random)
			s.disturbed = true
			return func() { s.disturbed = false; calm() }
		},
		Drift:  func(random *rand.Rand) { drift(tb, ns, v, random) },
		Verify: func(ctx context.Context, _ sink.Sink) error { return s.verify(ctx) },
	}
}

// historySink is a backend with faulty programs.
type historySink struct {
	*backend
	disturbed bool
}

// Sync begins a new pass if the last one could not use a family or sets. Without this
// method, the backend would request the pass a minute later.
func (s *historySink) Sync(ctx context.Context, c *sink.Changes) error {
	if !s.disturbed && !c.First && s.known && s.isDegraded() {
		return sink.ErrStartOver
	}
	return s.backend.Sync(ctx, c)
}

func (s *historySink) isDegraded() bool {
	return slices.ContainsFunc(s.rulesets, func(t *ruleset) bool { return t.beginErr != nil || t.run.ipset != "" && !t.withSets })
}

// verify compares all rules, even in a pause. It ignores leftovers of failed services.
func (s *historySink) verify(ctx context.Context) error {
	if s.isDegraded() {
		return sink.ErrStartOver
	}
	forget(s.backend)
	s.verifyAt, s.leftovers.Exist = time.Time{}, false
	return s.backend.Verify(ctx)
}

var sharedComment = regexp.MustCompile(`-m comment --comment "[^"]*" (-j KPNG-REJECT)$`)

// objects returns the chains and sets of a network namespace.
func objects(tb testing.TB, ns *netnstest.Namespace, flavour flavour) (all []string) {
	table := ""
	chains := map[string]string{}
	for line := range strings.SplitSeq(saveAll(tb, ns, flavour), "\n") {
		switch name, rest, _ := strings.Cut(line, " "); {
		case strings.HasPrefix(line, "*"):
			table = line
		case strings.HasPrefix(line, ":"):
			chains[table+" "+name[1:]] += "\n"
		case name == "-A":
			name, rule, _ := strings.Cut(rest, " ")
			// Services with different ports of the same cluster IP share such a rule.
			rule = sharedComment.ReplaceAllString(rule, "$1")
			chains[table+" "+name] += rule + "\n"
		case line != "" && line != "COMMIT":
			all = append(all, line) // a line about a set
		}
	}
	for name, rules := range chains {
		all = append(all, name+":"+rules)
	}
	return all
}

// drift deletes rules or elements of sets, as another program does.
func drift(tb testing.TB, ns *netnstest.Namespace, v variant, random *rand.Rand) {
	family := families[random.IntN(len(families))]
	var commands [][]string
	table := ""
	for line := range strings.Lines(ns.Run(tb, programName(v.flavour, family, "save"))) {
		switch name, _, _ := strings.Cut(line[1:], " "); {
		case line[0] == '*':
			table = strings.TrimSpace(line[1:])
		case line[0] == ':' && strings.HasPrefix(name, "KPNG"):
			commands = append(commands, []string{programName(v.flavour, family, ""), "-t", table, "-F", name})
		case strings.HasPrefix(line, "-A KPNG"):
			chain, _, _ := strings.Cut(strings.TrimPrefix(line, "-A "), " ")
			commands = append(commands, []string{programName(v.flavour, family, ""), "-t", table, "-D", chain, "1"})
		}
	}
	if !v.withoutIPSet && random.IntN(2) == 0 {
		commands = nil
		for _, name := range strings.Fields(ns.Run(tb, "ipset", "list", "-name")) {
			commands = append(commands, []string{"ipset", "flush", name})
		}
	}
	if len(commands) > 0 {
		ns.Run(tb, commands[random.IntN(len(commands))]...)
	}
}
