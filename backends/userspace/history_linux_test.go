// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/nodeaddrs"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
)

var histories = flag.Int("histories", 10, "how many random `histories` to test")

func TestHistories(t *testing.T) {
	sinktest.TestHistories(t, *histories, func(tb testing.TB) *sinktest.Subject {
		h := &historyHost{ns: netnstest.New(tb), local: map[netip.Addr]bool{}}
		node := &nodeAddresses{}
		var b *backend
		return &sinktest.Subject{
			Open: func() sink.Sink {
				var err error
				if b, err = newBackend(settings{Options: Options{Options: backends.Options{NodeAddresses: node}}, addresses: h, sockets: h}); err != nil {
					tb.Fatal(err)
				}
				return &historySink{b}
			},
			Objects: func() []string { return h.objects(tb, b) },
			Disturb: h.disturb,
			Drift:   h.drift,
			Verify: func(ctx context.Context, _ sink.Sink) error {
				// The goroutines of the backend do the same sooner or later.
				addrs, _ := node.Addresses()
				return errors.Join(b.replan(ctx, addrs), b.local.sweep(ctx), b.Verify(ctx))
			},
		}
	})
}

// nodeAddresses is a nodeaddr.Source with the addresses of the Node object. Its channel is nil,
// because the addresses change only in calls of SetNode.
type nodeAddresses struct{ nodeaddrs.List }

func (n *nodeAddresses) Addresses() ([]netip.Addr, <-chan struct{}) {
	addrs, _ := n.List.Addresses()
	return addrs, nil
}

func (n *nodeAddresses) SetNode(node *api.Node) { n.Set(nodeaddrs.OfNode(node)...) }

// historySink is a backend. After its Sync, no address changes in the background.
type historySink struct{ *backend }

func (s *historySink) Sync(ctx context.Context, c *sink.Changes) error {
	err := s.backend.Sync(ctx, c)
	for ; s.isPending() && ctx.Err() == nil; time.Sleep(100 * time.Microsecond) {
	}
	return err
}

func (s *historySink) isPending() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, of := range s.services {
		for _, err := range of.addresses {
			if isPending(err) {
				return true
			}
		}
	}
	return false
}

// historyHost has the local addresses in memory, and the sockets in a network namespace.
// Its calls fail for some addresses while it is disturbed.
type historyHost struct {
	ns *netnstest.Namespace

	mu    sync.Mutex
	local map[netip.Addr]bool
	seed  uint64 // 0: all calls succeed
}

func (h *historyHost) disturb(random *rand.Rand) (calm func()) {
	set := func(seed uint64) {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.seed = seed
	}
	set(random.Uint64() | 1)
	return func() { set(0) }
}

// fails reports whether a call fails. The order of concurrent calls has no influence.
func (h *historyHost) fails(call string, at any) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.seed == 0 {
		return false
	}
	sum := fnv.New32a()
	fmt.Fprint(sum, h.seed, call, at)
	return sum.Sum32()>>8%6 == 0
}

func (h *historyHost) Add(_ context.Context, addr netip.Addr) error {
	fails := h.fails("add", addr)
	h.mu.Lock()
	defer h.mu.Unlock()
	if fails && h.seed%4 == 1 {
		return syscall.ENOBUFS
	}
	h.local[addr] = true
	if fails {
		return syscall.ENOBUFS
	}
	return nil
}

func (h *historyHost) Remove(_ context.Context, addr netip.Addr) error {
	if h.fails("remove", addr) {
		return syscall.ENOBUFS
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.local, addr)
	return nil
}

func (h *historyHost) Left(context.Context) ([]netip.Addr, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Collect(maps.Keys(h.local)), nil
}

func (h *historyHost) Cleanup(context.Context) error { return nil }

// drift removes some local addresses.
func (h *historyHost) drift(random *rand.Rand) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, addr := range slices.SortedFunc(maps.Keys(h.local), netip.Addr.Compare) {
		if random.IntN(3) == 0 {
			delete(h.local, addr)
		}
	}
}

func (h *historyHost) ListenTCP(ctx context.Context, at netip.AddrPort) (l *net.TCPListener, err error) {
	if h.fails("listen", at) {
		return nil, syscall.EADDRINUSE
	}
	err = h.ns.Do(func() error { l, err = hostSockets{anyAddress: true}.ListenTCP(ctx, at); return err })
	return l, err
}

func (h *historyHost) ListenUDP(ctx context.Context, at netip.AddrPort) (c *net.UDPConn, err error) {
	if h.fails("listen", at) {
		return nil, syscall.EADDRINUSE
	}
	err = h.ns.Do(func() error { c, err = hostSockets{anyAddress: true}.ListenUDP(ctx, at); return err })
	return c, err
}

// objects describes the listening sockets and the local addresses.
func (h *historyHost) objects(tb testing.TB, b *backend) (lines []string) {
	for line := range strings.Lines(h.ns.Run(tb, "ss", "-Hlntu")) {
		if fields := strings.Fields(line); len(fields) > 4 {
			lines = append(lines, fmt.Sprintf("socket %s %s", fields[0], fields[4]))
		}
	}
	h.mu.Lock()
	for addr := range h.local {
		lines = append(lines, fmt.Sprintf("local %s", addr))
	}
	h.mu.Unlock()
	b.mu.Lock()
	defer b.mu.Unlock()
	for key, s := range b.services {
		for at, l := range s.listeners {
			r := currentRules(l)
			line := fmt.Sprintf("listener %s of %s: affinity %v, elsewhere %s, node %s", at, key, r.affinity, describe(r.elsewhere), describe(r.node))
			if r.admission != nil {
				line += fmt.Sprintf(", only from %v", r.admission.prefixes)
			}
			lines = append(lines, line)
		}
	}
	return lines
}

func currentRules(l listener) *rules {
	switch l := l.(type) {
	case *tcpListener:
		return l.current.Load()
	case *udpListener:
		return l.current.Load()
	default:
		panic(fmt.Sprintf("unknown listener %T", l))
	}
}

func describe(r route) string {
	if r.verdict != nodeview.Forward {
		return fmt.Sprint(r.verdict)
	}
	return fmt.Sprint(r.pool.endpoints())
}
