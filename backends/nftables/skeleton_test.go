// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"errors"
	"go/parser"
	"go/token"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
)

// TestTheBackendRunsWithAnEmptyPath checks that the backend runs no other program.
func TestTheBackendRunsWithAnEmptyPath(t *testing.T) {
	t.Setenv("PATH", "")
	b, ns := start(t, Options{})
	mustSync(t, b, batchOf(true, set(view("web", []string{"10.96.0.1"}, []string{"10.0.0.1"}, nil))))
	if err := verifyAll(t, b); err != nil {
		t.Error(err)
	}
	b = startIn(t, ns, Options{})
	mustSync(t, b, batchOf(true))
	if err := b.Cleanup(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestThePackageImportsNoExec checks that the files of the package, except tests, do not
// import os/exec.
func TestThePackageImportsNoExec(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("no files of the package: %v", err)
	}
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range file.Imports {
			if s.Path.Value == `"os/exec"` && !strings.HasSuffix(name, "_test.go") {
				t.Errorf("%s imports os/exec", name)
			}
		}
	}
}

// TestARestartWithoutChangesMakesNoTransaction checks that a restart does not rewrite
// rules that are already correct.
func TestARestartWithoutChangesMakesNoTransaction(t *testing.T) {
	opts := Options{Options: backends.Options{PodInterfaces: []string{"cni0", "veth*"}, ClusterCIDRs: []netip.Prefix{
		netip.MustParsePrefix("10.0.0.0/13"), netip.MustParsePrefix("10.9.9.9/32"), netip.MustParsePrefix("fd00::/61"), netip.MustParsePrefix("::/0"),
	}, MasqueradeOutsiders: true, NodeAddresses: nodeaddr.Of()}}
	b, ns := start(t, opts)
	local := func(s *api.Service) {
		s.Type, s.ExternalTrafficToLocal, s.Ports[0].NodePort = api.LoadBalancer, true, 30001
		s.IPs.LoadBalancerIPs = api.NewIPSet(netip.MustParseAddr("203.0.113.1"))
		s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.LoadBalancerIPs, NodePorts: true, Prefixes: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}}
	}
	all := batchOf(true,
		set(view("plain", []string{"10.96.0.1", "fd00::1"}, []string{"10.0.0.1", "fd01::1"}, nil)),
		set(view("local", []string{"10.96.0.2"}, []string{"!10.0.0.1", "10.0.0.2"}, local)),
		set(view("affinity", []string{"10.96.0.4", "fd00::4"}, []string{"10.0.0.1", "10.0.0.2", "fd01::1"}, func(s *api.Service) {
			s.AffinitySeconds = 100
		})),
		set(view("none", []string{"10.96.0.3"}, nil, nil)))
	mustSync(t, b, all)
	opts.Observer = &backendtest.Observer{OnWrote: func(int, error) { t.Error("a restart without changes makes a transaction") }}
	again := startIn(t, ns, opts)
	mustSync(t, again, all)
	if err := verifyAll(t, again); err != nil {
		t.Error(err)
	}
}

// TestAChangeBetweenLoadAndReadIsRepaired changes the table after the skeleton was loaded
// and before the backend has read the table.
func TestAChangeBetweenLoadAndReadIsRepaired(t *testing.T) {
	ns := netnstest.New(t)
	var once sync.Once
	b := startIn(t, ns, Options{Options: backends.Options{Observer: &backendtest.Observer{OnWrote: func(int, error) {
		once.Do(func() { runNFT(t, ns, "flush chain inet kpng services\n", "-f", "-") })
	}}}})
	mustSync(t, b, batchOf(true, set(view("web", []string{"10.96.0.1"}, []string{"10.0.0.1"}, nil))))
	if err := verifyAll(t, b); err != nil {
		t.Error(err)
	}
}

// asker makes one connection after another, until the caller calls stop or a connection fails.
type asker struct {
	answers atomic.Int64
	cancel  context.CancelFunc
	ended   chan struct{}
	err     error
}

