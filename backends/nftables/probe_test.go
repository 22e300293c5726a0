// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"runtime"
	"slices"
	"testing"

	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/nft"
	"golang.org/x/sys/unix"
)

func TestCheckKernelChangesNothing(t *testing.T) {
	ns := netnstest.New(t)
	c := newConn(ns.FD, "kpng")
	defer c.Close()
	before, err := c.foreignCommits(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := c.checkKernel(t.Context(), features); err != nil {
		t.Error(err)
	}
	if after, err := c.foreignCommits(t.Context()); err != nil || after != before {
		t.Errorf("the number of transactions is %d (%v), want %d", after, err, before)
	}
	if tables := runNFT(t, ns, "", "list", "tables"); tables != "" {
		t.Errorf("the check left tables:\n%s", tables)
	}
}

// TestCheckKernelNamesAllMissingFeatures adds features that no kernel has, because their
// messages refer to missing objects.
func TestCheckKernelNamesAllMissingFeatures(t *testing.T) {
	ns := netnstest.New(t)
	c := newConn(ns.FD, "kpng")
	defer c.Close()
	missing := withRule(nft.InSet("none"))
	all := slices.Concat(features[:3], []feature{{"warp (Linux 99)", missing}}, features[3:], []feature{{"weft", missing}})
	const want = "the kernel lacks warp (Linux 99), weft"
	if err := c.checkKernel(t.Context(), all); err == nil || err.Error() != want {
		t.Errorf("error is %v, want %q", err, want)
	}
	all = slices.Insert(all, 0, feature{"looms", func(w *nft.Writer) { w.DeleteTable("none") }})
	const first = "the kernel lacks looms"
	if err := c.checkKernel(t.Context(), all); err == nil || err.Error() != first {
		t.Errorf("error is %v, want %q", err, first)
	}
}

func TestCheckKernelNeedsTheCapability(t *testing.T) {
	ns := netnstest.New(t)
	c := newConn(ns.FD, "kpng")
	defer c.Close()
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread is never unlocked, so it ends with its goroutine
		none := [2]unix.CapUserData{}
		err := unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &none[0])
		if err == nil {
			err = c.checkKernel(t.Context(), features)
		}
		result <- err
	}()
	const want = "check the kernel: operation not permitted (CAP_NET_ADMIN is missing)"
	if err := <-result; err == nil || err.Error() != want {
		t.Errorf("error is %v, want %q", err, want)
	}
}
