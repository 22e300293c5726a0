// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/reconcile"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// newNode returns a node with the address 192.0.2.1, which refuses connections, and a pod with the
// address 10.1.0.11, which listens on the ports.
func newNode(t *testing.T, ports ...int) *netnstest.Namespace {
	n := netnstest.New(t)
	n.Add(t, "lo", "192.0.2.1/32")
	n.Add(t, "lo", "10.1.0.11/32")
	for _, port := range ports {
		netnstest.Listen(t, n.Do, fmt.Sprintf("10.1.0.11:%d", port), func(c net.Conn) { c.Close() })
	}
	return n
}

// reachable returns the ports of 192.0.2.1 that accept connections.
func reachable(t *testing.T, n *netnstest.Namespace, ports ...int) (open []int) {
	t.Helper()
	err := n.Do(func() error {
		for _, port := range ports {
			c, err := net.DialTimeout("tcp", fmt.Sprintf("192.0.2.1:%d", port), time.Minute)
			if err == nil {
				c.Close()
				open = append(open, port)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return open
}

// For one address, the kernel refuses overlapping ranges. So the old range has to be deleted
// first.
func TestRangesMayChange(t *testing.T) {
	all := []int{29999, 30000, 30004, 30010, 30020}
	n := newNode(t, all...)
	calls, _ := n.Shadow(t, "nft")
	newSink := func() reconcile.Reconciler {
		return reconcile.New(dataplane{"test"}, reconcile.Options[string, chain]{Equal: equal, Depth: depth, VerifyInterval: -1})
	}
	s := newSink()
	for _, test := range []struct {
		ports string
		want  []int
	}{
		{"30000-30010", []int{30000, 30004, 30010}},
		{"30000-30020", []int{30000, 30004, 30010, 30020}},
		{"30003-30005", []int{30004}},
		{"30004-30004", []int{30004}},
		{"30004", []int{30004}},
		{"30004-30020", []int{30004, 30010, 30020}},
		{"1-65535", all},
	} {
		if failed := pass(t, s, service("web", test.ports)); failed != nil {
			t.Errorf("%s: %v", test.ports, failed)
		}
		if got := reachable(t, n, all...); !slices.Equal(got, test.want) {
			t.Errorf("%s: ports %v are open, want %v", test.ports, got, test.want)
		}
		calls()
		s = newSink() // a restart
		if failed := pass(t, s, service("web", test.ports)); failed != nil {
			t.Errorf("%s after a restart: %v", test.ports, failed)
		}
		if written := slices.DeleteFunc(calls(), func(c string) bool { return strings.HasPrefix(c, "list ") }); len(written) > 0 {
			t.Errorf("%s: a restart writes %q", test.ports, written)
		}
	}
	// Another service takes the address, in the same pass.
	long := service(strings.Repeat("n", 63), "30010")
	long.Service.Namespace = strings.Repeat("x", 63)
	if failed := pass(t, s, long); failed != nil {
		t.Fatal(failed)
	}
	if got, want := reachable(t, n, all...), []int{30010}; !slices.Equal(got, want) {
		t.Errorf("ports %v are open, want %v", got, want)
	}
	rules := n.Run(t, netnstest.Program("nft"), "list", "table", "inet", "test")
	if got := strings.Count(rules, "log prefix"); got != 1 || strings.Count(rules, "jump log-") != 4 {
		t.Errorf("want one rule that logs, and a chain for each protocol and address:\n%s", rules)
	}
}

func service(name, ports string) *api.View {
	v := sinktest.View(sinktest.Node("n1"), sinktest.Service(name, "192.0.2.1 2001:db8::1 1"), "10.1.0.11@n1 fd01::11@n1")
	v.Service.AllPorts = true
	v.Service.Annotations = map[string]string{annotation: ports}
	return v
}

// pass delivers views in one pass. It returns the services that fail.
func pass(t *testing.T, s sink.Sink, views ...*api.View) sink.Failed {
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

// The program reads manifests, programs the node, and ends.
func TestProgram(t *testing.T) {
	all := []int{30000, 30010, 30020}
	n := newNode(t, all...)
	program := filepath.Join(t.TempDir(), "port-range")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	manifests, err := os.ReadFile("services.yaml")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "services.yaml")
	for ports, want := range map[string][]int{"30000-30010": {30000, 30010}, "30010-30020": {30010, 30020}, "wrong": nil} {
		text := strings.ReplaceAll(string(manifests), "30000-30010", ports)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		n.Run(t, program, "-i", file, "--node-name", "n1", "--once")
		if got := reachable(t, n, all...); !slices.Equal(got, want) {
			t.Errorf("%s: ports %v are open, want %v", ports, got, want)
		}
	}
}

func TestSkip(t *testing.T) {
	l := selection{logged: map[types.NamespacedName]string{}}
	for value, skipped := range map[string]bool{
		"30000-30100": false, "30000": false, "1-65535": false,
		"": true, "0-5": true, "5-4": true, "1-65536": true, "+1-2": true, "1-2-3": true, " 1": true, "-": true, "1; drop": true,
	} {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "s", Annotations: map[string]string{annotation: value}}}
		if got := l.skip(s); got != skipped {
			t.Errorf("%q: skipped %v, want %v", value, got, skipped)
		}
		if logged := len(l.logged) > 0; logged != skipped {
			t.Errorf("%q: logged %v, want %v", value, logged, skipped)
		}
	}
	if !l.skip(&corev1.Service{}) || len(l.logged) > 1 {
		t.Error("a service without the annotation is not skipped, or is logged")
	}
}
