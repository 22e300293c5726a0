// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/kernelnode"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/internal/sysctl"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

func TestInvalidOptionsAreRefused(t *testing.T) {
	for name, opts := range map[string]Options{
		"an instance with a space":                         {Options: backends.Options{Instance: "a b"}},
		"an instance with the table of the backend ipvs":   {Options: backends.Options{Instance: "ipvs"}},
		"an instance with a table of an ipvs instance":     {Options: backends.Options{Instance: "ipvs-a"}},
		"a mark with two bits":                             {Options: backends.Options{MasqueradeMark: 0x3}},
		"kube-proxy's mark":                                {Options: backends.Options{MasqueradeMark: 0x4000}},
		"an interface name with a quote":                   {Options: backends.Options{PodInterfaces: []string{`x" accept`}}},
		"MasqueradeOutsiders without a definition of pods": {Options: backends.Options{MasqueradeOutsiders: true}},
		"a priority before connection tracking":            {DNATPriority: -300},
		"the priority of the last chains":                  {DNATPriority: math.MaxInt32},
	} {
		if _, err := newBackend(options{public: opts}); err == nil {
			t.Errorf("New accepts %s", name)
		}
	}
}

func TestSetSysctlsEnablesForwarding(t *testing.T) {
	ns := netnstest.New(t)
	b := makeBackend(t, ns, Options{}, func(o *options) { o.Sysctls = backends.SetSysctls })
	if err := b.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, setting := range sysctl.Forwarding {
		var value int
		if err := ns.Do(func() (err error) { value, err = sysctl.Kernel.Read(setting.Name); return err }); err != nil {
			t.Fatal(err)
		}
		if value != 1 {
			t.Errorf("%s is %d, want 1", setting.Name, value)
		}
	}
}

// TestAFullMapFailsTheServiceThatFillsIt makes a map with room for four endpoints, and
// programs two services. One of them does not fit. This service fails with an error that
// names the map, and the other service is programmed.
func TestAFullMapFailsTheServiceThatFillsIt(t *testing.T) {
	ns := netnstest.New(t)
	runNFT(t, ns, `table inet kpng { map endpoints4 { type classid . inet_proto . classid : ipv4_addr . inet_service; size 4; }; }
`, "-f", "-")
	b := startIn(t, ns, Options{})
	small := view("small", []string{"10.96.0.1"}, []string{"10.0.0.1", "10.0.0.2"}, nil)
	large := view("large", []string{"10.96.0.2"}, []string{"10.0.0.3", "10.0.0.4", "10.0.0.5"}, nil)
	err := b.Sync(t.Context(), batchOf(true, set(large), set(small)))
	failed, ok := sink.Acknowledged(err)
	if !ok || len(failed) != 1 {
		t.Fatalf("Sync returns %v, want one service that failed", err)
	}
	for key, err := range failed {
		if !errors.Is(err, unix.ENFILE) || !strings.Contains(err.Error(), "endpoints4") {
			t.Errorf("%s failed with %v, want that the map is full", key, err)
		}
	}
	// When the programmed service is deleted, there is room for the other service.
	for _, v := range []*api.View{small, large} {
		if _, ok := failed[v.Key()]; !ok {
			mustSync(t, b, batchOf(false, sink.Change{Old: v, Key: v.Key()}))
			delete(failed, v.Key())
		}
	}
	for key := range failed {
		v := map[string]*api.View{"small": small, "large": large}[key.Name]
		mustSync(t, b, batchOf(false, sink.Change{New: v, Unsure: true}))
	}
	if err := verifyAll(t, b); err != nil {
		t.Error(err)
	}
}

