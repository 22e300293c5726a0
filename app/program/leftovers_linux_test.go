// SPDX-License-Identifier: Apache-2.0

package program

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// searching returns the leftovers of a backend with these flags. Their search does not
// run yet.
func searching(t *testing.T, backend string, flags ...string) *leftovers {
	t.Helper()
	l := newLeftovers(backend)
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	fs.String("instance", "", "")
	fs.String("service-proxy-name", "", "")
	fs.String("bpffs", t.TempDir(), "")
	l.register(fs)
	if err := fs.Parse(flags); err != nil {
		t.Fatal(err)
	}
	l.self.name = flagValue(fs, "instance")
	return l
}

func TestLeftoversAreFound(t *testing.T) {
	const removeChains = "kube-proxy --cleanup"
	of := func(backend, name, what, remove string) leftover {
		return leftover{what, remove, instance{backend, name}}
	}
	kubeProxy := func(what, remove string) leftover { return leftover{what: what, remove: remove} }
	nftablesOf := func(table string) []string {
		return []string{"nft add table inet " + table, "nft add chain inet " + table + " a"}
	}
	for name, test := range map[string]struct {
		left  []string // commands
		flags []string
		want  []leftover
	}{
		"no leftovers": {},
		"tables and chains of other owners": {left: []string{
			"nft add table inet kube-proxy-of-another", "nft add chain inet kube-proxy-of-another KUBE-SERVICES",
			"nft add table inet kpngs", "nft add chain inet kpngs a", "nft add table ip kpng", "nft add chain ip kpng a",
			"iptables-legacy -t nat -N KUBE-SERVICES-OF-ANOTHER", "iptables-nft -t nat -N KUBE-KUBELET-CANARY",
			"iptables-legacy -t nat -N MY-KPNG-SERVICES", "iptables-nft -t nat -N KPNG-SERVICES-MINE",
		}},
		"mode nftables of kube-proxy": {
			left: []string{"nft add table ip kube-proxy", "nft add chain ip kube-proxy services", "nft add chain ip kube-proxy more", "nft add table ip6 kube-proxy", "nft add chain ip6 kube-proxy services"},
			want: []leftover{
				kubeProxy("nftables table ip kube-proxy", "nft delete table ip kube-proxy"),
				kubeProxy("nftables table ip6 kube-proxy", "nft delete table ip6 kube-proxy"),
			},
		},
		"mode iptables of kube-proxy, with iptables-nft": {
			left: []string{"iptables-nft -t nat -N KUBE-SERVICES", "ip6tables-nft -t filter -N KUBE-SERVICES"},
			want: []leftover{
				kubeProxy("chain KUBE-SERVICES of iptables-nft in table ip nat", removeChains),
				kubeProxy("chain KUBE-SERVICES of iptables-nft in table ip6 filter", removeChains),
			},
		},
		"mode iptables of kube-proxy, with iptables-legacy": {
			left: []string{"iptables-legacy -t nat -N KUBE-SERVICES"},
			want: []leftover{kubeProxy("chain KUBE-SERVICES of iptables-legacy in table ip nat", removeChains)},
		},
		"mode ipvs of kube-proxy": {
			left: []string{"ip link add kube-ipvs0 type bridge"},
			want: []leftover{kubeProxy("interface kube-ipvs0", "ip link delete kube-ipvs0")},
		},
		"kube-proxy runs beside": {
			left:  []string{"nft add table ip kube-proxy", "nft add chain ip kube-proxy services"},
			flags: []string{"--service-proxy-name=mine"},
		},
		"backend nftables": {
			left: slices.Concat(nftablesOf("kpng"), nftablesOf("kpng2"), nftablesOf("kpng2-blue")),
			want: []leftover{
				of("nftables", "", "nftables table inet kpng", "kpng cleanup nftables"),
				of("nftables", "blue", "nftables table inet kpng2-blue", "kpng cleanup nftables --instance blue"),
			},
		},
		"backend iptables, in both flavours": {
			left: []string{"iptables-nft -t nat -N KPNG-SERVICES", "iptables-nft -t filter -N KPNG-SERVICES", "iptables-legacy -t nat -N KPNG-blue-SERVICES"},
			want: []leftover{
				of("iptables", "", "chain KPNG-SERVICES of iptables-nft in table ip nat", "kpng cleanup iptables"),
				of("iptables", "blue", "chain KPNG-blue-SERVICES of iptables-legacy in table ip nat", "kpng cleanup iptables --instance blue"),
			},
		},
		"backend ipvs": {
			left: slices.Concat(nftablesOf("kpng-ipvs"), nftablesOf("kpng-ipvs-blue"), nftablesOf("kpng-of-ipvs"), nftablesOf("kpng2-of-ipvs-red")),
			want: []leftover{
				of("ipvs", "", "nftables table inet kpng-ipvs", "kpng cleanup ipvs"),
				of("ipvs", "blue", "nftables table inet kpng-ipvs-blue", "kpng cleanup ipvs --instance blue"),
				of("ipvs", "red", "nftables table inet kpng2-of-ipvs-red", "kpng cleanup ipvs --instance red"),
			},
		},
		"backend userspace": {
			left: []string{"ip route add local 10.96.0.10 dev lo table local proto 107"},
			want: []leftover{of("userspace", "", "local routes of protocol 107", "kpng cleanup userspace")},
		},
		"beside kube-proxy, backends of kpng count": {
			left:  nftablesOf("kpng-blue"),
			flags: []string{"--service-proxy-name=mine"},
			want:  []leftover{of("nftables", "blue", "nftables table inet kpng-blue", "kpng cleanup nftables --instance blue")},
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := netnstest.New(t)
			for _, command := range test.left {
				n.Run(t, strings.Fields(command)...)
			}
			var got []leftover
			l := searching(t, "test", test.flags...)
			if err := n.Do(func() (err error) { got, err = l.find(t.Context()); return err }); err != nil {
				t.Error(err)
			}
			if diff := cmp.Diff(test.want, got, cmp.AllowUnexported(leftover{}, instance{})); diff != "" {
				t.Errorf("leftovers (-want +got):\n%s", diff)
			}
		})
	}
}

