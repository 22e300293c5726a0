// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/nodeaddrs"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

// refuseAffinity edits the input of iptables-restore, so that the kernel refuses rules for
// session affinity.
func refuseAffinity(p *programs) {
	p.edit("*-restore", "s/--update/& --hitcount 70000/")
}

func TestBadServiceFailsAlone(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		p := newPrograms(t)
		b := start(t, ns, v, p.use)
		good := view("s00002", "10.96.0.2", "10.1.0.1")
		mustSync(t, b, pass(good))
		refuseAffinity(p)
		views := many(20)
		views[2] = view("s00002", "10.96.0.2", "6.6.6.6", affinity) // has old rules
		views[9] = view("s00009", "10.96.0.9", "6.6.6.6", affinity)
		var failed *sink.Failed
		if err := b.Sync(t.Context(), pass(views...)); !errors.As(err, &failed) {
			t.Fatalf("Sync returned %v", err)
		}
		for _, i := range []int{2, 9} {
			if err := (*failed)[views[i].Key()]; err == nil || !strings.Contains(err.Error(), "failed") {
				t.Errorf("service %s: error %v", views[i].Key(), err)
			}
		}
		if len(*failed) != 2 {
			t.Errorf("%d services failed, want 2: %v", len(*failed), failed)
		}
		text := saveAll(t, ns, v.flavour)
		for i := range views {
			if has := strings.Contains(text, fmt.Sprintf("-d 10.96.0.%d/32 -p tcp", i)); has != (i != 9) {
				t.Errorf("service %d has rules: %t", i, has)
			}
		}
		if !strings.Contains(text, "10.1.0.1:8080") {
			t.Error("the failed service lost its old endpoint")
		}
		p.mend()
		mustSync(t, b, batch(views[2], views[9]))
		if text := saveAll(t, ns, v.flavour); strings.Count(text, "6.6.6.6:8080") != 4 { // each endpoint has a rule for known and a rule for new clients
			t.Errorf("not repaired:\n%s", text)
		}
		b.leftovers.PassAt = time.Time{}
		if err := verify(t, b); !errors.Is(err, sink.ErrStartOver) {
			t.Errorf("Verify after a pass with failures returned %v", err)
		}
	})
}

// holdLock holds the lock of iptables until release is called.
func holdLock(t *testing.T, file string) (release func()) {
	lock, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lock.Close() })
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	return func() { lock.Close() }
}

func TestLockHeldByAnotherProgram(t *testing.T) {
	file := filepath.Join(t.TempDir(), "xtables.lock")
	t.Setenv("XTABLES_LOCKFILE", file)
	ns := netnstest.New(t)
	b := start(t, ns, variant{flavourLegacy, true}, func(o *options) { o.LockWait = time.Second })
	mustSync(t, b, pass(everything()...))
	before := saveAll(t, ns, flavourLegacy)

	release := holdLock(t, file)
	web := view("web", "10.96.0.1", "10.1.0.9")
	err := b.Sync(t.Context(), batch(web))
	if _, ok := sink.Acknowledged(err); ok || !strings.Contains(fmt.Sprint(err), "held the lock of iptables") {
		t.Errorf("Sync returned %v", err)
	}
	if diff := cmp.Diff(before, saveAll(t, ns, flavourLegacy)); diff != "" {
		t.Errorf("the rules changed (-before +after):\n%s", diff)
	}
	if err := b.Sync(t.Context(), batch(view("new", "10.96.0.77", "10.1.0.9"))); err == nil {
		t.Error("Sync returned no error")
	}
	if err := verify(t, b); err != nil {
		t.Errorf("Verify before the retry returned %v", err)
	}
	release()
	mustSync(t, b, batch(web))
	if !strings.Contains(saveAll(t, ns, flavourLegacy), "10.1.0.9:8080") {
		t.Error("the change was not written when the lock was free")
	}
}

