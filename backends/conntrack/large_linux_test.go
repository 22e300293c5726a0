// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
	"golang.org/x/sys/unix"
)

// fill enters connections of 1,000 services, of 100 endpoints each.
func fill(t testing.TB, n *netnstest.Namespace, large int) {
	list := make([]connection, large)
	for i := range list {
		service, client := i%1000, i/1000
		list[i] = connection{
			protocol: 17,
			from:     netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 2, byte(client), 2}), uint16(1024+service)),
			to:       placeNumber(service).AddrPort,
			endpoint: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(service % 250), byte(client % 100)}), 5053),
		}
		list[i].back = list[i].from
	}
	enter(t, n.FD, list...)
}

func placeNumber(i int) place {
	return place{netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), 53), unix.IPPROTO_UDP}
}

// clustered returns the services of fill, of which the first ones have lost
// their endpoints.
func clustered(t testing.TB, scaledDown int) []*api.ServiceEndpoints {
	var list []*api.ServiceEndpoints
	for i := range 1000 {
		text := fmt.Sprintf("ip %s\nport 53\n", placeNumber(i).Addr())
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

func TestALargeTableIsReadAsAStream(t *testing.T) {
	const large = 30_000
	n := netnstest.New(t)
	fill(t, n, large)
	live := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	places := []place{placeNumber(0), placeNumber(1)}
	before, most, asked := live(), uint64(0), 0
	seen, ended, err := end(t.Context(), n.FD, kind{api.IPv4, unix.IPPROTO_UDP}, places, func(flow) bool {
		if asked++; asked%10_000 == 0 {
			most = max(most, live())
		}
		return false
	})
	if seen != large || asked != large || ended != 0 || err != nil {
		t.Fatalf("of %d entries saw %d, asked about %d, ended %d: %v", large, seen, asked, ended, err)
	}
	t.Logf("live heap grew by %d KiB at most", (int64(most)-int64(before))/1024)
	if most > before+2<<20 {
		t.Errorf("live heap grew from %d to %d bytes", before, most)
	}
	// What one service has, the kernel picks out.
	if seen, _, err := end(t.Context(), n.FD, kind{api.IPv4, unix.IPPROTO_UDP}, places[:1], func(flow) bool { return false }); seen != large/1000 || err != nil {
		t.Errorf("of one service's %d entries saw %d: %v", large/1000, seen, err)
	}
}

func BenchmarkLargeTable(b *testing.B) {
	const large = 250_000
	n := netnstest.New(b)
	fill(b, n, large)
	everything := clustered(b, 0)
	pass := func(b *testing.B, r *Reconciler) Pass {
		p := r.pass(b.Context())
		if p.Err != nil {
			b.Fatal(p.Err)
		}
		return p
	}
	// A service of which no client is left scales to zero.
	b.Run("change", func(b *testing.B) {
		b.ReportAllocs()
		r := New(Options{NetNS: n.FD})
		before := services(b, map[string]string{"idle": "ip 10.97.0.1\nport 53\nready 10.1.0.1"})
		after := services(b, map[string]string{"idle": "ip 10.97.0.1\nport 53"})
		for b.Loop() {
			r.Sync(b.Context(), difference(before, after))
			if p := pass(b, r); p.Seen != 0 {
				b.Fatalf("%+v", p)
			}
		}
	})
	b.Run("restart", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			r := New(Options{NetNS: n.FD})
			r.Sync(b.Context(), whole(everything))
			if p := pass(b, r); p.Seen != large || p.Ended != 0 {
				b.Fatalf("%+v", p)
			}
		}
	})
	b.Run("half goes", func(b *testing.B) {
		b.ReportAllocs()
		half := clustered(b, 500)
		for b.Loop() {
			b.StopTimer()
			n := netnstest.New(b)
			fill(b, n, large)
			b.StartTimer()
			r := New(Options{NetNS: n.FD})
			r.Sync(b.Context(), whole(half))
			if p := pass(b, r); p.Ended != large/2 {
				b.Fatalf("%+v", p)
			}
		}
	})
}