// keepAsking starts an asker from ns to addr. If a transaction comes between two lookups of a
// first packet, the packet is dropped, and the client repeats it after a second.
func keepAsking(ns *netnstest.Namespace, addr string) *asker {
	ctx, cancel := context.WithCancel(context.Background())
	a := &asker{cancel: cancel, ended: make(chan struct{})}
	go func() {
		defer close(a.ended)
		for ctx.Err() == nil && a.err == nil {
			if _, a.err = ask(ns, addr, 10*time.Second); a.err == nil {
				a.answers.Add(1)
			}
		}
	}()
	a.await(1)
	return a
}

// has reports whether there are n answers or the asker has ended.
func (a *asker) has(n int64) bool {
	select {
	case <-a.ended:
		return true
	default:
		return a.answers.Load() >= n
	}
}

// await waits until a.has(n).
func (a *asker) await(n int64) {
	for !a.has(n) {
		time.Sleep(time.Millisecond)
	}
}

// stop ends the asker after one more answer, and returns its error.
func (a *asker) stop() error {
	a.await(a.answers.Load() + 1)
	a.cancel()
	<-a.ended
	return a.err
}

var (
	webEndpoints = []string{"!10.0.1.2", "!10.0.2.2"}
	web          = func(s *api.Service) { s.Type, s.Ports[0].NodePort = api.NodePort, 30001 }
)

// TestATableOfAnotherLayoutStaysActiveUntilTheNewOneIsFilled starts with a table from
// another version of this package.
func TestATableOfAnotherLayoutStaysActiveUntilTheNewOneIsFilled(t *testing.T) {
	for _, test := range []struct{ file, old, new string }{
		{"layout-1.nft", "kpng", "kpng2"}, {"layout-1.nft", "kpng2", "kpng"}, {"layout-2.nft", "kpng", "kpng2"},
	} {
		t.Run(test.file+" "+test.old, func(t *testing.T) {
			text, err := os.ReadFile("testdata/" + test.file)
			if err != nil {
				t.Fatal(err)
			}
			names := [2]string{test.old, test.new}
			w := newPacketWorld(t)
			opts := Options{Options: backends.Options{NodeAddresses: nodeaddr.Of(netip.MustParseAddr("192.0.2.1"))}}
			runNFT(t, w.node, strings.Replace(string(text), "table inet kpng {", "table inet "+names[0]+" {", 1), "-f", "-")
			askers := []*asker{
				keepAsking(w.pod2, "10.96.0.1:80"), keepAsking(w.node, "10.96.0.1:80"), keepAsking(w.client, "192.0.2.1:30001"),
			}
			all := []*sink.Changes{
				batch(true, false, set(view("other", []string{"10.96.0.2"}, []string{"10.0.0.1"}, nil))),
				batch(false, false, set(view("web", []string{"10.96.0.1"}, webEndpoints, web))),
				batch(false, true),
			}
			b := startIn(t, w.node, opts)
			mustSync(t, b, all[0])
			b = startIn(t, w.node, opts) // without Stop, as after SIGKILL
			mustSync(t, b, all...)
			mustSync(t, startIn(t, w.node, opts), all...)
			for _, a := range askers {
				if err := a.stop(); err != nil {
					t.Errorf("after %d answers: %v", a.answers.Load(), err)
				}
			}
			if tables := runNFT(t, w.node, "", "list", "tables"); tables != "table inet "+names[1]+"\n" {
				t.Errorf("the tables are\n%s", tables)
			}
			if err := verifyAll(t, b); err != nil {
				t.Error(err)
			}
			if got, err := b.Inspect(t.Context(), netip.MustParseAddr("10.96.0.1"), api.TCP, 80, nil); err != nil || !strings.Contains(got, "table inet "+names[1]) {
				t.Errorf("the dataplane is %s, %v", got, err)
			}
			runNFT(t, w.node, "add table inet "+names[0]+"\n", "-f", "-")
			backendtest.TakeOver(&b.owner, w.node.FD, " ", opts.Instance)
			if err := b.Cleanup(t.Context()); err != nil {
				t.Error(err)
			}
			if tables := runNFT(t, w.node, "", "list", "tables"); tables != "" {
				t.Errorf("after Cleanup the tables are\n%s", tables)
			}
		})
	}
}

