// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/sink"
)

// TestLossIsFoundDuringAPause removes all rules or sets during the pause after a change by
// another program. With the interval of Verify, the loss is found within two seconds.
func TestLossIsFoundDuringAPause(t *testing.T) {
	if b, _ := newBackend(options{}); b.VerifyInterval() > time.Second {
		t.Errorf("the interval of Verify is %v", b.VerifyInterval())
	}
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		addForeignRules(t, ns, v.flavour)
		b := start(t, ns, v)
		mustSync(t, b, pass(everything()...))
		for _, command := range []string{
			"iptables -F", "ip6tables -F", "iptables -t nat -F", "ip6tables -t nat -F", "iptables -t mangle -F",
			"iptables -t nat -F; iptables -t nat -X",
			"iptables -F; iptables -X; ipset flush KPNG-CLUSTERIPS4; ipset destroy KPNG-CLUSTERIPS4",
			"ipset flush KPNG-CLUSTERIPS6",
		} {
			if v.withoutIPSet && strings.Contains(command, "ipset") {
				continue
			}
			// The change of another program is only an addition, and no loss.
			ns.Run(t, programName(v.flavour, api.IPv4, ""), "-t", "nat", "-A", "INPUT", "-j", "RETURN")
			b.verifyAt = time.Now().Add(time.Hour)
			if err := b.Verify(t.Context()); err != nil {
				t.Fatalf("before %q, Verify returns %v", command, err)
			}
			want := saveAll(t, ns, v.flavour)
			for part := range strings.SplitSeq(command, "; ") {
				ns.Run(t, strings.Fields(strings.Replace(part, "tables", "tables-"+v.flavour.String(), 1))...)
			}
			if err := b.Verify(t.Context()); !errors.Is(err, sink.ErrStartOver) {
				t.Errorf("after %q, Verify returns %v", command, err)
			}
			mustSync(t, b, pass(everything()...))
			if diff := cmp.Diff(withoutOthers(want), withoutOthers(saveAll(t, ns, v.flavour))); diff != "" {
				t.Errorf("after %q, the rules are not repaired (-want +got):\n%s", command, diff)
			}
		}
	})
}

// withoutOthers returns the lines of the instance in the output of saveAll.
func withoutOthers(text string) string {
	return strings.Join(slices.DeleteFunc(strings.Split(text, "\n"), func(line string) bool {
		return !strings.Contains(line, "KPNG-") || strings.Contains(line, "KPNG-other")
	}), "\n")
}

// TestOwnChangesAreNoLoss removes services, and verifies after each change.
func TestOwnChangesAreNoLoss(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		b := start(t, ns, v)
		all := append(everything(), wideServices()...)
		mustSync(t, b, pass(all...))
		b.verifyAt = time.Now().Add(time.Hour)
		for i, view := range all {
			if err := b.Verify(t.Context()); err != nil {
				t.Fatalf("after %d changes: %v", i, err)
			}
			c := batch()
			c.Services = func(yield func(sink.Change) bool) { yield(sink.Change{Key: view.Key(), Old: view}) }
			mustSync(t, b, c)
			if err := b.Verify(t.Context()); err != nil {
				t.Fatalf("after the deletion of %s: %v", view.Key(), err)
			}
		}
	})
}

// TestDeletionsByOthersAreNoLoss deletes rules of another program during the pause. Table
// mangle then has no rule of the instance, or fewer rules than the other program deletes.
func TestDeletionsByOthersAreNoLoss(t *testing.T) {
	const others = 60
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		for _, services := range [][]*api.View{
			{view("web", "10.96.0.1", "10.1.0.1")},
			{view("ranges", "10.96.0.5", "", loadBalancer, sourceRanges)},
		} {
			restore := programName(v.flavour, api.IPv4, "restore")
			ns.RunWith(t, "*mangle\n"+strings.Repeat("-A POSTROUTING -p udp -m udp --dport 7 -j ACCEPT\n", others)+"COMMIT\n", restore, "--noflush")
			b := start(t, ns, v)
			mustSync(t, b, pass(services...))
			b.verifyAt = time.Now().Add(time.Hour)
			if err := b.Verify(t.Context()); err != nil {
				t.Fatal(err)
			}
			ns.Run(t, programName(v.flavour, api.IPv4, ""), "-t", "mangle", "-F", "POSTROUTING")
			if err := b.Verify(t.Context()); err != nil {
				t.Errorf("after the rules of another program were deleted, Verify returns %v", err)
			}
			if err := b.Stop(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	})
}