func TestFailuresNameTheElement(t *testing.T) {
	b, ns := start(t, Options{})
	mustSync(t, b, batchOf(true))
	// Delete the map of frontends, so that the kernel refuses to add a frontend to it.
	runNFT(t, ns, "delete chain inet kpng output\nflush chain inet kpng services\nflush chain inet kpng lookup4\nflush chain inet kpng restricted-nodeport4\ndelete map inet kpng services4\n", "-f", "-")
	err := b.Sync(t.Context(), batchOf(false, set(view("web", []string{"10.96.0.1"}, []string{"10.0.0.1"}, nil))))
	var failed sink.Failed
	failed, _ = sink.Acknowledged(err)
	if err := failed[types.NamespacedName{Namespace: "default", Name: "web"}]; err == nil ||
		!errors.Is(err, syscall.ENOENT) || !strings.Contains(err.Error(), "10.96.0.1 . tcp . 80") {
		t.Errorf("the service failed with %v, want ENOENT and the element", err)
	}
}

func TestServiceWithManyEndpoints(t *testing.T) {
	b, _ := start(t, Options{})
	const n = 65_536
	eps := make([]string, n)
	for i := range eps {
		eps[i] = netip.AddrFrom4([4]byte{11, 0, byte(i >> 8), byte(i)}).String()
	}
	many := view("many", []string{"10.96.0.1"}, eps, nil)
	mustSync(t, b, batchOf(true, set(many)))
	check := func(want int) {
		t.Helper()
		lines := tableContents(t, b)
		if got := len(strings.Split(lines[1], ", ")) - 1; got != want || len(lines) != 2 {
			t.Errorf("the table has %d endpoints, want %d", got, want)
		}
	}
	check(n)
	fewer := view("many", []string{"10.96.0.1"}, eps[1:], nil)
	mustSync(t, b, batchOf(false, sink.Change{Old: many, New: fewer}))
	check(n - 1)
	if err := verifyAll(t, b); err != nil {
		t.Error(err)
	}
}