// Another program holds the lock for 30 seconds, which is longer than the default of
// LockWait. The driver reports errors that name the lock. The old rules stay until the
// lock is free, and then the change is written.
func TestLockHeldForHalfAMinute(t *testing.T) {
	const held = 30 * time.Second
	file := filepath.Join(t.TempDir(), "xtables.lock")
	// Parallel tests must not write programs: while a file is open for writing, for example
	// in a process that another test has just started, the kernel does not execute it.
	p := newPrograms(t)
	p.replace("*-legacy-restore", "XTABLES_LOCKFILE="+file+` exec %s "$@"`)
	t.Parallel()
	ns := netnstest.New(t)
	b := makeBackend(t, ns, variant{flavourLegacy, false}, p.use)
	src := sinktest.NewSource()
	src.SetNode(node)
	src.Set(everything()...)
	src.MarkSynced()
	results := make(chan sink.SyncResult, 10_000)
	d := sink.NewDriver(src, b, sink.Options{
		Observer: sink.Observer{Synced: func(r sink.SyncResult) { results <- r }},
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- d.Run(ctx) }()
	defer func() { cancel(); <-ended }()
	// succeed waits for a successful Sync.
	succeed := func(what string) {
		t.Helper()
		var last error
		for deadline := time.After(time.Minute); ; {
			select {
			case r := <-results:
				if last = r.Err; last == nil {
					return
				}
			case <-deadline:
				t.Fatalf("%s: no Sync succeeded for a minute; the last error is %v", what, last)
			}
		}
	}
	succeed("before the lock is held")
	before := saveAll(t, ns, flavourLegacy)

	release := holdLock(t, file)
	src.Set(view("web", "10.96.0.1 fd00:96::1", "10.1.0.9"))
	failures := 0
	for end := time.After(held); end != nil; {
		select {
		case r := <-results:
			if failures++; r.Err == nil || !strings.Contains(r.Err.Error(), "another program has held the lock of iptables (/run/xtables.lock) for 5s") {
				t.Errorf("while the lock is held, Sync returned %v", r.Err)
			}
		case <-end:
			end = nil
		}
	}
	if failures < 2 {
		t.Errorf("%d changes failed in %v, want more", failures, held)
	}
	if diff := cmp.Diff(before, saveAll(t, ns, flavourLegacy)); diff != "" {
		t.Errorf("the rules changed (-before +after):\n%s", diff)
	}
	release()
	succeed("after the lock is free")
	if text := saveAll(t, ns, flavourLegacy); !strings.Contains(text, "10.1.0.9:8080") {
		t.Errorf("the change was not written:\n%s", text)
	}
}

// TestFullSet uses a set that is full, because another program has replaced the original
// set by a smaller set.
func TestFullSet(t *testing.T) {
	ns := netnstest.New(t)
	b := start(t, ns, variant{flavourNFT, false})
	mustSync(t, b, pass(view("a", "", "", loadBalancer)))
	// The smaller set has room for two elements, and has one element already.
	ns.RunWith(t, "create SMALL hash:ip,port maxelem 2\nadd SMALL 203.0.113.1,tcp:80\nswap SMALL KPNG-REJECT4\ndestroy SMALL\n", "ipset", "restore")
	before := ns.Run(t, "ipset", "save", "KPNG-REJECT4")
	none, web := view("none", "10.96.0.2 10.96.0.3", ""), view("web", "10.96.0.1", "10.1.0.1")
	var failed *sink.Failed
	if err := b.Sync(t.Context(), batch(none, web)); !errors.As(err, &failed) || len(*failed) != 1 {
		t.Fatalf("Sync returned %v", err)
	}
	if err := (*failed)[none.Key()]; err == nil || !strings.Contains(err.Error(), "full") || !strings.Contains(err.Error(), "KPNG-REJECT4") {
		t.Errorf("the error is %v", err)
	}
	if !strings.Contains(saveAll(t, ns, flavourNFT), "10.1.0.1:8080") {
		t.Error("the other service was not programmed")
	}
	if diff := cmp.Diff(before, ns.Run(t, "ipset", "save", "KPNG-REJECT4")); diff != "" {
		t.Errorf("the set has elements of the service that failed (-before +after):\n%s", diff)
	}
	if err := verify(t, b); !errors.Is(err, sink.ErrStartOver) || !strings.Contains(err.Error(), "KPNG-REJECT4") {
		t.Errorf("Verify returned %v", err)
	}
	mustSync(t, b, pass(none, web))
	if text := saveAll(t, ns, flavourNFT); !strings.Contains(text, "add KPNG-REJECT4 10.96.0.2,tcp:80") || strings.Contains(text, "KPNG-REJECT4NEW") {
		t.Errorf("a pass did not mend the set:\n%s", text)
	}
	if err := verify(t, b); err != nil {
		t.Error(err)
	}
}

func TestMissingPrograms(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	for _, flavour := range []flavour{flavourDetected, flavourNFT, flavourLegacy} {
		b, err := newBackend(options{public: Options{Flavour: flavour.String()}})
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Start(t.Context()); err == nil || !strings.Contains(err.Error(), "apt-get install iptables") {
			t.Errorf("flavour %s: error %v", flavour, err)
		}
	}
}

// Without the programs of iptables, Cleanup fails if the kernel has chains of the instance.
func TestCleanupWithoutPrograms(t *testing.T) {
	ns := netnstest.New(t)
	b := start(t, ns, variant{flavourNFT, true})
	cleanup := func() error {
		path := os.Getenv("PATH")
		defer os.Setenv("PATH", path)
		os.Setenv("PATH", t.TempDir())
		return b.Cleanup(t.Context())
	}
	if err := cleanup(); err != nil {
		t.Errorf("without rules: %v", err)
	}
	mustSync(t, b, pass(everything()...))
	before := saveAll(t, ns, flavourNFT)
	if err := cleanup(); err == nil || !strings.Contains(err.Error(), "IPv4 rules of this instance in flavour nft: find program iptables-nft-save (Debian: apt-get install iptables)") {
		t.Errorf("with rules: %v", err)
	}
	if diff := cmp.Diff(before, saveAll(t, ns, flavourNFT)); diff != "" {
		t.Errorf("the rules changed (-before +after):\n%s", diff)
	}
}

// flush deletes all rules and chains of all programs in a flavour. Each table is one
// transaction, because a driver may repair its rules at the same time.
func flush(t *testing.T, ns *netnstest.Namespace, flavour flavour) {
	for _, family := range families {
		for _, table := range tables {
			ns.RunWith(t, "*"+table+"\nCOMMIT\n", programName(flavour, family, "restore"))
		}
	}
}

func TestChainsDeletedDuringPass(t *testing.T) {
	for name, last := range map[string][]*api.View{
		"before the next batch":      {view("b", "10.97.0.1", "10.1.0.2")},
		"before the end of the pass": nil,
	} {
		t.Run(name, func(t *testing.T) {
			eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
				// All three services have entries in the same dispatch chain.
				a, b, stale := view("a", "10.96.0.1", "10.1.0.1"), view("b", "10.97.0.1", "10.1.0.2"), view("stale", "10.98.0.1", "10.1.0.3")
				mustSync(t, start(t, ns, v), pass(a, b, stale))
				backend := start(t, ns, v)
				first := batch(a)
				first.First = true
				mustSync(t, backend, first)
				flush(t, ns, v.flavour)
				next := batch(last...)
				next.Last = true
				if err := backend.Sync(t.Context(), next); !errors.Is(err, sink.ErrStartOver) {
					t.Fatalf("Sync returned %v", err)
				}
				mustSync(t, backend, pass(a, b))
				text := saveAll(t, ns, v.flavour)
				for _, want := range []string{"-d 10.96.0.1/32 -p tcp", "10.1.0.1:8080", "-d 10.97.0.1/32 -p tcp", "10.1.0.2:8080", "-A PREROUTING -j KPNG-SERVICES"} {
					if !strings.Contains(text, want) {
						t.Errorf("after a new pass, %q is missing in:\n%s", want, text)
					}
				}
				if err := verify(t, backend); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// If a table has rules that only the program nft understands, iptables-save prints nothing.
// That does not mean that the table is empty.
func TestTableThatIPTablesCannotRead(t *testing.T) {
	ns := netnstest.New(t)
	b := start(t, ns, variant{flavourNFT, false})
	mustSync(t, b, pass(everything()...))
	want := saveAll(t, ns, flavourNFT)
	ns.Run(t, "nft", "add", "chain", "ip", "filter", "OTHER")
	ns.Run(t, "nft", "add", "rule", "ip", "filter", "OTHER", "ct", "mark", "set", "3")
	before := ns.Run(t, "nft", "--stateless", "list", "ruleset")
	unreadable := func(what string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), "nft list table ip filter") {
			t.Errorf("%s returned %v", what, err)
		}
	}
	unreadable("Verify", verify(t, b))
	unreadable("Sync", b.Sync(t.Context(), pass(everything()...)))
	if diff := cmp.Diff(before, ns.Run(t, "nft", "--stateless", "list", "ruleset")); diff != "" {
		t.Errorf("the rules changed (-before +after):\n%s", diff)
	}
	ns.Run(t, "nft", "delete", "chain", "ip", "filter", "OTHER")
	mustSync(t, b, pass(everything()...))
	if diff := cmp.Diff(want, saveAll(t, ns, flavourNFT)); diff != "" {
		t.Errorf("not repaired (-want +got):\n%s", diff)
	}
	ns.Run(t, "nft", "add", "chain", "ip", "filter", "OTHER")
	ns.Run(t, "nft", "add", "rule", "ip", "filter", "OTHER", "ct", "mark", "set", "3")
	unreadable("Cleanup", b.Cleanup(t.Context()))
}

// Tables that only the program nft understands have no chains of the instance. So they do
// not matter to a backend of flavour legacy.
func TestLegacyIgnoresTablesOfOthers(t *testing.T) {
	ns := netnstest.New(t)
	ns.RunWith(t, "table ip nat { chain OTHER { ct mark set 3; }; }\n", "nft", "-f", "-")
	b := start(t, ns, variant{flavourLegacy, false})
	mustSync(t, b, pass(everything()...))
	if len(b.stale) > 0 || b.leftovers.Exist {
		t.Errorf("%d families have old rules in flavour nft, leftovers exist: %t", len(b.stale), b.leftovers.Exist)
	}
	if err := b.Cleanup(t.Context()); err != nil {
		t.Error(err)
	}
}

// A rule may have the text of a message of iptables-save.
func TestRuleWithTextOfMessage(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		ns.Run(t, programName(v.flavour, api.IPv4, ""), "-t", "nat", "-A", "OUTPUT", "-m", "string", "--algo", "bm", "--string", "# Table `nat' is incompatible, use 'nft' tool.", "-j", "RETURN")
		b := start(t, ns, v)
		mustSync(t, b, pass(everything()...))
		if err := verify(t, b); err != nil {
			t.Error(err)
		}
	})
}

func TestFailingServiceKeepsOnlyItsOwnRules(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		bad := view("bad", "10.96.0.1", "!10.1.0.9")
		web, stale := view("web", "10.97.0.1", "10.1.0.1"), view("stale", "10.98.0.1", "10.1.0.3", nodePort)
		mustSync(t, start(t, ns, v, func(o *options) {
			o.NodeAddresses = nodeaddr.Of(netip.MustParseAddr("192.0.2.50"))
		}), pass(bad, web, stale, view("gone", "10.99.0.1", "")))

		p := newPrograms(t)
		b := start(t, ns, v, p.use)
		refuseAffinity(p)
		first := batch(view("web", "10.97.0.1", ""))
		first.First = true
		mustSync(t, b, first)
		if text := saveAll(t, ns, v.flavour); strings.Contains(text, "-d 10.97.0.1/32 -p tcp -m tcp --dport 80 -m comment --comment \"default/web:http\" -j KPNG-L") {
			t.Errorf("the service without endpoints still leads to the old ones:\n%s", text)
		}
		badNow := view("bad", "10.96.0.1", "10.1.0.8", affinity)
		last := batch(badNow)
		last.Last = true
		var failed *sink.Failed
		if err := b.Sync(t.Context(), last); !errors.As(err, &failed) || len(*failed) != 1 {
			t.Fatalf("Sync returned %v", err)
		}
		text := saveAll(t, ns, v.flavour)
		for _, old := range []string{"10.98.0.1", "10.99.0.1", "10.1.0.1:", "10.1.0.3:", "192.0.2.50"} {
			if strings.Contains(text, old) {
				t.Errorf("%s of the earlier process stayed:\n%s", old, text)
			}
		}
		wanted := []string{"-d 10.96.0.1/32 -p tcp", "10.1.0.9:8080"}
		if !v.withoutIPSet {
			wanted = append(wanted, "add KPNG-CLUSTERIPS4 10.96.0.1\n", "add KPNG-HAIRPIN4 10.1.0.9,tcp:8080,10.1.0.9\n")
		}
		for _, want := range wanted {
			if !strings.Contains(text, want) {
				t.Errorf("the failing service lost %q:\n%s", want, text)
			}
		}

		chains := func() int { return len(b.rulesets[0].chains) }
		mustSync(t, b, batch(view("web", "10.97.0.1", "!10.2.0.1")))
		before := chains()
		for i := range 5 {
			mustSync(t, b, batch(view("web", "10.97.0.1", fmt.Sprintf("!10.2.0.%d", i))))
		}
		if chains() != before {
			t.Errorf("%d chains after changes of endpoints, want %d", chains(), before)
		}

		p.mend()
		mustSync(t, b, batch(badNow))
		web = view("web", "10.97.0.1", "!10.2.0.1")
		mustSync(t, b, pass(badNow, web))
		got := saveAll(t, ns, v.flavour)
		fresh := netnstest.New(t)
		mustSync(t, start(t, fresh, v), pass(badNow, web))
		if diff := cmp.Diff(saveAll(t, fresh, v.flavour), got); diff != "" {
			t.Errorf("rules differ from those in an empty kernel (-want +got):\n%s", diff)
		}
	})
}

