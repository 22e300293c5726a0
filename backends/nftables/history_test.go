// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"golang.org/x/sys/unix"
)

var histories = flag.Int("histories", 6, "how many random `histories` to test")

func TestHistories(t *testing.T) {
	for name, limit := range map[string]int{"small table": maxDumped, "large table": -1} {
		t.Run(name, func(t *testing.T) { testHistories(t, limit) })
	}
}

// testHistories tests passes that read endpoints on demand if there are more endpoints
// than limit.
func testHistories(t *testing.T, limit int) {
	sinktest.TestHistories(t, *histories, func(tb testing.TB) *sinktest.Subject {
		ns := netnstest.New(tb)
		var b *backend
		var f faults
		return &sinktest.Subject{
			Open: func() sink.Sink {
				b = makeBackend(tb, ns, Options{}, f.use, func(o *options) { o.maxDumped = limit })
				return b
			},
			Objects: func() []string {
				all := tableContents(tb, b)
				b.mu.Lock()
				defer b.mu.Unlock()
				for _, family := range nft.Families {
					s, err := readSnapshot(tb.Context(), b.table.conn, mapID{kind: kindNodePortAddresses, family: family}, nil)
					if err != nil {
						tb.Fatal(err)
					}
					for e := range s.all() {
						all = append(all, e.String())
					}
				}
				return all
			},
			Disturb: f.disturb,
			Drift:   func(random *rand.Rand) { drifts(tb, newConn(ns.FD, b.table.conn.Table), random) },
			Verify:  func(_ context.Context, s sink.Sink) error { return verifyAll(tb, s.(*backend)) },
		}
	})
}

// disturb makes transactions fail at random, until the returned function is called. Some of
// them take effect although they fail.
func (f *faults) disturb(random *rand.Rand) (calm func()) {
	refused := &netfilter.Failure{Errno: []unix.Errno{unix.EINVAL, unix.ENFILE, unix.ENOENT, unix.EEXIST}[random.IntN(4)]}
	f.exchange = func(batch []byte, send func([]byte) error) error {
		switch random.IntN(12) {
		case 0, 1, 2:
			return refused
		case 3:
			return netfilter.ErrUnknownOutcome
		case 4:
			if err := send(batch); err != nil {
				return err
			}
			return netfilter.ErrUnknownOutcome
		default:
			return send(batch)
		}
	}
	return func() { f.exchange = nil }
}

// drifts deletes or changes elements of the table, as another program does.
func drifts(tb testing.TB, c *conn, random *rand.Rand) {
	defer c.Close()
	for range 1 + random.IntN(3) {
		all := allMaps()
		m := all[random.IntN(len(all))]
		s, err := readSnapshot(tb.Context(), c, m, nil)
		if err != nil {
			tb.Fatal(err)
		}
		elements := slices.Collect(s.all())
		if len(elements) == 0 {
			continue
		}
		e := elements[random.IntN(len(elements))]
		changed := e
		changed.value = elements[random.IntN(len(elements))].value
		err = c.Transact(tb.Context(), func(w *nft.Writer) {
			writeElements(w, unix.NFT_MSG_DELSETELEM, 0, e.ref())
			if random.IntN(2) == 0 {
				writeElements(w, unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, changed.ref())
			}
		})
		if err != nil {
			tb.Fatal(fmt.Errorf("change %s: %w", e, err))
		}
	}
}