func TestCleanupDeletesOnlyItsTable(t *testing.T) {
	ns := netnstest.New(t)
	one, two := startIn(t, ns, Options{Options: backends.Options{Instance: "one"}}), startIn(t, ns, Options{Options: backends.Options{Instance: "two"}})
	runNFT(t, ns, "table inet other { chain c { counter packets 0 bytes 0; }; }\n", "-f", "-")
	web := view("web", []string{"10.96.0.1"}, []string{"10.0.0.1"}, nil)
	mustSync(t, one, batchOf(true, set(web)))
	mustSync(t, two, batchOf(true, set(web)))
	for range 2 {
		if err := one.Cleanup(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if tables := runNFT(t, ns, "", "list", "tables"); tables != "table inet kpng-two\ntable inet other\n" {
		t.Errorf("after Cleanup the tables are\n%s", tables)
	}
	if err := verifyAll(t, two); err != nil {
		t.Error(err)
	}
}

// startVaried starts a backend and programs services of many kinds.
func startVaried(t *testing.T) *netnstest.Namespace {
	b, ns := start(t, Options{Options: backends.Options{PodInterfaces: []string{"cni0", "veth*"}, ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, MasqueradeOutsiders: true}, ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00::/64")}, DropInvalid: true})
	var list []sink.Change
	for i := range 9 {
		list = append(list, set(view(fmt.Sprint("svc-", i), []string{fmt.Sprintf("10.96.0.%d", i), fmt.Sprintf("fd00::%x", i)},
			[]string{"10.0.0.1", "10.0.0.2", "!10.0.0.3", "fd01::1", "!fd01::2"}, func(s *api.Service) {
				s.Type = api.LoadBalancer
				s.Ports[0].NodePort = int32(30000 + i)
				s.ExternalTrafficToLocal = i%2 == 0
				s.IPs.LoadBalancerIPs = api.NewIPSet(netip.AddrFrom4([4]byte{203, 0, 113, byte(i)}), netip.MustParseAddr(fmt.Sprintf("2001:db8::%x", i)))
				if i%3 == 0 {
					affine(s)
				}
				if i%4 == 0 {
					s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.LoadBalancerIPs}}
					for _, r := range []string{"128.0.0.0/1", "192.0.2.0/24", "192.0.2.7/32", "2001:db8::/37", "2001:db8::9/128", "8000::/1"} {
						s.SourceRanges[0].Prefixes = append(s.SourceRanges[0].Prefixes, netip.MustParsePrefix(r))
					}
				}
			})))
	}
	mustSync(t, b, batchOf(true, list...))
	return ns
}

// TestNftListsTheTable lists the table with each program in the environment variable
// KPNG_TEST_NFT. hack/nft-versions sets this variable to old and new versions of nft.
func TestNftListsTheTable(t *testing.T) {
	ns := startVaried(t)
	elements := func(listing string) (n int) {
		listing = strings.ReplaceAll(listing, " addr . port to ", " to ") // only nft 0.9.8 writes that
		for _, line := range fields(listing) {
			if strings.Contains(line, " . ") || strings.Contains(line, ":") {
				n++
			}
		}
		return n
	}
	want := elements(runNFT(t, ns, "", "list", "ruleset"))
	t.Logf("the table has %d elements and rules with addresses or numbers", want)
	for _, program := range filepath.SplitList(os.Getenv("KPNG_TEST_NFT")) {
		for _, args := range [][]string{{"list", "ruleset"}, {"list", "table", "inet", "kpng"}} {
			if got := elements(ns.Run(t, append([]string{program}, args...)...)); got != want {
				t.Errorf("%s %v lists %d elements and rules, want %d", program, args, got, want)
			}
		}
	}
}

// TestAffinityWithManyEndpoints programs services with more endpoints than affinity
// supports, and then with fewer.
func TestAffinityWithManyEndpoints(t *testing.T) {
	b, _ := start(t, Options{})
	var old *api.View
	for _, n := range []int{maxNumberedEndpoints + 2, maxNumberedEndpoints - 1} {
		now := numberedService(1, n)
		now.Service.AffinitySeconds = 86_400
		mustSync(t, b, batchOf(old == nil, sink.Change{Old: old, New: now}))
		old = now
		if err := verifyAll(t, b); err != nil {
			t.Errorf("with %d endpoints: %v", n, err)
		}
		m := mapID{kind: kindSlots, family: api.IPv4}
		if got, want := b.table.state.digests[m].n, min(n, maxNumberedEndpoints); got != want {
			t.Errorf("with %d endpoints, %s has %d elements, want %d", n, m.name(), got, want)
		}
	}
}

// TestListingLoads checks that nft can load a table that nft has listed. Users save a
// ruleset as such a listing and load it later.
func TestListingLoads(t *testing.T) {
	ns := startVaried(t)
	listing := runNFT(t, ns, "", "list", "ruleset")
	other := netnstest.New(t)
	runNFT(t, other, listing, "-f", "-")
	if again := runNFT(t, other, "", "list", "ruleset"); strings.Join(lines(again), "\n") != strings.Join(lines(listing), "\n") {
		t.Errorf("the listing after a load is\n%s\nwant\n%s", again, listing)
	}
}

func TestDataplane(t *testing.T) {
	b, ns := start(t, Options{})
	web := view("web", []string{"10.96.0.1"}, []string{"10.0.0.1", "10.0.0.2"}, nil)
	mustSync(t, b, batchOf(true, set(web)))
	runNFT(t, ns, "delete element inet kpng endpoints4 { 7000:10 . tcp . 2 }\n", "-f", "-")
	got, err := b.Inspect(t.Context(), netip.MustParseAddr("10.96.0.1"), api.TCP, 80, web)
	if err != nil {
		t.Fatal(err)
	}
	want := `table inet kpng
  services4 10.96.0.1 . tcp . 80 : 7000:11
  lists4 7000:10 : 7f00:2 (list4-2)
  endpoints4 7000:10 . tcp . 1 : 10.0.0.1 . 8080
- endpoints4 7000:10 : 10.0.0.2 . 8080
`
	if got != want {
		t.Errorf("the dataplane is\n%swant\n%s", got, want)
	}

	// Dataplane shows endpoints even if the list and the first slot are missing.
	runNFT(t, ns, `add element inet kpng endpoints4 { 7000:10 . tcp . 2 : 10.0.0.2 . 8080 }
delete element inet kpng endpoints4 { 7000:10 . tcp . 1 }
delete element inet kpng lists4 { 7000:10 }
`, "-f", "-")
	if got, err = b.Inspect(t.Context(), netip.MustParseAddr("10.96.0.1"), api.TCP, 80, web); err != nil {
		t.Fatal(err)
	}
	want = `table inet kpng
  services4 10.96.0.1 . tcp . 80 : 7000:11
- lists4 7000:10
  endpoints4 7000:10 . tcp . 2 : 10.0.0.2 . 8080
- endpoints4 7000:10 : 10.0.0.1 . 8080
`
	if got != want {
		t.Errorf("the dataplane is\n%swant\n%s", got, want)
	}

	runNFT(t, ns, "delete element inet kpng services4 { 10.96.0.1 . tcp . 80 }\n", "-f", "-")
	if got, err = b.Inspect(t.Context(), netip.MustParseAddr("10.96.0.1"), api.TCP, 80, web); err != nil {
		t.Fatal(err)
	}
	want = `table inet kpng
- services4 10.96.0.1 . tcp . 80
  cluster-ips4 10.96.0.1 (unknown port)
`
	if got != want {
		t.Errorf("the dataplane is\n%swant\n%s", got, want)
	}
}

// TestDataplaneOfANodePort checks that Dataplane reports no difference for an address
// without node ports.
func TestDataplaneOfANodePort(t *testing.T) {
	b, _ := start(t, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of(netip.MustParseAddr("192.0.2.1"))}})
	web := view("web", []string{"10.96.0.1"}, []string{"10.0.0.1"}, func(s *api.Service) {
		s.Type = api.NodePort
		s.Ports[0].NodePort = 30001
	})
	mustSync(t, b, batchOf(true, set(web)))
	for addr, want := range map[string]string{
		"192.0.2.1": "  nodeport-addresses4 192.0.2.1\n",
		"192.0.2.9": "  nodeport-addresses4 192.0.2.9 is missing: this address has no node ports\n",
	} {
		got, err := b.Inspect(t.Context(), netip.MustParseAddr(addr), api.TCP, 30001, web)
		if err != nil {
			t.Fatal(err)
		}
		want = "table inet kpng\n" + want + "  nodeports4 tcp . 30001 : 7000:12\n  lists4 7000:10 : 7f00:1 (list4-1)\n  endpoints4 7000:10 . tcp . 1 : 10.0.0.1 . 8080\n"
		if got != want {
			t.Errorf("the dataplane is\n%swant\n%s", got, want)
		}
	}
}