// If a service fails in a pass, the elements of this service stay in the sets.
func TestFailingServiceKeepsItsElements(t *testing.T) {
	const undelivered = "the pass does not deliver it"
	for _, flavour := range []flavour{flavourNFT, flavourLegacy} {
		for name, c := range map[string]struct {
			edit func(*api.Service)
			sync func(t *testing.T, b *backend, p *programs, c *sink.Changes) error
		}{
			"the kernel refuses its rules": {affinity, func(t *testing.T, b *backend, p *programs, c *sink.Changes) error {
				refuseAffinity(p)
				return b.Sync(t.Context(), c)
			}},
			"Sync is interrupted": {nil, func(t *testing.T, b *backend, _ *programs, c *sink.Changes) error {
				ctx, cancel := context.WithCancel(t.Context())
				cancel()
				return b.Sync(ctx, c)
			}},
			undelivered: {nil, func(*testing.T, *backend, *programs, *sink.Changes) error {
				return errors.New("not delivered")
			}},
		} {
			t.Run(fmt.Sprint(flavour, ", ", name), func(t *testing.T) {
				ns := netnstest.New(t)
				old := view("bad", "10.96.0.1 fd00:96::1", "", loadBalancer)
				mustSync(t, start(t, ns, variant{flavour, false}), pass(old))
				want := saveAll(t, ns, flavour)
				want = want[strings.Index(want, "add KPNG-"):]

				p := newPrograms(t)
				b := start(t, ns, variant{flavour, false}, p.use)
				first := batch(view("web", "10.97.0.1", "10.1.0.1"))
				first.First = true
				mustSync(t, b, first)
				bad := view("bad", "10.96.0.1 fd00:96::1", "10.1.0.1 fd00::1", loadBalancer, c.edit)
				if err := c.sync(t, b, p, batch(bad)); err == nil {
					t.Fatal("Sync returned no error")
				}
				last := batch()
				last.Last, last.Failing = true, []types.NamespacedName{bad.Key()}
				mustSync(t, b, last)
				text := saveAll(t, ns, flavour)
				for line := range strings.Lines(want) {
					if strings.HasPrefix(line, "add ") && !strings.Contains(text, line) {
						t.Errorf("the failing service lost %q:\n%s", line, text)
					}
				}

				p.mend()
				repaired := batch(view("bad", "10.96.0.1 fd00:96::1", "10.1.0.1 fd00::1", loadBalancer))
				repaired.First, repaired.Last = name == undelivered, name == undelivered
				mustSync(t, b, repaired)
				if text := saveAll(t, ns, flavour); strings.Contains(text, "add KPNG-REJECT") {
					t.Errorf("the service has endpoints, but its packets are rejected:\n%s", text)
				}
			})
		}
	}
}

// breakView gives the service default/bad a view whose rendering panics.
func breakView(c *sink.Changes) *sink.Changes {
	list := slices.Collect(c.Services)
	for i := range list {
		if list[i].Key.Name == "bad" {
			list[i].New = &api.View{}
		}
	}
	c.Services = slices.Values(list)
	return c
}

// If the rendering of a service panics and the rules of another service fail, all other
// services are programmed.
func TestPanicOfOneService(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		p := newPrograms(t)
		b := start(t, ns, v, p.use)
		p.edit("iptables-*-restore", "s/-m recent /-m missing /")
		var failed *sink.Failed
		err := b.Sync(t.Context(), breakView(pass(view("bad", "10.96.0.1", "10.1.0.1 fd00::1"),
			view("sticky", "10.96.0.2", "10.1.0.1", affinity), view("web", "10.96.0.3", "10.1.0.3"))))
		if !errors.As(err, &failed) || len(*failed) != 2 {
			t.Errorf("Sync returned %v", err)
		}
		if !strings.Contains(saveAll(t, ns, v.flavour), "10.1.0.3:8080") {
			t.Error("the other service was not programmed")
		}
	})
}

// Table filter sees packets after table nat has translated them. Rules of table filter
// must not mistake the address and port of an endpoint for a frontend.
func TestEndpointWithAddressOfFrontend(t *testing.T) {
	const addr = "10.9.0.1"
	external := func(s *api.Service) {
		s.Ports[0].Port = 8080
		s.IPs.ExternalIPs.Add(netip.MustParseAddr(addr))
	}
	ranges := func(s *api.Service) {
		external(s)
		s.IPs.LoadBalancerIPs, s.IPs.ExternalIPs = s.IPs.ExternalIPs, s.IPs.LoadBalancerIPs
		s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.LoadBalancerIPs, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/24")}}}
	}
	for name, c := range map[string]struct {
		views []*api.View
		dial  string
	}{
		"frontend of a service without endpoints": {
			[]*api.View{view("none", "10.96.0.2", "", external), view("web", "10.96.0.1", addr)}, "10.96.0.1:80",
		},
		"frontend of a service with endpoints on other nodes": {
			[]*api.View{view("elsewhere", "10.96.0.2", "10.1.0.1", external, externalLocal), view("web", "10.96.0.1", addr)}, "10.96.0.1:80",
		},
		"frontend with source ranges":           {[]*api.View{view("ranges", "10.96.0.2", addr, ranges)}, addr + ":8080"},
		"own frontend, and the policy is Local": {[]*api.View{view("local", "10.96.0.2", addr, external, externalLocal)}, addr + ":8080"},
		"own frontend with source ranges, and the policy is Local": {
			[]*api.View{view("local", "10.96.0.2", addr, loadBalancer, ranges, externalLocal)}, addr + ":8080",
		},
	} {
		t.Run(name, func(t *testing.T) {
			eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
				ns.Add(t, "lo", addr+"/24")
				ns.Run(t, "ip", "route", "add", "10.96.0.0/16", "dev", "lo")
				netnstest.Listen(t, ns.Do, addr+":8080", func(net.Conn) {})
				mustSync(t, start(t, ns, v), pass(c.views...))
				if err := ns.Do(func() error {
					conn, err := net.DialTimeout("tcp", c.dial, 20*time.Second)
					if err == nil {
						conn.Close()
					}
					return err
				}); err != nil {
					t.Errorf("connect: %v\n%s", err, saveAll(t, ns, v.flavour))
				}
			})
		})
	}
}

// programs has a link to each program that a backend may run. A test may replace the
// links by shell scripts, also while the backend runs.
type programs struct {
	tb  testing.TB
	dir string
}

func newPrograms(tb testing.TB) *programs {
	p := &programs{tb, tb.TempDir()}
	p.mend()
	return p
}

// use makes a backend run these programs.
func (p *programs) use(o *options) {
	o.lookPath = func(name string) (string, error) { return exec.LookPath(filepath.Join(p.dir, name)) }
}

// mend makes all programs real.
func (p *programs) mend() {
	p.each("*", func(name, real string) { p.put(name, func(path string) error { return os.Symlink(real, path) }) })
}

// replace replaces the programs whose names match a pattern by a shell script. Each %s in
// the script stands for the path of the real program.
func (p *programs) replace(pattern, script string) {
	p.each(pattern, func(name, real string) {
		text := "#!/bin/sh\n" + strings.ReplaceAll(script, "%s", real) + "\n"
		p.put(name, func(path string) error { return os.WriteFile(path, []byte(text), 0o755) })
	})
}

// edit makes programs edit their input with sed. Programs that read rules edit their output.
func (p *programs) edit(pattern, sed string) {
	script := "sed '" + sed + `' | %s "$@"`
	if strings.HasSuffix(pattern, "save") {
		script = `%s "$@" | sed '` + sed + `'`
	}
	p.replace(pattern, script)
}

// each calls f for the programs whose names match a pattern.
func (p *programs) each(pattern string, f func(name, real string)) {
	p.tb.Helper()
	names := []string{"iptables", "ipset"}
	for _, flavour := range []flavour{flavourNFT, flavourLegacy} {
		for _, family := range families {
			names = append(names, programName(flavour, family, "save"), programName(flavour, family, "restore"))
		}
	}
	found := false
	for _, name := range names {
		if ok, err := path.Match(pattern, name); err != nil {
			p.tb.Fatal(err)
		} else if !ok {
			continue
		}
		real, err := exec.LookPath(name)
		if err != nil {
			p.tb.Fatal(err)
		}
		f(name, real)
		found = true
	}
	if !found {
		p.tb.Fatalf("no program matches %s", pattern)
	}
}

