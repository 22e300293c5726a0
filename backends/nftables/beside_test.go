// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/conntrack"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"golang.org/x/sys/unix"
)

// started is a backend that its driver does not start.
type started struct {
	sink.Func
	backend *backend
}

func (s started) PreparePass(ctx context.Context) <-chan struct{} { return s.backend.PreparePass(ctx) }
func (s started) BatchSize() int                                  { return s.backend.BatchSize() }

// randomService gives service i random endpoints. Without endpoints, it deletes the service.
func randomService(src *sinktest.Source, i int) {
	v := numberedService(i, rand.IntN(6))
	if len(v.Endpoints) == 0 {
		src.Delete(v.Key())
		return
	}
	v.Endpoints[0].Local = rand.IntN(2) == 0
	src.Set(v)
}

// randomServices returns a source with n random services and the node.
func randomServices(n int) *sinktest.Source {
	src := sinktest.NewSource()
	for i := range n {
		randomService(src, i)
	}
	src.SetNode(node)
	src.MarkSynced()
	return src
}

// TestChangesWhileTheTableIsRead changes services and begins passes while another program
// changes elements of the table. In the end, the table must equal a new table.
func TestChangesWhileTheTableIsRead(t *testing.T) {
	const services = 1_000
	src := randomServices(services)
	b, ns := start(t, Options{})
	prepared := 0
	d, stop := drive(t, src, started{func(ctx context.Context, c *sink.Changes) error {
		b.mu.Lock()
		if c.First && b.table.ahead != nil && b.table.ahead.base != nil {
			prepared++
		}
		b.mu.Unlock()
		return b.Sync(ctx, c)
	}, b}, 0)
	waitApplied(t, d, src)

	other := newConn(ns.FD, b.table.conn.Table)
	defer other.Close()
	for i := range 20 {
		passes := d.Status().Passes
		d.StartOver()
		for ; d.Status().Passes == passes; time.Sleep(time.Duration(rand.IntN(5)) * time.Millisecond) {
			randomService(src, rand.IntN(services))
		}
		m := mapID{kind: []mapKind{kindFrontends, kindLists, kindEndpoints, kindClusterIPs, kindHairpins}[i%5], family: 4}
		s, err := readSnapshot(t.Context(), other, m, nil)
		if err != nil {
			t.Fatal(err)
		}
		if len(s.claims) == 0 {
			continue
		}
		e := s.element(rand.IntN(len(s.claims)))
		err = other.Transact(t.Context(), func(w *nft.Writer) {
			writeElements(w, unix.NFT_MSG_DELSETELEM, 0, e.ref())
			if e.key[3] ^= 0x80; i%2 == 0 && m.kind != kindLists { // a service may soon get this number
				writeElements(w, unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, e.ref())
			}
		})
		if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EEXIST) { // a Sync may have been faster
			t.Fatal(err)
		}
	}
	waitApplied(t, d, src)
	for repairs := 0; ; repairs++ {
		err := verifyAll(t, b)
		if err == nil {
			break
		}
		if repairs == 3 {
			t.Fatalf("after %d repairs, Verify returns %v", repairs, err)
		}
		d.StartOver()
		waitApplied(t, d, src)
	}
	stop()
	if prepared < 10 {
		t.Errorf("%d passes began with a table that was read beside changes, want at least 10", prepared)
	}
	var list []sink.Change
	for _, v := range src.Views() {
		list = append(list, set(v))
	}
	checkFresh(t, b, list...)
}