// TestKernelFaults injects rare errors of the kernel. If the kernel refuses a
// transaction, the table does not change. After a short fault, Sync tries again and
// succeeds.
func TestKernelFaults(t *testing.T) {
	refused := func(errno unix.Errno) error { return &netfilter.Failure{Errno: errno, What: "adding something"} }
	lost := fmt.Errorf("%w: %w", netfilter.ErrUnknownOutcome, unix.ENOBUFS)
	some := errors.New("some services fail")
	for name, test := range map[string]struct {
		// faults are the results of successive requests. A nil element means success. All
		// further requests have the last of these results.
		faults []error
		// If done is true, the transaction takes effect although its result is an error.
		done bool
		want error
		says string
	}{
		"no buffer for a short time":                      {faults: []error{unix.ENOBUFS, unix.ENOBUFS, nil}},
		"no memory for a short time":                      {faults: []error{refused(unix.ENOMEM), nil}},
		"busy tables for a short time":                    {faults: []error{refused(unix.EAGAIN), nil}},
		"an object in use for a short time":               {faults: []error{refused(unix.EBUSY), refused(unix.EBUSY), nil}},
		"no buffer permanently":                           {faults: []error{unix.ENOBUFS}, want: unix.ENOBUFS, says: "no buffer space"},
		"an object in use permanently":                    {faults: []error{refused(unix.EBUSY)}, want: some, says: "adding something: device or resource busy"},
		"no permission":                                   {faults: []error{refused(unix.EPERM)}, want: unix.EPERM, says: "CAP_NET_ADMIN"},
		"a lost answer to a transaction that took effect": {faults: []error{lost, nil}, done: true, want: sink.ErrStartOver, says: "no answer"},
		"a lost answer to a transaction without effect":   {faults: []error{lost, nil}, want: sink.ErrStartOver, says: "no answer"},
		"a lost answer after a repair of drift":           {faults: []error{refused(unix.ENOENT), refused(unix.ENOENT), lost, nil}, want: sink.ErrStartOver, says: "no answer"},
		"a message that is too long":                      {faults: []error{unix.EMSGSIZE}, want: some, says: "message too long"},
		"one refused service of two":                      {faults: []error{refused(unix.EINVAL), refused(unix.EINVAL), nil}, want: some, says: "invalid argument"},
	} {
		t.Run(name, func(t *testing.T) {
			var transacted, refusals int
			var f faults
			b, _ := start(t, Options{Options: backends.Options{Observer: &backendtest.Observer{OnWrote: func(_ int, err error) {
				transacted++
				if err != nil {
					refusals++
				}
			}}}}, f.use)
			old := []*api.View{view("a", []string{"10.96.0.1"}, []string{"10.0.0.1"}, nil), view("b", []string{"10.96.0.2"}, []string{"10.0.0.1"}, nil)}
			changed := []*api.View{view("a", []string{"10.96.0.1"}, []string{"10.0.0.2"}, nil), view("b", []string{"10.96.0.2"}, []string{"10.0.0.3"}, nil)}
			mustSync(t, b, batchOf(true, set(old[0]), set(old[1])))
			before := tableContents(t, b)
			left := test.faults
			transacted, refusals = 0, 0
			var answers []error
			f.exchange = func(batch []byte, send func([]byte) error) error {
				err := left[0]
				if len(left) > 1 {
					left = left[1:]
				}
				answers = append(answers, err)
				if err == nil {
					return send(batch)
				}
				if test.done {
					send(batch)
				}
				return err
			}
			err := b.Sync(t.Context(), batchOf(false, sink.Change{Old: old[0], New: changed[0]}, sink.Change{Old: old[1], New: changed[1]}))
			failed, acknowledged := sink.Acknowledged(err)
			switch {
			case test.want == nil && err != nil, test.want != nil && err == nil:
				t.Fatalf("Sync returns %v, want %v", err, test.want)
			case test.want == some && (!acknowledged || len(failed) == 0):
				t.Errorf("Sync returns %v, want an error that names services", err)
			case test.want != nil && test.want != some && (acknowledged || !errors.Is(err, test.want)):
				t.Errorf("Sync returns %v, want %v without services", err, test.want)
			case err != nil && !strings.Contains(err.Error(), test.says):
				t.Errorf("the error %q does not contain %q", err, test.says)
			}
			want := 0
			for _, err := range answers {
				if err != nil {
					want++
				}
			}
			if transacted != len(answers) || refusals != want {
				t.Errorf("the observer counts %d transactions and %d refusals, want %d and %d", transacted, refusals, len(answers), want)
			}
			f.exchange = nil
			if len(failed) == len(old) || errors.Is(err, unix.EPERM) {
				if diff := cmp.Diff(before, tableContents(t, b)); diff != "" {
					t.Errorf("a failed Sync changed the table (-before +after):\n%s", diff)
				}
			}

			// Without faults, the next Sync succeeds.
			again := batchOf(true, set(changed[0]), set(changed[1]))
			if acknowledged {
				var list []sink.Change
				for i, v := range changed {
					if _, ok := failed[v.Key()]; ok {
						list = append(list, sink.Change{Old: old[i], New: v, Unsure: true})
					}
				}
				again = batchOf(false, list...)
			}
			mustSync(t, b, again)
			if err := verifyAll(t, b); err != nil {
				t.Error(err)
			}
			fresh, _ := start(t, Options{})
			mustSync(t, fresh, batchOf(true, set(changed[0]), set(changed[1])))
			if diff := cmp.Diff(tableContents(t, fresh), tableContents(t, b)); diff != "" {
				t.Errorf("the table differs from a fresh load (-fresh +actual):\n%s", diff)
			}
		})
	}
}