func TestMapsOfEBPFAreFound(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"kpng-ebpf", "kpng-ebpf-blue", "kpng-ebpfs", "other"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	got, err := ebpfLeftovers(dir)
	want := []leftover{
		{"eBPF maps in " + dir + "/kpng-ebpf", "kpng cleanup ebpf", instance{"ebpf", ""}},
		{"eBPF maps in " + dir + "/kpng-ebpf-blue", "kpng cleanup ebpf --instance blue", instance{"ebpf", "blue"}},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(leftover{}, instance{})); diff != "" || err != nil {
		t.Errorf("leftovers (-want +got):\n%s\nerror %v", diff, err)
	}
	if got, err := ebpfLeftovers(filepath.Join(dir, "missing")); len(got) > 0 || err != nil {
		t.Errorf("without a BPF file system: %v, %v", got, err)
	}
}

// A running process of another instance is a neighbour. Its rules are no leftovers.
func TestRulesOfRunningNeighbourAreNoLeftovers(t *testing.T) {
	n := netnstest.New(t)
	b, err := nftables.New(nftables.Options{Options: backends.Options{Instance: "blue", NetNS: n.FD, Sysctls: backends.IgnoreSysctls}})
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	search := func(backend string, flags ...string) (found []leftover) {
		if err := n.Do(func() (err error) { found, err = searching(t, backend, flags...).find(t.Context()); return err }); err != nil {
			t.Fatal(err)
		}
		return found
	}
	if found := search("iptables", "--instance=blue"); len(found) > 0 {
		t.Errorf("while the neighbour runs: %v", found)
	}
	if err := b.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if found := search("iptables", "--instance=blue"); len(found) != 1 {
		t.Errorf("after its end: %v, want its table", found)
	}
	for _, self := range []string{"nftables", "ebpf"} {
		if found := search(self, "--instance=blue"); len(found) > 0 {
			t.Errorf("the backend %s finds its own table: %v", self, found)
		}
	}
}