// put writes a program with the function write, which gets the path of a new file.
func (p *programs) put(name string, write func(path string) error) {
	new := filepath.Join(p.tb.TempDir(), name)
	if err := write(new); err != nil {
		p.tb.Fatal(err)
	}
	if err := os.Rename(new, filepath.Join(p.dir, name)); err != nil {
		p.tb.Fatal(err)
	}
}

// If iptables or the kernel lacks a match that only some services need, the backend finds
// these services in few attempts.
func TestMissingMatchOfSomeServices(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		failures := 0
		p := newPrograms(t)
		b := start(t, ns, v, p.use, func(o *options) {
			o.Observer = &backendtest.Observer{OnWrote: func(_ int, err error) {
				if err != nil {
					failures++
				}
			}}
		})
		var views []*api.View
		for i := range 60 {
			edit := func(*api.Service) {}
			if i%2 == 0 {
				edit = affinity
			}
			views = append(views, view(fmt.Sprintf("s%02d", i), fmt.Sprintf("10.96.0.%d", i), "10.1.0.1 10.1.0.2", edit))
		}
		p.edit("iptables-*-restore", "s/-m recent /-m missing /")
		var failed *sink.Failed
		if err := b.Sync(t.Context(), pass(views...)); !errors.As(err, &failed) || len(*failed) != 30 {
			t.Fatalf("Sync returned %v", err)
		}
		if err := (*failed)[views[0].Key()]; err == nil || !strings.Contains(err.Error(), "missing") {
			t.Errorf("the error is %v", err)
		}
		if failures != 1 {
			t.Errorf("%d runs of iptables-restore failed, want 1", failures)
		}
		text := saveAll(t, ns, v.flavour)
		for i := range views {
			if has := strings.Contains(text, fmt.Sprintf("-d 10.96.0.%d/32 -p tcp", i)); has != (i%2 == 1) {
				t.Errorf("service %d has rules: %t", i, has)
			}
		}
		p.mend()
		mustSync(t, b, batch(views...))
		if err := verify(t, b); err != nil {
			t.Error(err)
		}
	})
}

// If a family lacks something that all services need, the rules of this family stay, and
// the other family works.
func TestMissingTargetOfOneFamily(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		mustSync(t, start(t, ns, v), pass(everything()...))
		old := ns.Run(t, programName(v.flavour, api.IPv6, "save"))

		p := newPrograms(t)
		b := start(t, ns, v, p.use, func(o *options) { o.MasqueradeMark = 0x8000 })
		p.edit("ip6tables-*-restore", "s/-j MASQUERADE --random-fully/-j MISSING/")
		only4, dual := view("only4", "10.96.1.1", "10.1.0.1"), view("dual", "10.96.1.2 fd00:96::12", "10.1.0.2 fd00::2")
		for range attempts - 1 {
			err := b.Sync(t.Context(), pass(only4, dual))
			if _, ok := sink.Acknowledged(err); ok || !strings.Contains(err.Error(), "MISSING") {
				t.Fatalf("Sync returned %v", err)
			}
		}
		var failed *sink.Failed
		if err := b.Sync(t.Context(), pass(only4, dual)); !errors.As(err, &failed) || len(*failed) != 1 {
			t.Fatalf("Sync returned %v", err)
		}
		if err := (*failed)[dual.Key()]; err == nil || !strings.Contains(err.Error(), "IPv6") || !strings.Contains(err.Error(), "MISSING") {
			t.Errorf("the error is %v", err)
		}
		for _, want := range []string{"10.1.0.1:8080", "10.1.0.2:8080"} {
			if !strings.Contains(ns.Run(t, programName(v.flavour, api.IPv4, "save"), "-t", "nat"), want) {
				t.Errorf("%s is missing in IPv4", want)
			}
		}
		if diff := cmp.Diff(withoutCounters(old), withoutCounters(ns.Run(t, programName(v.flavour, api.IPv6, "save")))); diff != "" {
			t.Errorf("the rules of IPv6 changed (-before +after):\n%s", diff)
		}

		p.mend()
		b.leftovers.PassAt = time.Time{}
		if err := verify(t, b); !errors.Is(err, sink.ErrStartOver) {
			t.Errorf("Verify returned %v", err)
		}
		mustSync(t, b, pass(only4, dual))
		if !strings.Contains(saveAll(t, ns, v.flavour), "[fd00::2]:8080") {
			t.Error("IPv6 was not repaired")
		}
		if err := verify(t, b); err != nil {
			t.Error(err)
		}
	})
}

// checkOldFlavour checks whether the instance has rules in a flavour.
func checkOldFlavour(t *testing.T, ns *netnstest.Namespace, flavour flavour, want bool) {
	t.Helper()
	for _, family := range families {
		if has := strings.Contains(ns.Run(t, programName(flavour, family, "save")), "KPNG-"); has != want {
			t.Errorf("%s has rules in flavour %s: %t, want %t", family, flavour, has, want)
		}
	}
}

// If rules fail in the new flavour, the rules in the other flavour may be the only rules
// that work.
func TestOldFlavourStaysWhileRulesFail(t *testing.T) {
	for _, flavours := range [][2]flavour{{flavourNFT, flavourLegacy}, {flavourLegacy, flavourNFT}} {
		for what, refuse := range map[string]func(*programs){
			"a family fails":  func(p *programs) { p.edit("ip6tables-*-restore", "s/-j MASQUERADE --random-fully/-j MISSING/") },
			"a service fails": refuseAffinity,
		} {
			t.Run(fmt.Sprintf("from %s, %s", flavours[0], what), func(t *testing.T) {
				ns := netnstest.New(t)
				mustSync(t, start(t, ns, variant{flavours[0], false}), pass(everything()...))
				p := newPrograms(t)
				b := start(t, ns, variant{flavours[1], false}, p.use)
				refuse(p)
				for range attempts {
					if err := b.Sync(t.Context(), pass(everything()...)); err == nil {
						t.Fatal("Sync returned no error")
					}
				}
				checkOldFlavour(t, ns, flavours[0], true)
				p.mend()
				mustSync(t, b, pass(everything()...))
				checkOldFlavour(t, ns, flavours[0], false)
			})
		}
	}
}

// If the rules in the other flavour cannot be read or removed, a later pass tries again.
func TestOldFlavourIsRemovedLater(t *testing.T) {
	t.Run("the lock is held", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "xtables.lock")
		t.Setenv("XTABLES_LOCKFILE", file)
		ns := netnstest.New(t)
		mustSync(t, start(t, ns, variant{flavourLegacy, false}), pass(everything()...))
		b := start(t, ns, variant{flavourNFT, false}, func(o *options) { o.LockWait = time.Second })
		release := holdLock(t, file)
		mustSync(t, b, pass(everything()...))
		release()
		checkOldFlavour(t, ns, flavourLegacy, true)
		b.leftovers.PassAt = time.Time{}
		if err := verify(t, b); !errors.Is(err, sink.ErrStartOver) {
			t.Errorf("Verify returned %v", err)
		}
		mustSync(t, b, pass(everything()...))
		checkOldFlavour(t, ns, flavourLegacy, false)
		if err := verify(t, b); err != nil {
			t.Error(err)
		}
	})
	t.Run("Start cannot read the rules", func(t *testing.T) {
		ns := netnstest.New(t)
		mustSync(t, start(t, ns, variant{flavourLegacy, false}), pass(everything()...))
		p := newPrograms(t)
		failed := filepath.Join(t.TempDir(), "failed")
		p.replace("iptables-legacy-save", `[ -e `+failed+` ] && exec %s "$@"; touch `+failed+`; exit 1`)
		b := start(t, ns, variant{flavourNFT, false}, p.use)
		mustSync(t, b, pass(everything()...))
		checkOldFlavour(t, ns, flavourLegacy, false)
	})
}

// withoutCounters returns the chains and rules of iptables-save.
func withoutCounters(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		if line, _, _ := strings.Cut(line, " ["); !strings.HasPrefix(line, "#") {
			b.WriteString(strings.TrimSpace(line) + "\n")
		}
	}
	return b.String()
}

// A cancelled Verify has used the CPU too, so a pause follows it.
func TestCancelledVerifyPauses(t *testing.T) {
	ns := netnstest.New(t)
	b := start(t, ns, variant{flavourLegacy, true})
	mustSync(t, b, pass(everything()...))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	b.verifyAt = time.Time{}
	if err := b.Verify(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Verify returned %v", err)
	}
	if !b.verifyAt.After(time.Now().Add(-time.Hour)) {
		t.Error("the next Verify may begin immediately")
	}
}