// TestDriftIsReported checks when the backend calls the functions of its Observer.
func TestDriftIsReported(t *testing.T) {
	var holds, drifted, repaired int
	b, ns := start(t, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of(), Observer: &backendtest.Observer{
		OnHolds: func(_ string, n int) { holds = n }, OnDrifted: func() { drifted++ }, OnRepaired: func() { repaired++ },
	}}})
	old, changed := view("web", []string{"10.96.0.1"}, []string{"10.0.0.1"}, nil), view("web", []string{"10.96.0.1"}, []string{"10.0.0.2"}, nil)
	mustSync(t, b, batchOf(true, set(old)))
	check := func(when string, want ...int) {
		t.Helper()
		if diff := cmp.Diff(want, []int{holds, drifted, repaired}); diff != "" {
			t.Errorf("%s, elements, drift found and repaired (-want +got):\n%s", when, diff)
		}
	}
	const elements = 5 // frontend, list, endpoint, cluster IP and class
	check("after a load", elements, 0, 0)
	runNFT(t, ns, "delete element inet kpng endpoints4 { 7000:10 . tcp . 1 }\n", "-f", "-")
	mustSync(t, b, batchOf(false, sink.Change{Old: old, New: changed}))
	check("after a change that repairs drift", elements, 1, 0)
	if err := verifyAll(t, b); err != nil {
		t.Errorf("Verify returns %v", err)
	}
	check("after a Verify that finds nothing", elements, 1, 1)
	runNFT(t, ns, "flush map inet kpng endpoints4\n", "-f", "-")
	if err := verifyAll(t, b); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("Verify returns %v", err)
	}
	check("after a Verify that finds drift", elements, 2, 1)
	mustSync(t, b, batchOf(true, set(changed)))
	check("after a pass", elements, 2, 2)
	runNFT(t, ns, "", "delete", "table", "inet", "kpng")
	if err := b.Sync(t.Context(), batchOf(false, sink.Change{Old: changed, New: old})); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("Sync returns %v", err)
	}
	check("after a Sync without a table", elements, 3, 2)
}

