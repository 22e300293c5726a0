// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/netnstest"
	"golang.org/x/sys/unix"
)

// fillTable creates entries for the given number of connections to 1,000 services with
// 100 endpoints each.
func fillTable(t testing.TB, n *netnstest.Namespace, large int) {
	list := make([]connection, large)
	for i := range list {
		service, client := i%1000, i/1000
		list[i] = connection{
			protocol: 17,
			from:     netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 2, byte(client), 2}), uint16(1024+service)),
			to:       netip.AddrPortFrom(destinationNumber(service).addr, destinationNumber(service).port),
			endpoint: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(service % 250), byte(client % 100)}), 5053),
		}
		list[i].back = list[i].from
	}
	createEntries(t, n.FD, list...)
}

func destinationNumber(i int) destination {
	return destination{api.IPv4, netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), 53, unix.IPPROTO_UDP}
}

// thousandServices returns the 1,000 services to which fillTable creates connections. The
// argument scaledDown is the number of services without endpoints. These services come
// first.
func thousandServices(t testing.TB, scaledDown int) []*api.View {
	var list []*api.View
	for i := range 1000 {
		text := fmt.Sprintf("ip %s\nport 53\n", destinationNumber(i).addr)
		if i >= scaledDown {
			text += "ready"
			for e := range 100 {
				text += fmt.Sprintf(" 10.1.%d.%d", i%250, e)
			}
		}
		list = append(list, service(t, fmt.Sprintf("s%04d", i), text))
	}
	return list
}

func TestLargeTableIsReadAsStream(t *testing.T) {
	const large = 30_000
	n := netnstest.New(t)
	fillTable(t, n, large)
	live := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	one := filterOf(destinationNumber(0))
	two := one.union(filterOf(destinationNumber(1)))
	before, most, checked := live(), uint64(0), 0
	reader, writer := netfilter.NewConn(n.FD), netfilter.NewConn(n.FD)
	defer reader.Close()
	defer writer.Close()
	seen, ended, _, err := deleteStale(t.Context(), reader, writer, kind{api.IPv4, unix.IPPROTO_UDP}, two, func(flow) bool {
		if checked++; checked%10_000 == 0 {
			most = max(most, live())
		}
		return false
	}, nil)
	if seen != large || checked != large || ended != 0 || err != nil {
		t.Fatalf("of %d entries read %d, checked %d, deleted %d: %v", large, seen, checked, ended, err)
	}
	t.Logf("live heap grew by %d KiB at most", (int64(most)-int64(before))/1024)
	if most > before+2<<20 {
		t.Errorf("live heap grew from %d to %d bytes", before, most)
	}
	// For a single destination, the kernel returns only the entries of this destination.
	if seen, _, _, err := deleteStale(t.Context(), reader, writer, kind{api.IPv4, unix.IPPROTO_UDP}, one, func(flow) bool { return false }, nil); seen != large/1000 || err != nil {
		t.Errorf("of the %d entries of one service read %d: %v", large/1000, seen, err)
	}
}

func BenchmarkLargeTable(b *testing.B) {
	const large = 250_000
	n := netnstest.New(b)
	fillTable(b, n, large)
	everything := thousandServices(b, 0)
	pass := func(b *testing.B, r *reconciler) outcome {
		p := r.read(b.Context())
		if p.err != nil {
			b.Fatal(p.err)
		}
		return p
	}
	// The service "idle" has no connections. It loses its only endpoint.
	b.Run("change", func(b *testing.B) {
		b.ReportAllocs()
		r := newReconciler(Options{NetNS: n.FD})
		before := services(b, map[string]string{"idle": "ip 10.97.0.1\nport 53\nready 10.1.0.1"})
		after := services(b, map[string]string{"idle": "ip 10.97.0.1\nport 53"})
		for b.Loop() {
			r.Sync(b.Context(), changesBetween(before, after))
			if p := pass(b, r); p.seen != 0 {
				b.Fatalf("%+v", p)
			}
		}
	})
	b.Run("restart", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			r := newReconciler(Options{NetNS: n.FD})
			r.Sync(b.Context(), wholePass(everything))
			if p := pass(b, r); p.seen != large || p.deleted != 0 {
				b.Fatalf("%+v", p)
			}
		}
	})
	b.Run("half is deleted", func(b *testing.B) {
		b.ReportAllocs()
		half := thousandServices(b, 500)
		for b.Loop() {
			b.StopTimer()
			n := netnstest.New(b)
			fillTable(b, n, large)
			b.StartTimer()
			r := newReconciler(Options{NetNS: n.FD})
			r.Sync(b.Context(), wholePass(half))
			if p := pass(b, r); p.deleted != large/2 {
				b.Fatalf("%+v", p)
			}
		}
	})
}
