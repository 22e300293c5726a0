// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/sink"
)

// followed provides service CIDRs to a backend of a test.
type followed struct {
	lists chan []netip.Prefix
	taken chan struct{}
}

func follow() *followed {
	return &followed{make(chan []netip.Prefix), make(chan struct{})}
}

func (f *followed) run(ctx context.Context, set func([]netip.Prefix)) {
	for {
		select {
		case list := <-f.lists:
			set(list)
			f.taken <- struct{}{}
		case <-ctx.Done():
			return
		}
	}
}

// set returns when the backend has the CIDRs.
func (f *followed) set(cidrs ...string) {
	list := []netip.Prefix{}
	for _, c := range cidrs {
		list = append(list, netip.MustParsePrefix(c))
	}
	f.lists <- list
	<-f.taken
}

// writes counts the transactions of a backend, and their bytes.
type writes struct {
	backends.Observer
	transactions, bytes atomic.Int64
}

func (w *writes) Wrote(bytes int, _ error) {
	w.transactions.Add(1)
	w.bytes.Add(int64(bytes))
}

func (*writes) Holds(string, int) {}
func (*writes) Drifted(bool)      {}

// checkServiceCIDRs compares the CIDRs to which the table drops packets.
func checkServiceCIDRs(t *testing.T, ns *netnstest.Namespace, after string, want ...string) {
	t.Helper()
	var is []string
	for line := range strings.Lines(runNFT(t, ns, "", "list", "chain", "inet", "kpng", serviceCIDRsChain)) {
		if f := strings.Fields(line); len(f) == 4 && f[1] == "daddr" && f[3] == "drop" {
			is = append(is, f[2])
		}
	}
	slices.Sort(is)
	slices.Sort(want)
	if diff := cmp.Diff(want, is); diff != "" {
		t.Errorf("after %s, the dropped CIDRs differ (-want +is):\n%s", after, diff)
	}
}

func TestServiceCIDRsAreFollowed(t *testing.T) {
	f, count := follow(), &writes{}
	opts := Options{FollowServiceCIDRs: f.run}
	opts.Observer = count
	b, ns := start(t, opts)
	checkServiceCIDRs(t, ns, "the start")
	f.set("10.96.0.0/16", "fd96::/112")
	checkServiceCIDRs(t, ns, "a change before the first pass", "10.96.0.0/16", "fd96::/112")

	var services []sink.Change
	for i := range 300 {
		services = append(services, set(view(fmt.Sprintf("s%d", i), []string{netip.AddrFrom4([4]byte{10, 96, byte(i / 250), byte(i%250 + 1)}).String()}, []string{"10.0.2.2"}, nil)))
	}
	mustSync(t, b, batchOf(true, services...))
	checkServiceCIDRs(t, ns, "the first pass", "10.96.0.0/16", "fd96::/112")
	for _, c := range []struct {
		after     string
		set, want []string
	}{
		{"a new CIDR", []string{"10.96.0.0/16", "10.97.0.0/16", "fd96::/112"}, []string{"10.96.0.0/16", "10.97.0.0/16", "fd96::/112"}},
		{"CIDRs that contain each other", []string{"10.1.2.0/24", "10.96.0.0/16", "10.1.0.0/16", "10.1.1.0/24", "10.96.0.0/16"}, []string{"10.1.0.0/16", "10.96.0.0/16"}},
		{"bits after the prefix", []string{"10.2.3.4/16", "0.0.0.0/1"}, []string{"0.0.0.0/1"}},
		{"no CIDR", nil, nil},
	} {
		transactions, bytes := count.transactions.Load(), count.bytes.Load()
		f.set(c.set...)
		checkServiceCIDRs(t, ns, c.after, c.want...)
		transactions, bytes = count.transactions.Load()-transactions, count.bytes.Load()-bytes
		if transactions != 1 || bytes > 2000 {
			t.Errorf("%s: %d transactions with %d bytes, want one small transaction", c.after, transactions, bytes)
		}
		if err := verifyAll(t, b); err != nil {
			t.Errorf("%s: Verify reports %v, want no difference", c.after, err)
		}
	}
	before := count.transactions.Load()
	f.set()
	if n := count.transactions.Load() - before; n != 0 {
		t.Errorf("the same CIDRs again cause %d transactions, want none", n)
	}
}

func TestServiceCIDRsSurviveARestart(t *testing.T) {
	f := follow()
	opts := Options{FollowServiceCIDRs: f.run}
	b, ns := start(t, opts)
	mustSync(t, b, batchOf(true))
	f.set("10.96.0.0/16")

	again := follow()
	b = startIn(t, ns, Options{FollowServiceCIDRs: again.run})
	mustSync(t, b, batchOf(true))
	checkServiceCIDRs(t, ns, "a restart without a source of CIDRs", "10.96.0.0/16")
	if err := verifyAll(t, b); err != nil {
		t.Errorf("Verify reports %v, want no difference", err)
	}
	again.set("10.97.0.0/16")
	checkServiceCIDRs(t, ns, "the first CIDRs", "10.97.0.0/16")

	b = startIn(t, ns, Options{})
	mustSync(t, b, batchOf(true))
	if slices.Contains(chainNames(t, b), serviceCIDRsChain) {
		t.Error("a backend without service CIDRs keeps the chain of an earlier one")
	}
}

func TestServiceCIDRsAreWrittenAfterDrift(t *testing.T) {
	f := follow()
	b, ns := start(t, Options{FollowServiceCIDRs: f.run})
	mustSync(t, b, batchOf(true))
	f.set("10.96.0.0/16")
	runNFT(t, ns, "", "flush", "chain", "inet", "kpng", serviceCIDRsChain)
	if err := verifyAll(t, b); err == nil {
		t.Fatal("Verify does not find that the rules were deleted")
	}
	mustSync(t, b, batchOf(true))
	checkServiceCIDRs(t, ns, "a repair", "10.96.0.0/16")

	runNFT(t, ns, "", "delete", "table", "inet", "kpng")
	f.set("10.97.0.0/16") // the kernel refuses this change
	if err := b.Verify(t.Context()); err == nil {
		t.Fatal("Verify requests no pass after the CIDRs could not be written")
	}
	mustSync(t, b, batchOf(true))
	checkServiceCIDRs(t, ns, "a pass", "10.97.0.0/16")
}