// TestAPassDoesNotChangeFailedServices restarts the backend with changed services, which
// the kernel refuses. The pass keeps the elements and chains of these services, but
// removes a deleted service.
func TestAPassDoesNotChangeFailedServices(t *testing.T) {
	opts := Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}}
	b, ns := start(t, opts)
	local := func(s *api.Service) {
		s.IPs.LoadBalancerIPs = api.NewIPSet(netip.MustParseAddr("203.0.113.1"))
		s.Type, s.ExternalTrafficToLocal = api.LoadBalancer, true
		s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.LoadBalancerIPs, Prefixes: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}}
	}
	cluster := func(s *api.Service) { local(s); s.ExternalTrafficToLocal, s.SourceRanges = false, nil }
	sticky := func(s *api.Service) { s.AffinitySeconds = 100 }
	three, two := []string{"!10.0.0.1", "10.0.0.2", "10.0.0.3"}, []string{"!10.0.0.1", "10.0.0.2"}
	mustSync(t, b, batchOf(true,
		set(view("plain", []string{"10.96.0.1"}, three, local)),
		set(view("sticky", []string{"10.96.0.2"}, three, sticky))))
	before := runNFT(t, ns, "", "list", "table", "inet", "kpng")
	mustSync(t, b, batchOf(false, set(view("gone", []string{"10.96.0.3"}, []string{"10.0.0.1"}, nil))))

	var f faults
	b = startIn(t, ns, opts, f.use)
	f.exchange = func(batch []byte, send func([]byte) error) error {
		for rest := batch; len(rest) > 0; rest = rest[binary.NativeEndian.Uint32(rest):] {
			switch binary.NativeEndian.Uint16(rest[4:]) {
			case nft.MessageType(unix.NFT_MSG_NEWSET), nft.MessageType(unix.NFT_MSG_NEWSETELEM):
				return &netfilter.Failure{Errno: unix.EINVAL}
			}
		}
		return send(batch)
	}
	now := batchOf(true,
		set(view("plain", []string{"10.96.0.1"}, two, cluster)),
		set(view("sticky", []string{"10.96.0.2"}, two, sticky)))
	err := b.Sync(t.Context(), now)
	if failed, ok := sink.Acknowledged(err); !ok || len(failed) != 2 {
		t.Fatalf("Sync returns %v, want two services that failed", err)
	}
	if diff := cmp.Diff(lines(before), lines(runNFT(t, ns, "", "list", "table", "inet", "kpng"))); diff != "" {
		t.Errorf("the pass changed services that failed (-before +after):\n%s", diff)
	}
	f.exchange = nil
	f.ahead = time.Hour
	if err := verifyAll(t, b); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("Verify returns %v, want a request for a pass that removes leftovers", err)
	}
	mustSync(t, b, now)
	if err := verifyAll(t, b); err != nil {
		t.Error(err)
	}
	fresh, other := start(t, opts)
	mustSync(t, fresh, now)
	if diff := cmp.Diff(lines(runNFT(t, other, "", "list", "table", "inet", "kpng")), lines(runNFT(t, ns, "", "list", "table", "inet", "kpng"))); diff != "" {
		t.Errorf("the table differs from a fresh load (-fresh +actual):\n%s", diff)
	}
}