// A rule that an interrupted Sync has not written does not count as a change by another
// program.
func TestVerifyAfterInterruptedSync(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		b := start(t, ns, v)
		mustSync(t, b, pass(everything()...))
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		next := []*api.View{view("new", "10.96.0.77", "10.1.0.9"), view("none", "10.96.0.78", "")}
		if err := b.Sync(ctx, batch(next...)); !errors.Is(err, context.Canceled) {
			t.Errorf("Sync returned %v", err)
		}
		if err := verify(t, b); err != nil {
			t.Error(err)
		}
		mustSync(t, b, batch(next...))
		if err := verify(t, b); err != nil {
			t.Error(err)
		}
	})
}

// If changes of services cancel each Verify, a change by another program is found anyway.
func TestVerifyContinuesAfterCancellation(t *testing.T) {
	for _, family := range families {
		t.Run(family.String(), func(t *testing.T) {
			ns := netnstest.New(t)
			b := start(t, ns, variant{flavourLegacy, true})
			mustSync(t, b, pass(everything()...))
			ns.Run(t, programName(flavourLegacy, family, ""), "-t", "nat", "-A", "KPNG-MARK", "-j", "RETURN")
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			var err error
			for range len(families) * (maxInterrupted + 1) {
				b.verifyAt = time.Time{}
				if err = b.Verify(ctx); !errors.Is(err, context.Canceled) {
					break
				}
			}
			if !errors.Is(err, sink.ErrStartOver) {
				t.Errorf("the last Verify returned %v", err)
			}
		})
	}
}

// If the rules of one family cannot be read, changes in the other family are found.
func TestVerifyWhileOneFamilyFails(t *testing.T) {
	for name, end := range map[string]bool{"contexts do not end": false, "each context ends": true} {
		t.Run(name, func(t *testing.T) {
			ns := netnstest.New(t)
			p := newPrograms(t)
			b := start(t, ns, variant{flavourLegacy, true}, p.use)
			mustSync(t, b, pass(everything()...))
			p.replace("ip6tables-*-save", "exit 1")
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if end {
				cancel()
			}
			verify := func() error {
				b.verifyAt = time.Time{}
				return b.Verify(ctx)
			}
			for range len(families) * (maxInterrupted + 1) {
				if err := verify(); err == nil || errors.Is(err, sink.ErrStartOver) {
					t.Fatalf("Verify returned %v", err)
				}
			}
			ns.Run(t, "iptables-legacy", "-t", "nat", "-F", "KPNG-MARK")
			var err error
			for range maxInterrupted + 1 {
				err = verify()
			}
			if !errors.Is(err, sink.ErrStartOver) {
				t.Errorf("the last Verify returned %v", err)
			}
		})
	}
}

// The same applies if the kernel does not even report the number of rules of one family.
func TestVerifyWhileTheCountsOfOneFamilyFail(t *testing.T) {
	ns := netnstest.New(t)
	fails := false
	b := start(t, ns, variant{flavourLegacy, true}, func(o *options) {
		o.socket = func(domain, typ, protocol int) (int, error) {
			if fails && domain == unix.AF_INET {
				return 0, unix.EMFILE
			}
			return unix.Socket(domain, typ, protocol)
		}
	})
	mustSync(t, b, pass(everything()...))
	fails = true
	if err := b.Verify(t.Context()); err == nil || errors.Is(err, sink.ErrStartOver) {
		t.Fatalf("Verify returned %v", err)
	}
	ns.Run(t, "ip6tables-legacy", "-t", "nat", "-F", "KPNG-MARK")
	b.verifyAt = time.Time{}
	if err := b.Verify(t.Context()); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("Verify returned %v", err)
	}
}

// After its own changes, the backend need not read the rules. Therefore a Verify can
// succeed while services change all the time.
func TestOwnChangesStayVerified(t *testing.T) {
	ns := netnstest.New(t)
	p := newPrograms(t)
	b := start(t, ns, variant{flavourNFT, false}, p.use)
	mustSync(t, b, pass(everything()...))
	p.replace("*-save", "exit 1")
	mustSync(t, b,
		batch(view("web", "10.96.0.1 fd00:96::1", "10.1.0.7 fd00::7")),               // changes table nat in both families
		batch(view("new", "10.96.0.9", "10.1.0.1", nodePort, externalLocal)),         // changes both tables
		batch(view("other", "10.96.0.10", "")), batch(), batch(view("none", "", "")), // the first batch of this line changes only sets; the other two change no rules
	)
	if err := verify(t, b); err != nil {
		t.Errorf("Verify after own changes: %v", err)
	}
	ns.Run(t, "iptables-nft", "-t", "nat", "-F", "KPNG-MARK")
	mustSync(t, b, batch(view("web", "10.96.0.1", "10.1.0.8")))
	p.mend()
	if err := verify(t, b); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("Verify after a change by another program and an own change returned %v", err)
	}
}

// If another program edits a rule, a pass repairs it. If iptables-save still prints
// different rules after the pass, the rules only have another form, so Verify accepts
// them.
func TestRulesPrintedInAnotherForm(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		p := newPrograms(t)
		b := start(t, ns, v, p.use)
		mustSync(t, b, pass(everything()...))
		list := b.rulesets[0].entry(t, "10.96.0.1/32 -p tcp")
		edit := func() {
			ns.Run(t, programName(v.flavour, api.IPv4, ""), "-t", "nat", "-R", list, "1", "-p", "tcp", "-j", "DNAT", "--to-destination", "10.9.9.9:99")
		}
		for range 2 {
			edit()
			if err := verify(t, b); !errors.Is(err, sink.ErrStartOver) {
				t.Fatalf("Verify after an edit returned %v", err)
			}
			mustSync(t, b, pass(everything()...))
			if err := verify(t, b); err != nil {
				t.Fatal(err)
			}
		}
		p.edit("iptables-*-save", "s/--probability/--chance/")
		forget(b)
		if err := verify(t, b); !errors.Is(err, sink.ErrStartOver) {
			t.Errorf("the first Verify returned %v", err)
		}
		mustSync(t, b, pass(everything()...))
		if err := verify(t, b); err != nil {
			t.Errorf("Verify after a pass returned %v", err)
		}

		// A new chain with rules of that form is not a change by another program.
		inexact := len(b.rulesets[0].inexact)
		next := view("new", "10.96.0.77", "10.1.0.1 10.1.0.2")
		mustSync(t, b, batch(next))
		forget(b)
		if err := verify(t, b); err != nil {
			t.Errorf("Verify after a new service returned %v", err)
		}
		if got := len(b.rulesets[0].inexact); got != inexact+1 {
			t.Errorf("%d chains have rules in another form, want %d", got, inexact+1)
		}
		ns.Run(t, programName(v.flavour, api.IPv4, ""), "-t", "nat", "-R", b.rulesets[0].entry(t, "10.96.0.77/32 -p tcp"), "1", "-p", "tcp", "-j", "DNAT", "--to-destination", "10.9.9.9:99")
		if err := verify(t, b); !errors.Is(err, sink.ErrStartOver) {
			t.Errorf("Verify after an edit of the new chain returned %v", err)
		}
		mustSync(t, b, pass(append(everything(), next)...))
		mustSync(t, b, &sink.Changes{Node: node, Services: slices.Values([]sink.Change{{Key: next.Key(), Old: next}})})
		if err := verify(t, b); err != nil {
			t.Errorf("Verify after a deleted service returned %v", err)
		}
		if got := len(b.rulesets[0].inexact); got != inexact {
			t.Errorf("%d chains have rules in another form, want %d", got, inexact)
		}

		ns.Run(t, programName(v.flavour, api.IPv4, ""), "-t", "nat", "-F", list)
		if err := verify(t, b); !errors.Is(err, sink.ErrStartOver) {
			t.Errorf("Verify after a flush returned %v", err)
		}
	})
}

// A pass repairs a chain that another program has edited. If the program edits the chain
// again during the pass, Verify still finds changes of other chains. After the next pass
// has repaired the chain, Verify finds changes of this chain, too.
func TestEditRepeatedDuringPass(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		p := newPrograms(t)
		b := start(t, ns, v, p.use)
		mustSync(t, b, pass(everything()...))
		edit := []string{programName(v.flavour, api.IPv4, ""), "-t", "nat", "-R", b.rulesets[0].entry(t, "10.96.0.1/32 -p tcp"), "1", "-p", "tcp", "-j", "DNAT", "--to-destination", "10.9.9.9:99"}
		drifted := func(args ...string) {
			t.Helper()
			ns.Run(t, args...)
			if err := verify(t, b); !errors.Is(err, sink.ErrStartOver) {
				t.Errorf("Verify after %q returned %v", args, err)
			}
		}
		drifted(edit...)
		p.replace(programName(v.flavour, api.IPv4, "save"), strings.Join(edit, " ")+`; exec %s "$@"`)
		mustSync(t, b, pass(everything()...))
		p.mend()
		if err := verify(t, b); err != nil {
			t.Errorf("Verify after a repeated edit returned %v", err)
		}
		drifted(programName(v.flavour, api.IPv4, ""), "-t", "nat", "-R", "KPNG-MARK", "1", "-j", "RETURN")
		mustSync(t, b, pass(everything()...))
		if err := verify(t, b); err != nil {
			t.Error(err)
		}
		drifted(edit...)
	})
}

