// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/reconcile"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"k8s.io/apimachinery/pkg/types"
)

func newSink() reconcile.Reconciler {
	return reconcile.New(dataplane{"test"}, reconcile.Options[string, chain]{Equal: equal, VerifyInterval: -1})
}

// pass delivers views to a sink in one pass. It returns the services that fail.
func pass(t *testing.T, s sink.Sink, views ...*api.View) (failed sink.Failed) {
	t.Helper()
	err := s.Sync(t.Context(), &sink.Changes{First: true, Last: true, Services: func(yield func(sink.Change) bool) {
		for _, v := range views {
			if !yield(sink.Change{Key: v.Key(), New: v}) {
				return
			}
		}
	}})
	failed, ok := sink.Acknowledged(err)
	if !ok {
		t.Fatal(err)
	}
	return failed
}

func service(name, ip string) *api.View {
	return sinktest.View(sinktest.Node("node"), sinktest.Service(name, ip+" 80>8080"), "10.1.0.1@node 10.1.0.2")
}

func TestOnlyDifferencesAreWritten(t *testing.T) {
	ns, nft := netnstest.New(t), netnstest.Program("nft")
	calls, _ := ns.Shadow(t, "nft")
	written := func() []string {
		return slices.DeleteFunc(calls(), func(c string) bool { return strings.HasPrefix(c, "list ") })
	}
	ruleset := func() string { return ns.Run(t, nft, "-a", "list", "ruleset") }
	all := []*api.View{service("a", "10.96.0.1"), service("b", "10.96.0.2"), service("c", "10.96.0.3 fd00::3")}

	s := newSink()
	if failed := pass(t, s, all...); failed != nil {
		t.Fatal(failed)
	}
	if n := len(written()); n != 2 {
		t.Errorf("the first pass writes %d scripts, want the table and the frontends", n)
	}
	before := ruleset()

	s = newSink()
	if failed := pass(t, s, all...); failed != nil {
		t.Fatal(failed)
	}
	if scripts := written(); len(scripts) > 0 {
		t.Errorf("a restart writes %q", scripts)
	}
	if now := ruleset(); now != before {
		t.Errorf("after a restart:\n%s\nbefore:\n%s", now, before)
	}

	ns.Run(t, nft, "delete", "element", "inet", "test", "frontends_ip", "{ 10.96.0.2 . tcp . 80 }")
	if err := s.Verify(t.Context()); err != nil {
		t.Fatal(err)
	}
	if scripts := written(); len(scripts) != 1 || !strings.Contains(scripts[0], "10.96.0.2") || strings.Contains(scripts[0], "10.96.0.1") || strings.Contains(scripts[0], "10.96.0.3") {
		t.Errorf("Verify writes %q, want only the lost element", scripts)
	}
	if got, want := elements(ruleset()), elements(before); !slices.Equal(got, want) {
		t.Errorf("after Verify: %q, want %q", got, want)
	}

	if err := s.Cleanup(t.Context()); err != nil {
		t.Fatal(err)
	}
	if now := ruleset(); now != "" {
		t.Errorf("clean-up leaves:\n%s", now)
	}
}

// The kernel refuses an element that another program has added with another verdict.
func TestARefusedElementFailsOneService(t *testing.T) {
	ns, nft := netnstest.New(t), netnstest.Program("nft")
	ns.Shadow(t, "nft")
	s := newSink()
	pass(t, s)
	foreign := []string{"element", "inet", "test", "frontends_ip", "{ 10.96.0.2 . tcp . 80 : drop }"}
	ns.Run(t, append([]string{nft, "add"}, foreign...)...)
	all := []*api.View{service("a", "10.96.0.1"), service("b", "10.96.0.2"), service("c", "10.96.0.3")}
	failed := pass(t, s, all...)
	if key := (types.NamespacedName{Namespace: "default", Name: "b"}); len(failed) != 1 || failed[key] == nil {
		t.Errorf("failed: %v, want only service b", failed)
	}
	if got := elements(ns.Run(t, nft, "list", "ruleset")); len(got) != 2 {
		t.Errorf("elements %q, want those of services a and c", got)
	}
	ns.Run(t, append([]string{nft, "delete"}, foreign...)...)
	if failed := pass(t, s, all...); failed != nil {
		t.Errorf("without the other element: %v", failed)
	}
}

// elements returns the elements of maps, with the digests of their chains.
func elements(ruleset string) (all []string) {
	all = element.FindAllString(ruleset, -1)
	slices.Sort(all)
	return all
}

// docs/build/backend.md says how many lines the program has.
func TestProgramHasLessThan90Lines(t *testing.T) {
	text, err := os.ReadFile("main.go")
	if err != nil {
		t.Fatal(err)
	}
	_, code, _ := strings.Cut(string(text), "\n)\n") // the end of the imports
	n := 0
	for line := range strings.Lines(code) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "//") {
			n++
		}
	}
	if n < 80 || n >= 90 {
		t.Errorf("the program has %d lines, want 80 to 89", n)
	}
}

func TestHistories(t *testing.T) {
	ns, nft := netnstest.New(t), netnstest.Program("nft")
	_, fail := ns.Shadow(t, "nft")
	sinktest.TestHistories(t, 3, func(t testing.TB) *sinktest.Subject {
		t.Cleanup(func() {
			if err := newSink().Cleanup(context.WithoutCancel(t.Context())); err != nil {
				t.Error(err)
			}
		})
		return &sinktest.Subject{
			Open:    func() sink.Sink { return newSink() },
			Objects: func() []string { return elements(ns.Run(t, nft, "list", "ruleset")) },
			Disturb: func(*rand.Rand) (calm func()) {
				if err := os.WriteFile(fail, nil, 0o600); err != nil {
					t.Fatal(err)
				}
				return func() {
					if err := os.Remove(fail); err != nil && !errors.Is(err, os.ErrNotExist) {
						t.Fatal(err)
					}
				}
			},
			Drift: func(random *rand.Rand) {
				out := ns.Run(t, nft, "list", "ruleset")
				for _, m := range element.FindAllStringSubmatch(out, -1) {
					if random.IntN(4) == 0 {
						ns.Run(t, nft, fmt.Sprintf("delete element inet test frontends_%s { %s }", m[3], m[1]))
					}
				}
			},
		}
	})
}