// TestPassesBecauseOfLeftovers checks how often Verify requests a new pass while a
// service fails in every pass. If the pass kept old elements for the service, Verify
// requests passes with backoff. If the pass kept no old elements, Verify requests no
// pass.
func TestPassesBecauseOfLeftovers(t *testing.T) {
	for name, test := range map[string]struct {
		old  []sink.Change
		want []bool
	}{
		"no leftovers": {want: make([]bool, 8)},
		"leftover endpoints": {
			old:  []sink.Change{set(view("web", []string{"10.96.0.1"}, []string{"10.0.0.1", "10.0.0.2"}, nil))},
			want: []bool{true, false, true, false, false, false, true, false},
		},
	} {
		t.Run(name, func(t *testing.T) {
			opts := Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}}
			b, ns := start(t, opts)
			ok := set(view("ok", []string{"10.96.0.2"}, []string{"10.0.0.1"}, nil))
			mustSync(t, b, batchOf(true, append(test.old, ok)...))
			var f faults
			now, minutes := time.Now(), 0
			b = startIn(t, ns, opts, f.use, func(o *options) {
				o.now = func() time.Time { return now.Add(time.Duration(minutes) * time.Minute) }
			})
			f.refuse("10.99.98.97")
			all := batchOf(true, set(view("web", []string{"10.96.0.1"}, []string{"10.99.98.97"}, nil)), ok)
			sync := func() {
				t.Helper()
				if failed, ok := sink.Acknowledged(b.Sync(t.Context(), all)); !ok || len(failed) != 1 {
					t.Fatalf("%v failed, acknowledged: %t; want one service", failed, ok)
				}
			}
			sync()
			var requested []bool
			for range test.want {
				minutes++
				err := verifyAll(t, b)
				requested = append(requested, errors.Is(err, sink.ErrStartOver))
				if err != nil {
					sync()
				}
			}
			if diff := cmp.Diff(test.want, requested); diff != "" {
				t.Errorf("minutes in which Verify requests a pass (-want +got):\n%s", diff)
			}
			f.exchange = nil
			mustSync(t, b, all)
			if err := verifyAll(t, b); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestDriftIsFoundAmongConstantChanges interrupts each Verify, like a driver that always
// has changes to deliver. Each call must make some progress, also if another program changes
// its own table before each Verify.
func TestDriftIsFoundAmongConstantChanges(t *testing.T) {
	for name, busy := range map[string]bool{"quiet neighbors": false, "busy neighbors": true} {
		t.Run(name, func(t *testing.T) { testDriftAmongConstantChanges(t, busy) })
	}
}

func testDriftAmongConstantChanges(t *testing.T, busyNeighbors bool) {
	b, ns := start(t, Options{})
	list := make([]sink.Change, 1000)
	for i := range list {
		list[i] = set(view(fmt.Sprintf("svc-%03d", i), []string{fmt.Sprintf("10.96.%d.%d", i/250, i%250)}, []string{"10.0.0.1", "10.0.0.2", "10.0.0.3"}, nil))
	}
	mustSync(t, b, batchOf(true, list...))
	runNFT(t, ns, "delete element inet kpng cluster-ips4 { 10.96.0.1 }\nadd element inet kpng cluster-ips4 { 10.99.0.1 }\n", "-f", "-")
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	for i := 0; i < 10_000; time.Sleep(time.Millisecond) { // so that a map can be read meanwhile
		i++
		if busyNeighbors {
			runNFT(t, ns, "", []string{"delete", "add"}[i%2], "table", "inet", "other")
		}
		err := b.Verify(canceled)
		if errors.Is(err, sink.ErrStartOver) {
			return
		}
		if !errors.Is(err, context.Canceled) {
			t.Fatalf("Verify returns %v, want that it was canceled", err)
		}
	}
	t.Error("no Verify found that an element was replaced")
}

// TestStartRepeatsALoadThatWasDisturbed flushes the ruleset after Start has read the
// table, and before Start replaces the base chains.
func TestStartRepeatsALoadThatWasDisturbed(t *testing.T) {
	first, ns := start(t, Options{})
	mustSync(t, first, batchOf(true))
	flushed := false
	startIn(t, ns, Options{DNATPriority: -90}, func(o *options) {
		o.exchange = func(batch []byte, send func([]byte) error) error {
			if !flushed {
				flushed = true
				runNFT(t, ns, "", "flush", "ruleset")
			}
			return send(batch)
		}
	})
	if !flushed {
		t.Error("Start wrote nothing")
	}
}

// TestDamageAroundTheFirstPassIsFound flushes chains of the skeleton between Start and
// the first Sync, and in the middle of the first pass.
func TestDamageAroundTheFirstPassIsFound(t *testing.T) {
	b, ns := start(t, Options{})
	runNFT(t, ns, "flush chain inet kpng prerouting\n", "-f", "-")
	web := set(view("web", []string{"10.96.0.1"}, []string{"10.0.0.1"}, nil))
	mustSync(t, b, batch(true, false, web))
	runNFT(t, ns, "flush chain inet kpng output\n", "-f", "-")
	mustSync(t, b, batch(false, true))
	if listing := runNFT(t, ns, "", "list", "chain", "inet", "kpng", "prerouting"); !strings.Contains(listing, "jump services") {
		t.Errorf("the first Sync did not repair a chain flushed before it:\n%s", listing)
	}
	if err := verifyAll(t, b); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("after a chain was flushed during the first pass, Verify returns %v", err)
	}
	mustSync(t, b, batchOf(true, web))
	if err := verifyAll(t, b); err != nil {
		t.Error(err)
	}
}

// TestNodePortsFollowTheNode checks that a Sync with a changed Node object updates the
// addresses of node ports before the Sync returns.
func TestNodePortsFollowTheNode(t *testing.T) {
	source := &nodeSource{Source: nodeaddr.Of()}
	b, ns := start(t, Options{Options: backends.Options{NodeAddresses: source}})
	mustSync(t, b, batchOf(true))
	b.tasks.EndGoroutines() // so that only Sync can update the addresses
	c := batchOf(false)
	c.Node, c.NodeChanged = &api.Node{Name: "here", Addresses: []api.NodeAddress{{Type: "InternalIP", IP: netip.MustParseAddr("192.0.2.7")}}}, true
	mustSync(t, b, c)
	if listing := runNFT(t, ns, "", "list", "set", "inet", "kpng", "nodeport-addresses4"); !strings.Contains(listing, "192.0.2.7") {
		t.Errorf("the new address has no node ports:\n%s", listing)
	}
}

// nodeSource has the addresses of the Node object. It does not signal changes.
type nodeSource struct {
	nodeaddr.Source
	mu    sync.Mutex
	addrs []netip.Addr
}

func (s *nodeSource) SetNode(n *api.Node) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.addrs = kernelnode.Addrs(n)
}

func (s *nodeSource) Addresses() ([]netip.Addr, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.addrs, nil
}