// startBesideOthers starts a backend with the service web, in a namespace with a chain
// OTHERS. It also returns the rules after the start.
func startBesideOthers(t *testing.T, ns *netnstest.Namespace, v variant) (b *backend, web *api.View, rules string) {
	ns.RunWith(t, "*nat\n:OTHERS - [0:0]\nCOMMIT\n", programName(v.flavour, api.IPv4, "restore"))
	b = start(t, ns, v)
	web = view("web", "10.96.0.1", "10.1.0.1")
	mustSync(t, b, pass(web))
	return b, web, saveAll(t, ns, v.flavour)
}

// Rules of other programs that lead to chains of the instance would prevent the deletion
// of these chains.
func TestRulesThatLeadToOwnChainsAreDeleted(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		b, web, want := startBesideOthers(t, ns, v)
		add := func() {
			ns.RunWith(t, "*nat\n-A OTHERS -p tcp -g "+b.rulesets[0].entry(t, "10.96.0.1/32 -p tcp")+`
-A PREROUTING -s 10.0.0.0/8 -m comment --comment "an \"old\" jump" -j KPNG-SERVICES
COMMIT
*filter
-I FORWARD -j KPNG-SERVICES
COMMIT
`, programName(v.flavour, api.IPv4, "restore"), "--noflush")
		}
		add()
		if err := verify(t, b); !errors.Is(err, sink.ErrStartOver) {
			t.Errorf("Verify returned %v", err)
		}
		mustSync(t, b, pass(web))
		if diff := cmp.Diff(want, saveAll(t, ns, v.flavour)); diff != "" {
			t.Errorf("not repaired (-want +got):\n%s", diff)
		}
		add()
		other := start(t, ns, v)
		mustSync(t, other, pass())
		if text := saveAll(t, ns, v.flavour); strings.Contains(text, "KPNG-L") || !strings.Contains(text, ":OTHERS") {
			t.Errorf("a pass did not delete the chain of a list, or deleted that of another program:\n%s", text)
		}
		if err := other.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		mustSync(t, b, pass(web))
		add()
		if err := b.Cleanup(t.Context()); err != nil {
			t.Error(err)
		}
		if text := saveAll(t, ns, v.flavour); strings.Contains(text, "KPNG-") || !strings.Contains(text, ":OTHERS") {
			t.Errorf("Cleanup left chains, or deleted that of another program:\n%s", text)
		}
	})
}

// A rule of another program that iptables cannot delete does not affect services.
func TestRuleThatCannotBeDeleted(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		b, web, want := startBesideOthers(t, ns, v)
		list := b.rulesets[0].entry(t, "10.96.0.1/32 -p tcp")
		ns.RunWith(t, "*nat\n-A OTHERS -p tcp -g "+list+"\n-A OTHERS -p udp -j KPNG-D10\nCOMMIT\n", programName(v.flavour, api.IPv4, "restore"), "--noflush")

		p := newPrograms(t)
		b = start(t, ns, v, p.use)
		p.edit("iptables-*-save", "s/-A OTHERS/& -m missing/")
		for _, c := range []*sink.Changes{pass(), pass(web), batch(view("web", "10.96.0.1", "10.1.0.2")), pass()} {
			mustSync(t, b, c)
			if err := verify(t, b); err != nil {
				t.Error(err)
			}
		}
		text := saveAll(t, ns, v.flavour)
		if strings.Contains(text, "10.1.0") || !strings.Contains(text, ":"+list+" ") || !strings.Contains(text, ":KPNG-D10 ") {
			t.Errorf("the chains to which the rules lead were deleted, or have rules of services:\n%s", text)
		}
		if err := b.rulesets[0].remove(t.Context()); err == nil {
			t.Error("remove returned no error")
		}
		p.mend()
		mustSync(t, b, pass(web))
		if diff := cmp.Diff(want, saveAll(t, ns, v.flavour)); diff != "" {
			t.Errorf("not repaired (-want +got):\n%s", diff)
		}
	})
}

// If iptables-save prints the jumps in another form, a pass does not add further jumps.
func TestJumpsPrintedInAnotherForm(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		p := newPrograms(t)
		b := start(t, ns, v, p.use)
		p.edit("iptables-*-save", "s/--ctstate NEW/--ctstate  NEW/")
		mustSync(t, b, pass(everything()...))
		forget(b)
		if err := verify(t, b); !errors.Is(err, sink.ErrStartOver) {
			t.Errorf("the first Verify returned %v", err)
		}
		for range 3 {
			mustSync(t, b, pass(everything()...))
			if err := verify(t, b); err != nil {
				t.Error(err)
			}
		}
		ns.Run(t, programName(v.flavour, api.IPv4, ""), "-R", "FORWARD", "1", "-s", "10.0.0.0/8", "-m", "conntrack", "--ctstate", "NEW", "-j", "KPNG-SERVICES")
		if err := verify(t, b); !errors.Is(err, sink.ErrStartOver) {
			t.Errorf("Verify after an edit of a jump returned %v", err)
		}
		ns.Run(t, programName(v.flavour, api.IPv4, ""), "-I", "FORWARD", "-s", "10.0.0.0/8", "-m", "conntrack", "--ctstate", "NEW", "-j", "KPNG-SERVICES")
		mustSync(t, b, pass(everything()...))
		text := ns.Run(t, programName(v.flavour, api.IPv4, "save"), "-t", "filter")
		if strings.Count(text, "-j KPNG-SERVICES") != 3 || strings.Contains(text, "10.0.0.0/8") {
			t.Errorf("table filter does not have its three jumps:\n%s", text)
		}
	})
}

// While a pass replaces a set, the services that it has not delivered yet keep their
// elements.
func TestReplacedSetKeepsElements(t *testing.T) {
	ns := netnstest.New(t)
	mustSync(t, start(t, ns, variant{flavourNFT, false}), pass(view("none", "10.96.0.1", "")))
	ns.RunWith(t, "create SMALL hash:ip,port maxelem 1\nadd SMALL 10.96.0.1,tcp:80\nswap SMALL KPNG-REJECT4\ndestroy SMALL\n", "ipset", "restore")
	first := batch(view("web", "10.96.0.2", "10.1.0.1"))
	first.First = true
	mustSync(t, start(t, ns, variant{flavourNFT, false}), first)
	if text := ns.Run(t, "ipset", "save", "KPNG-REJECT4"); !strings.Contains(text, fmt.Sprint("maxelem ", maxElements)) || !strings.Contains(text, "add KPNG-REJECT4 10.96.0.1,tcp:80") {
		t.Errorf("the set was not replaced, or lost its element:\n%s", text)
	}
}

// If a process ends while it replaces a set, a temporary set is left.
func TestSetLeftByAnUnfinishedReplacement(t *testing.T) {
	ns := netnstest.New(t)
	b := start(t, ns, variant{flavourNFT, false})
	mustSync(t, b, pass(everything()...))
	want := saveAll(t, ns, flavourNFT)
	ns.RunWith(t, "create SMALL hash:ip,port maxelem 2\nswap SMALL KPNG-REJECT4\ndestroy SMALL\ncreate KPNG-REJECT4NEW hash:net\n", "ipset", "restore")
	mustSync(t, b, pass(everything()...))
	if diff := cmp.Diff(want, saveAll(t, ns, flavourNFT)); diff != "" {
		t.Errorf("not repaired (-want +got):\n%s", diff)
	}
}