func TestLeftoversAreLoggedCountedAndRemoved(t *testing.T) {
	n := netnstest.New(t)
	for _, table := range []string{"kpng", "kpng-blue"} {
		n.Run(t, "nft", "add table inet "+table)
		n.Run(t, "nft", "add chain inet "+table+" a")
	}
	n.Run(t, "nft", "add table ip kube-proxy")
	n.Run(t, "nft", "add chain ip kube-proxy services")
	var logged []string
	log := funcr.New(func(_, line string) { logged = append(logged, line) }, funcr.Options{})
	ctx := klog.NewContext(t.Context(), log)
	look := func(l *leftovers) {
		t.Helper()
		logged = nil
		if err := n.Do(func() error { l.look(ctx); return nil }); err != nil {
			t.Fatal(err)
		}
	}
	counted := func(l *leftovers, kubeProxy, kpng float64) {
		t.Helper()
		a, b := testutil.ToFloat64(l.count.WithLabelValues("kube-proxy")), testutil.ToFloat64(l.count.WithLabelValues("kpng"))
		if a != kubeProxy || b != kpng || len(l.problems()) != int(kubeProxy+kpng) {
			t.Errorf("%v leftovers of kube-proxy, %v of kpng, want %v and %v; problems %q", a, b, kubeProxy, kpng, l.problems())
		}
	}
	l := searching(t, "iptables", "--remove-other-backends")
	look(l)
	counted(l, 1, 2)
	text := strings.Join(logged, "\n")
	for _, want := range []string{"nft delete table ip kube-proxy", "kpng cleanup nftables\"", "kpng cleanup nftables --instance blue"} {
		if len(logged) != 3 || !strings.Contains(text, want) {
			t.Errorf("logged %q, want three lines, one with %q", logged, want)
		}
	}
	if text := strings.Join(l.problems(), "\n"); !strings.Contains(text, "inet kpng-blue") || !strings.Contains(text, "kpng cleanup nftables --instance blue") {
		t.Errorf("problems %q", text)
	}
	look(l)
	if len(logged) > 0 {
		t.Errorf("logged again: %q", logged)
	}
	l.setProgrammed() // only now may the old rules go
	look(l)
	counted(l, 1, 1)
	if tables := n.Run(t, "nft", "list", "tables"); strings.Contains(tables, "kpng\n") || !strings.Contains(tables, "kpng-blue\n") || !strings.Contains(tables, "kube-proxy\n") {
		t.Errorf("tables after the removal:\n%s", tables)
	}
	n.Run(t, "nft", "delete table ip kube-proxy")
	look(l)
	counted(l, 0, 1)
	if !strings.Contains(strings.Join(logged, "\n"), "have been removed") {
		t.Errorf("logged %q", logged)
	}
	// The search also finds a proxy that starts while this proxy runs.
	n.Run(t, "nft", "add table ip kube-proxy")
	n.Run(t, "nft", "add chain ip kube-proxy services")
	look(l)
	counted(l, 1, 1)
}

// A removal may wait for the end of connections, and it fails if the process lacks
// capabilities.
func TestRemovalsDoNotDelaySearchesAndAreNotRetriedImmediately(t *testing.T) {
	n := netnstest.New(t)
	n.Run(t, "nft", "add table inet kpng")
	n.Run(t, "nft", "add chain inet kpng a")
	l := searching(t, "iptables", "--remove-other-backends")
	now, removals := time.Now(), 0
	l.now = func() time.Time { return now }
	l.cleanUp = func(context.Context, instance, string) error {
		now = now.Add(10 * time.Minute)
		removals++
		return errors.New("no capability")
	}
	l.setProgrammed()
	for i, wait := range []time.Duration{0, removeInterval, lookInterval - removeInterval} {
		now = now.Add(wait)
		if err := n.Do(func() error { l.look(t.Context()); return nil }); err != nil {
			t.Fatal(err)
		}
		if want := []int{1, 1, 2}[i]; removals != want {
			t.Errorf("after search %d, there were %d attempts of a removal, want %d", i+1, removals, want)
		}
		if pause := l.pause(); pause != removeInterval {
			t.Errorf("the next search follows after %v, want %v", pause, removeInterval)
		}
	}
}

// Only a pass that programmed all services allows the removal of the old rules.
func TestOldRulesStayUntilAllServicesAreProgrammed(t *testing.T) {
	var result error
	r := &reporter{Sink: sink.Func(func(context.Context, *sink.Changes) error { return result }), local: newLocalEndpoints(), leftovers: newLeftovers("test")}
	web := types.NamespacedName{Namespace: "default", Name: "web"}
	nothing := slices.Values([]sink.Change{})
	var failed sink.Failed
	failed.Add(web, errors.New("no space"))
	for _, step := range []struct {
		changes sink.Changes
		result  error
		want    bool
	}{
		{sink.Changes{First: true, Services: nothing}, nil, false},
		{sink.Changes{Last: true, Services: nothing}, errors.New("no kernel"), false},
		{sink.Changes{Last: true, Services: nothing}, failed.Err(), false},
		{sink.Changes{Last: true, Services: nothing, Failing: []types.NamespacedName{web}}, nil, false},
		{sink.Changes{Last: true, Services: nothing}, nil, true},
	} {
		result = step.result
		r.Sync(t.Context(), &step.changes)
		if got := r.leftovers.programmed.Load(); got != step.want {
			t.Errorf("after %+v with result %v: %t", step.changes, step.result, got)
		}
	}
}