// TestATableOfAnotherLayoutStaysActiveWhileServicesFail makes the kernel refuse a service
// in the pass that fills the new table. If the service fails only once, the new table has
// it from the beginning. If the service fails again, the second pass replaces the table
// nevertheless, because the old table gets no changes.
func TestATableOfAnotherLayoutStaysActiveWhileServicesFail(t *testing.T) {
	for name, again := range map[string]bool{"in one pass": false, "in every pass": true} {
		t.Run(name, func(t *testing.T) {
			ns := netnstest.New(t)
			runNFT(t, ns, "", "-f", "testdata/layout-1.nft")
			var f faults
			b := startIn(t, ns, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}}, f.use)
			f.refuse("10.99.98.97")
			all := batchOf(true,
				set(view("web", []string{"10.96.0.1"}, []string{"10.99.98.97"}, nil)),
				set(view("ok", []string{"10.96.0.2"}, []string{"10.0.0.1"}, nil)))
			if err := b.Sync(t.Context(), all); !errors.Is(err, sink.ErrStartOver) {
				t.Fatalf("Sync returns %v, want a request for another pass", err)
			}
			if listing := runNFT(t, ns, "", "list", "table", "inet", "kpng"); !strings.Contains(listing, "hook prerouting") {
				t.Fatalf("after the first pass, the old table is not active:\n%s", listing)
			}
			if !again {
				f.exchange = nil
			}
			failed, ok := sink.Acknowledged(b.Sync(t.Context(), all))
			if want := map[bool]int{true: 1}[again]; !ok || len(failed) != want {
				t.Errorf("the second pass has %d failures, acknowledged: %t; want %d", len(failed), ok, want)
			}
			if tables := runNFT(t, ns, "", "list", "tables"); tables != "table inet kpng2\n" {
				t.Errorf("after the second pass, the tables are\n%s", tables)
			}
			f.exchange = nil
			mustSync(t, b, all)
			if err := verifyAll(t, b); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestHooksChangeInPlace restarts the backend with other priorities, or after another
// program has changed the chains. Meanwhile a client makes connections all the time.
func TestHooksChangeInPlace(t *testing.T) {
	for name, test := range map[string]struct {
		opts   Options
		damage string
	}{
		"other priorities":                   {opts: Options{DNATPriority: -110, SNATPriority: 90}},
		"a base chain with another priority": {damage: "delete chain inet kpng output; add chain inet kpng output { type nat hook output priority 7; }"},
		"a base chain without its hook":      {damage: "delete chain inet kpng output; add chain inet kpng output"},
		"a hook at another chain":            {damage: "flush chain inet kpng late-prerouting; flush chain inet kpng late-output; flush chain inet kpng refusals; delete chain inet kpng refusals; add chain inet kpng refusals { type nat hook input priority 7; }"},
		"another policy":                     {damage: "add chain inet kpng prerouting { policy drop; }"},
		"a missing map":                      {damage: "flush chain inet kpng restricted; delete map inet kpng restricted-addresses4"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newPacketWorld(t)
			addresses := nodeaddr.Of(netip.MustParseAddr("192.0.2.1"))
			all := batchOf(true, set(view("web", []string{"10.96.0.1"}, webEndpoints, web)))
			before := startIn(t, w.node, Options{Options: backends.Options{NodeAddresses: addresses}})
			mustSync(t, before, all)
			elements := tableContents(t, before)
			a := keepAsking(w.pod2, "10.96.0.1:80")
			runNFT(t, w.node, strings.ReplaceAll(test.damage, "; ", "\n"), "-f", "-")
			if err := before.Verify(t.Context()); test.damage != "" && !errors.Is(err, sink.ErrStartOver) {
				t.Errorf("Verify returns %v", err)
			}

			test.opts.NodeAddresses = addresses
			b := startIn(t, w.node, test.opts)
			if diff := cmp.Diff(elements, tableContents(t, b)); diff != "" {
				t.Errorf("Start changed elements (-before +after):\n%s", diff)
			}
			mustSync(t, b, all)
			if err := a.stop(); err != nil {
				t.Errorf("after %d answers: %v", a.answers.Load(), err)
			}
			if err := verifyAll(t, b); err != nil {
				t.Error(err)
			}
			fresh, other := start(t, test.opts)
			mustSync(t, fresh, all)
			if diff := cmp.Diff(lines(runNFT(t, other, "", "list", "table", "inet", "kpng")), lines(runNFT(t, w.node, "", "list", "table", "inet", "kpng"))); diff != "" {
				t.Errorf("the table differs from a fresh load (-fresh +actual):\n%s", diff)
			}
		})
	}
}

// TestCommentsNameTheService checks that a listing of nft has the name of a service port.
func TestCommentsNameTheService(t *testing.T) {
	b, ns := start(t, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}})
	named := func(name string) sink.Change {
		return set(view(name, []string{"10.96.0.1"}, []string{"10.0.0.1"}, func(s *api.Service) { s.Ports[0].Name = "http" }))
	}
	mustSync(t, b, batchOf(true, named("web")))
	mustSync(t, b, batchOf(false, sink.Change{Old: named("web").New, New: nil}, named("successor")))
	want := `10.96.0.1 . tcp . 80 comment "default/successor:http" : 7000:`
	if listing := runNFT(t, ns, "", "list", "map", "inet", "kpng", "services4"); !strings.Contains(listing, want) {
		t.Errorf("the listing does not contain\n%s\nbut is\n%s", want, listing)
	}
}