// If the backend cannot use sets, it uses rules.
func TestSetsThatCannotBeUsed(t *testing.T) {
	for _, flavour := range []flavour{flavourNFT, flavourLegacy} {
		for name, prepare := range map[string]func(t *testing.T, ns *netnstest.Namespace, p *programs) (mend func()){
			"a set has another type": func(t *testing.T, ns *netnstest.Namespace, _ *programs) func() {
				ns.Run(t, "ipset", "create", "KPNG-REJECT4", "hash:net")
				return func() { ns.Run(t, "ipset", "destroy", "KPNG-REJECT4") }
			},
			"the match is missing": func(_ *testing.T, _ *netnstest.Namespace, p *programs) func() {
				p.edit("iptables-*-restore", "s/-m set /-m missing /")
				return p.mend
			},
			// If the kernel lacks a match, some versions of iptables-restore name only the line
			// COMMIT in the error.
			"the match is missing in the kernel": func(_ *testing.T, _ *netnstest.Namespace, p *programs) func() {
				p.replace("iptables-*-restore", `input=$(cat)
case "$input" in
*"-m set "*)
	echo "iptables-restore: line $(echo "$input" | grep -n -m 1 COMMIT | cut -d : -f 1) failed" >&2
	exit 1
esac
echo "$input" | %s "$@"`)
				return p.mend
			},
		} {
			t.Run(fmt.Sprint(flavour, ", ", name), func(t *testing.T) {
				ns := netnstest.New(t)
				p := newPrograms(t)
				b := start(t, ns, variant{flavour, false}, p.use)
				mend := prepare(t, ns, p)
				mustSync(t, b, pass(everything()...))
				fresh := netnstest.New(t)
				mustSync(t, start(t, fresh, variant{flavour, true}), pass(everything()...))
				save := programName(flavour, api.IPv4, "save")
				if diff := cmp.Diff(withoutCounters(fresh.Run(t, save)), withoutCounters(ns.Run(t, save))); diff != "" {
					t.Errorf("rules differ from those without sets (-want +got):\n%s", diff)
				}
				if err := verify(t, b); err != nil {
					t.Error(err)
				}
				mend()
				b.leftovers.PassAt = time.Time{}
				if err := verify(t, b); !errors.Is(err, sink.ErrStartOver) {
					t.Errorf("Verify after a pass without sets returned %v", err)
				}
				mustSync(t, b, pass(everything()...))
				fresh = netnstest.New(t)
				mustSync(t, start(t, fresh, variant{flavour, false}), pass(everything()...))
				if diff := cmp.Diff(saveAll(t, fresh, flavour), saveAll(t, ns, flavour)); diff != "" {
					t.Errorf("rules differ from those with sets (-want +got):\n%s", diff)
				}
			})
		}
	}
}

// If ipset fails once, a pass still uses sets.
func TestIPSetFailsOnce(t *testing.T) {
	ns := netnstest.New(t)
	p := newPrograms(t)
	b := start(t, ns, variant{flavourNFT, false}, p.use)
	failed := filepath.Join(t.TempDir(), "failed")
	p.replace("ipset", `[ "$1" != restore ] || [ -e `+failed+` ] && exec %s "$@"; touch `+failed+`; exit 1`)
	mustSync(t, b, pass(everything()...))
	if _, err := os.Stat(failed); err != nil {
		t.Fatal("ipset did not fail")
	}
	if !b.rulesets[0].withSets {
		t.Error("the pass uses rules in place of sets")
	}
}

// The kernel releases a set some time after the rules that use it were deleted.
func TestCleanupWaitsForSets(t *testing.T) {
	ns := netnstest.New(t)
	ns.Run(t, "ipset", "create", "KPNG-NODE4", "hash:ip")
	file := filepath.Join(t.TempDir(), "attempt")
	p := newPrograms(t)
	p.replace("ipset", `if [ "$1" = destroy ] && [ ! -e `+file+`.2 ]; then
	if [ -e `+file+`.1 ]; then touch `+file+`.2; else touch `+file+`.1; fi
	echo "ipset v7.17: Set cannot be destroyed: it is in use by a kernel component" >&2
	exit 1
fi
exec %s "$@"`)
	r := &runner{ipset: filepath.Join(p.dir, "ipset"), netNS: ns.FD}
	if err := r.destroySets(t.Context(), (&Options{}).isOwn); err != nil {
		t.Fatal(err)
	}
	if text := ns.Run(t, "ipset", "list", "-name"); text != "" {
		t.Errorf("sets %q are left", text)
	}
}

func TestCleanupNamesSetInUse(t *testing.T) {
	ns := netnstest.New(t)
	b := start(t, ns, variant{flavourNFT, false})
	mustSync(t, b, pass(everything()...))
	ns.RunWith(t, "create others list:set\nadd others KPNG-CLUSTERIPS4\n", "ipset", "restore")
	if err := b.Cleanup(t.Context()); err == nil || !strings.Contains(err.Error(), "destroy set KPNG-CLUSTERIPS4 (rules and sets of other programs may use it)") {
		t.Errorf("error %v", err)
	}
	ns.Run(t, "ipset", "destroy", "others")
	if err := b.Cleanup(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestMissingCapabilityIsNamed(t *testing.T) {
	ns := netnstest.New(t)
	p := newPrograms(t)
	b := start(t, ns, variant{flavourLegacy, true}, p.use)
	p.replace("iptables-*-save", `exec setpriv --bounding-set=-net_raw --inh-caps=-net_raw %s "$@"`)
	if err := b.Sync(t.Context(), pass(everything()...)); err == nil || !strings.Contains(err.Error(), "CAP_NET_RAW") {
		t.Errorf("error %v", err)
	}
}

// If a service does not admit the source of a packet, the packet is dropped. A rule of
// another program must not translate such a packet.
func TestRefusedSourceIsNotTranslatedByOthers(t *testing.T) {
	udp := func(s *api.Service) {
		loadBalancer(s)
		sourceRanges(s)
		s.Ports[0].Protocol = api.UDP
	}
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		ns.Add(t, "lo", "10.9.0.1/24")
		ns.Run(t, "ip", "route", "add", "203.0.113.0/24", "dev", "lo")
		mustSync(t, start(t, ns, v), pass(view("ranges", "10.96.0.1", "10.1.0.1", udp)))
		ns.Run(t, programName(v.flavour, api.IPv4, ""), "-t", "nat", "-A", "OUTPUT", "-p", "udp", "--dport", "80", "-j", "DNAT", "--to-destination", "10.9.0.1:9")
		err := ns.Do(func() error {
			c, err := net.Dial("udp", "203.0.113.1:80")
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			_, err = c.Write([]byte("hello"))
			return err
		})
		if !errors.Is(err, unix.EPERM) { // a sender on this node gets EPERM if its packet is dropped
			t.Errorf("the packet was not dropped: error %v", err)
		}
	})
}

// If the kernel refuses the rules of a service in IPv6, a later change of the node's
// addresses must not bring back the service's old endpoints in IPv4.
func TestServiceThatFailsInOneFamily(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		addrs := nodeaddrs.Of(netip.MustParseAddr("192.0.2.1"))
		p := newPrograms(t)
		b := start(t, ns, v, p.use, func(o *options) { o.NodeAddresses = addrs })
		mustSync(t, b, pass(view("web", "10.96.0.1 fd00:96::1", "10.1.0.1 fd00::1")))
		p.edit("ip6tables-*-restore", "s/fd00::2/nonsense/")
		var failed *sink.Failed
		if err := b.Sync(t.Context(), batch(view("web", "10.96.0.1 fd00:96::1", "10.1.0.2 fd00::2"))); !errors.As(err, &failed) {
			t.Fatalf("Sync returned %v", err)
		}
		addrs.Set(netip.MustParseAddr("192.0.2.77"))
		if err := b.updateAddresses(t.Context()); err != nil {
			t.Fatal(err)
		}
		if text := saveAll(t, ns, v.flavour); !strings.Contains(text, "10.1.0.2:8080") || !strings.Contains(text, "[fd00::1]:8080") {
			t.Errorf("want the new endpoint of IPv4 and the old one of IPv6:\n%s", text)
		}
	})
}

// If two services claim a frontend, the service that was delivered last has the frontend,
// even after changes of the node's addresses.
func TestLastClaimWins(t *testing.T) {
	ns := netnstest.New(t)
	addrs := nodeaddrs.Of(netip.MustParseAddr("192.0.2.1"))
	b := start(t, ns, variant{flavourNFT, true}, func(o *options) { o.NodeAddresses = addrs })
	check := func(name string) {
		t.Helper()
		text := saveAll(t, ns, flavourNFT)
		if !strings.Contains(text, `-d 10.96.0.1/32 -p tcp -m tcp --dport 80 -m comment --comment "default/`+name+`:http"`) {
			t.Fatalf("service %s does not have its frontend:\n%s", name, text)
		}
	}
	a, z := view("a", "10.96.0.1", "10.1.0.1"), view("z", "10.96.0.1", "10.1.0.2")
	mustSync(t, b, pass(a), batch(z), batch(a))
	check("a")
	mustSync(t, b, batch(z))
	for i := range 20 { // the order in which services are rendered again is random
		addrs.Set(netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 2)}))
		if err := b.updateAddresses(t.Context()); err != nil {
			t.Fatal(err)
		}
		check("z")
	}
}