// TestOwnChangesAreNoDrift compares the table again and again while services change.
func TestOwnChangesAreNoDrift(t *testing.T) {
	const services = 300
	src := randomServices(services)
	b, _ := start(t, Options{Options: backends.Options{Observer: &backendtest.Observer{OnDrifted: func() { t.Error("drift is reported") }}}})
	d, stop := drive(t, src, started{b.Sync, b}, 0)
	waitApplied(t, d, src)
	ended := make(chan struct{})
	changing, cancel := context.WithCancel(t.Context())
	go func() {
		defer close(ended)
		for ; changing.Err() == nil; time.Sleep(time.Duration(rand.IntN(300)) * time.Microsecond) {
			randomService(src, rand.IntN(services))
		}
	}()
	for range 8 {
		b.mu.Lock()
		b.table.drift.reset(-1)
		b.table.drift.compareAt = time.Time{}
		b.mu.Unlock()
		if err := b.Verify(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	<-ended
	waitApplied(t, d, src)
	stop()
	if err := verifyAll(t, b); err != nil {
		t.Error(err)
	}
}

// TestConnectionsStayOpen compares the connections of netfilter after a pass, a comparison and
// a read of connection tracking, and again later. While a connection is being closed, all
// changes wait, see netfilter.Conn.Close.
func TestConnectionsStayOpen(t *testing.T) {
	ns := netnstest.New(t)
	others := len(netfilterSockets(t, ns))
	reads := make(chan error, 100)
	b := startIn(t, ns, Options{Options: backends.Options{Conntrack: conntrack.New(conntrack.Options{
		NetNS:   ns.FD,
		Observe: func(_, _ int, _ time.Duration, err error) { reads <- err },
	})}})
	work := func() {
		if ready := b.PreparePass(t.Context()); ready != nil {
			<-ready
		}
		mustSync(t, b, batchOf(true, manyServices(20, 2)...))
		if err := <-reads; err != nil {
			t.Fatal(err)
		}
		b.table.drift.reset(-1)
		if err := verifyAll(t, b); err != nil {
			t.Fatal(err)
		}
	}
	work()
	work()
	before := netfilterSockets(t, ns)
	work()
	after := netfilterSockets(t, ns)
	if n := len(before) - others; n < 3 || !slices.Equal(before, after) { // the table, its reader, and connection tracking
		t.Errorf("connections %v became %v, want the same, at least three", before, after)
	}
}

// netfilterSockets returns the inodes of the netlink sockets of netfilter in a namespace.
func netfilterSockets(t *testing.T, ns *netnstest.Namespace) (inodes []string) {
	t.Helper()
	err := ns.Do(func() error {
		all, err := os.ReadFile("/proc/thread-self/net/netlink")
		for line := range strings.Lines(string(all)) {
			// The second field is the protocol. The kernel's own socket has the port ID 0.
			if f := strings.Fields(line); f[1] == strconv.Itoa(unix.NETLINK_NETFILTER) && f[2] != "0" {
				inodes = append(inodes, f[len(f)-1])
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(inodes)
	return inodes
}

// TestJournalIsBounded reads the table for a pass and a comparison. Before they begin, it
// makes more changes than a journal records.
func TestJournalIsBounded(t *testing.T) {
	b, _ := start(t, Options{})
	mustSync(t, b, batchOf(true, manyServices(20, 2)...))
	tb := b.table
	fill := func() {
		e := addressElement(kindClusterIPs, netip.MustParseAddr("192.0.2.1"))
		for range maxJournal/2 + 1 {
			tb.state.count(&e.elementID, &e.value, 1)
			tb.state.count(&e.elementID, &e.value, -1)
		}
	}
	c := tb.newMapComparison(t.Context(), allMaps()[0], 0)
	<-c.done
	tb.drift.reset(-1)
	tb.drift.comparison, tb.state.journals = c, []*journal{c.journal}
	fill()
	if n := len(c.journal.changes); n != 0 || !c.journal.isFull() {
		t.Errorf("a full journal has %d changes", n)
	}
	if err := verifyAll(t, b); err != nil {
		t.Errorf("Verify after a comparison with a full journal: %v", err)
	}
	<-b.PreparePass(t.Context())
	fill()
	mustSync(t, b, batchOf(true, manyServices(20, 2)...))
	checkFresh(t, b, manyServices(20, 2)...)
}