// TestNumbersOfClassesAreUnique checks that classOf finds a class by its number, that no two
// classes have the same number, and that nft can load each number.
func TestNumbersOfClassesAreUnique(t *testing.T) {
	seen := map[uint32]class{}
	check := func(c class) {
		n := c.number()
		if got, ok := classOf(c.family, n); !ok || got != c {
			t.Errorf("the number of %+v is that of %+v, %t", c, got, ok)
		}
		if other, ok := seen[n]; ok {
			t.Errorf("%+v and %+v have the same number", c, other)
		}
		if n < firstNumber || n > lastNumber || n&0xffff == 0 || plainLists.contains(n&^handlingMask) || numberedLists.contains(n&^endpointMask) {
			t.Errorf("number %s of %+v is not the number of a class", formatNumber(n), c)
		}
		seen[n] = c
	}
	for _, verdict := range []nodeview.Verdict{nodeview.Drop, nodeview.Reject} {
		check(class{family: api.IPv6, verdict: verdict})
	}
	for _, isAddress := range []bool{false, true} {
		for _, timeout := range []time.Duration{0, time.Second, 125 * time.Second, 11 * time.Minute, 24 * time.Hour} {
			for size := range uint8(21) {
				check(class{family: api.IPv4, isAddress: isAddress, size: size, numbered: timeout > 0, timeout: uint16(timeoutBits(timeout))})
			}
			for size := range uint8(17) {
				for _, algorithm := range []api.Algorithm{api.HashClient, api.HashConnection} {
					check(class{family: api.IPv4, isAddress: isAddress, size: size, numbered: true, algorithm: algorithm, timeout: uint16(timeoutBits(timeout))})
				}
			}
		}
	}
	check(class{family: api.IPv4, size: 4, numbered: true})
	for number := range uint32(1 << 12) {
		for _, base := range []uint32{verdictClass, addressClass, serviceClass, numberedClass} {
			if c, ok := classOf(api.IPv4, base|number); ok && c.number() != base|number {
				t.Errorf("%s is not the number of %+v", formatNumber(base|number), c)
			}
		}
	}
}