// A service that fails keeps its old rules, except those for an address that another
// service has taken over. The other service has no endpoints, so packets to this address
// are rejected.
func TestFailingServiceLosesItsAddress(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		addrs := nodeaddrs.Of(netip.MustParseAddr("192.0.2.1"))
		p := newPrograms(t)
		b := start(t, ns, v, p.use, func(o *options) { o.NodeAddresses = addrs })
		mustSync(t, b, pass(view("a", "10.96.0.1 10.97.0.1", "10.1.0.1")))
		refuseAffinity(p)
		var failed *sink.Failed
		if err := b.Sync(t.Context(), batch(view("a", "10.97.0.1", "10.1.0.1", affinity), view("z", "10.96.0.1", ""))); !errors.As(err, &failed) || len(*failed) != 1 {
			t.Fatalf("Sync returned %v", err)
		}
		check := func() {
			t.Helper()
			text := ns.Run(t, programName(v.flavour, api.IPv4, "save"), "-t", "nat")
			if strings.Contains(text, "-d 10.96.0.1/32") || !strings.Contains(text, "-d 10.97.0.1/32") {
				t.Errorf("table nat must have the second address only:\n%s", text)
			}
			if err := verify(t, b); err != nil {
				t.Error(err)
			}
		}
		check()
		addrs.Set(netip.MustParseAddr("192.0.2.2"))
		if err := b.updateAddresses(t.Context()); err != nil {
			t.Fatal(err)
		}
		check()
	})
}

// If ipset is installed but the kernel has no sets, Cleanup removes the rules.
func TestCleanupWithoutSetsInKernel(t *testing.T) {
	ns := netnstest.New(t)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "ipset"), []byte("#!/bin/sh\necho 'Cannot open session to kernel.' >&2\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	b := start(t, ns, variant{flavourNFT, false})
	mustSync(t, b, pass(everything()...))
	if err := b.Cleanup(t.Context()); err != nil {
		t.Error(err)
	}
	checkOldFlavour(t, ns, flavourNFT, false)
}

// The search for old rules in flavour legacy does not make the kernel load a table.
func TestLegacyTablesAreNotLoaded(t *testing.T) {
	ns := netnstest.New(t)
	ns.Run(t, "iptables-legacy", "-t", "nat", "-A", "OUTPUT", "-p", "tcp", "--dport", "1", "-j", "RETURN")
	b := start(t, ns, variant{flavourNFT, true})
	mustSync(t, b, pass(everything()...))
	if err := b.Cleanup(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(ns.Run(t, "cat", "/proc/net/ip_tables_names")); got != "nat" {
		t.Errorf("the kernel has loaded the tables %q, want nat", got)
	}
}

// The backend lists its chains and deletes empty tables although another program
// constantly changes tables of nf_tables.
func TestCleanupDuringChangesOfOtherTables(t *testing.T) {
	ns := netnstest.New(t)
	b := start(t, ns, variant{flavourNFT, true})
	mustSync(t, b, passOf(many(300))...)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		c := netfilter.NewConn(ns.FD)
		defer c.Close()
		for ctx.Err() == nil {
			if err := c.Transact(ctx, func(w *netfilter.Builder) {
				at := w.Begin(nfTables|unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, unix.NFPROTO_INET)
				w.String(unix.NFTA_TABLE_NAME, "other")
				w.End(at)
			}); err != nil {
				t.Error(err)
				return
			}
		}
	})
	defer running.Wait()
	defer cancel()
	for range 20 {
		if has, err := b.rulesets[0].hasChains(t.Context()); !has || err != nil {
			t.Fatalf("the instance has chains: %t (%v)", has, err)
		}
	}
	for range 20 {
		if err := deleteEmptyTables(t.Context(), ns.FD, api.IPv4); err != nil {
			t.Fatal(err)
		}
	}
}

// After Stop, the process has no more sockets than before Start.
func TestStopClosesSockets(t *testing.T) {
	ns := netnstest.New(t)
	sockets := func() (n int) {
		files, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if to, _ := os.Readlink("/proc/self/fd/" + file.Name()); strings.HasPrefix(to, "socket:") {
				n++
			}
		}
		return n
	}
	before := sockets()
	b := start(t, ns, variant{flavourNFT, true})
	mustSync(t, b, pass(everything()...), batch(view("web", "10.96.0.1", "10.1.0.9")))
	if got := sockets(); got != before+2 {
		t.Errorf("%d sockets after Sync, want %d: netlink, and the ownership", got, before+2)
	}
	if err := b.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := sockets(); got != before {
		t.Errorf("%d sockets after Stop, want %d", got, before)
	}
}

// Cleanup deletes only tables that the programs of iptables create.
func TestCleanupKeepsTablesOfOthers(t *testing.T) {
	ns := netnstest.New(t)
	ns.RunWith(t, "table ip nat {}\ntable ip6 filter { chain input { type filter hook input priority 0; policy accept; }; }\n", "nft", "-f", "-")
	before := ns.Run(t, "nft", "list", "ruleset")
	b, err := newBackend(options{public: Options{Options: backends.Options{NetNS: ns.FD}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Cleanup(t.Context()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, ns.Run(t, "nft", "list", "ruleset")); diff != "" {
		t.Errorf("tables changed (-before +after):\n%s", diff)
	}
}

type badConntrack struct{ sink.Func }

func (badConntrack) Start(context.Context) error { return errors.New("no connection tracking") }

// A driver does not stop a backend that did not start.
func TestFailedStartLeavesNoGoroutine(t *testing.T) {
	ns := netnstest.New(t)
	b, err := newBackend(options{public: Options{Options: backends.Options{NetNS: ns.FD, Conntrack: badConntrack{}}}})
	if err != nil {
		t.Fatal(err)
	}
	others := goleak.IgnoreCurrent()
	if err := b.Start(t.Context()); err == nil {
		t.Fatal("Start returned no error")
	}
	goleak.VerifyNone(t, others)
}

// impatient is a sink whose Verify is called every 10 ms.
type impatient struct{ sink.Sink }

func (i *impatient) Unwrap() sink.Sink           { return i.Sink }
func (*impatient) VerifyInterval() time.Duration { return 10 * time.Millisecond }

// With a driver, the backend recovers from faults without help.
func TestDriverRecoversFromFaults(t *testing.T) {
	lockFile := filepath.Join(t.TempDir(), "xtables.lock")
	t.Setenv("XTABLES_LOCKFILE", lockFile)
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		src := sinktest.NewSource()
		src.SetNode(node)
		src.Set(everything()...)
		src.MarkSynced()
		b := makeBackend(t, ns, v, func(o *options) { o.LockWait = time.Second })
		results := make(chan sink.SyncResult, 10_000)
		d := sink.NewDriver(src, &impatient{b}, sink.Options{
			Observer: sink.Observer{
				Synced: func(r sink.SyncResult) { results <- r },
				Verified: func(error) { // ends the pause, so that the next Verify compares rules
					b.mu.Lock()
					defer b.mu.Unlock()
					b.verifyAt = time.Time{}
				},
			},
		})
		// until receives results of Sync. It returns when the function ok returns true
		// for a result. It fails the test if no result arrives for a minute.
		until := func(what string, ok func(sink.SyncResult) bool) {
			t.Helper()
			var last error
			for {
				select {
				case r := <-results:
					if last = r.Err; ok(r) {
						return
					}
				case <-time.After(time.Minute):
					t.Fatalf("no Sync for a minute while waiting until %s; the last error is %v; the rules are:\n%s", what, last, saveAll(t, ns, v.flavour))
				}
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- d.Run(ctx) }()
		defer func() { cancel(); <-ended }()
		until("the first pass ends", func(r sink.SyncResult) bool { return r.Passed })
		want := saveAll(t, ns, v.flavour)
		repaired := func(r sink.SyncResult) bool { return r.Err == nil && saveAll(t, ns, v.flavour) == want }

		flush(t, ns, v.flavour)
		until("a flush is repaired", repaired)

		if v.flavour == flavourLegacy {
			release := holdLock(t, lockFile)
			src.Set(view("web", "10.96.0.1 fd00:96::1", "10.1.0.9"))
			failures := 0
			until("changes fail three times", func(r sink.SyncResult) bool {
				if r.Err != nil && strings.Contains(r.Err.Error(), "held the lock of iptables") {
					failures++
				}
				return failures == 3
			})
			if text := saveAll(t, ns, v.flavour); text != want {
				t.Errorf("while another program has the lock, the rules changed (-want +got):\n%s", cmp.Diff(want, text))
			}
			src.Set(everything()...)
			release()
			until("the lock is free", repaired)
		}

		if !v.withoutIPSet {
			ns.RunWith(t, "create SMALL hash:ip,port maxelem 1\nswap SMALL KPNG-REJECT4\ndestroy SMALL\n", "ipset", "restore")
			src.Set(view("one", "10.96.1.1", ""), view("two", "10.96.1.2", ""))
			until("the small set is replaced", func(r sink.SyncResult) bool {
				text := saveAll(t, ns, v.flavour)
				return r.Err == nil && strings.Contains(text, "10.96.1.1,tcp:80") && strings.Contains(text, "10.96.1.2,tcp:80")
			})
			src.Delete(types.NamespacedName{Namespace: "default", Name: "one"}, types.NamespacedName{Namespace: "default", Name: "two"})
			until("the services are deleted", repaired)
		}
	})
}
