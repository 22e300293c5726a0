// SPDX-License-Identifier: Apache-2.0

package nodeaddr

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/kpng-project/kpng/api"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// Options are a Watcher's settings. The zero value is useful.
type Options struct {
	// Selection says which of the node's addresses to have. Default: primary.
	Selection Selection
	// ExcludeInterfaces are the names of interfaces whose addresses are not the
	// node's own: those on which a proxy puts addresses of services, such as
	// kube-ipvs0. Default: none.
	ExcludeInterfaces []string
	// NetNS is the file descriptor of the network namespace to look at, which the
	// Watcher uses as long as it is used itself. Default 0: that of the process.
	// Linux only.
	NetNS int
	// Interval is the time after which the Watcher looks, notified or not. Linux
	// notifies of addresses, but not of another default route; elsewhere there
	// is no notification. Default ten seconds.
	Interval time.Duration
	// Clock is what the interval is measured with. Default: the real one.
	Clock clock.WithTicker
}

// settle is how long a Watcher waits after a notification for others to come,
// as addresses often change in bursts.
const settle = 50 * time.Millisecond

// Watcher is a Source of what a machine has. SetNode tells it what the Node
// object says.
type Watcher struct {
	opts Options
	list List

	mu       sync.Mutex
	seen     seen
	internal []netip.Addr // of the Node object; nil while it is not known
}

// seen is what a machine says of its addresses.
type seen struct {
	all []netip.Addr
	// outgoing are those it sends from on its default routes.
	outgoing []netip.Addr
}

// New returns a Watcher that has looked once. It fails if it cannot look. Without
// Run or Start it has what it saw.
func New(opts Options) (*Watcher, error) {
	if opts.Interval == 0 {
		opts.Interval = 10 * time.Second
	}
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	w := &Watcher{opts: opts}
	if err := w.look(); err != nil {
		return nil, err
	}
	return w, nil
}

// Addresses implements Source.
func (w *Watcher) Addresses() ([]netip.Addr, <-chan struct{}) { return w.list.Addresses() }

// SetNode tells what the Node object is now, nil if it is not known. What
// Addresses returns agrees with it at once.
func (w *Watcher) SetNode(node *api.Node) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.internal = OfNode(node)
	w.publish()
}

// OfNode returns the addresses by which a Node object says the node is known: its
// InternalIPs, or if it has none its ExternalIPs.
func OfNode(node *api.Node) []netip.Addr {
	if node == nil {
		return nil
	}
	for _, kind := range [...]string{"InternalIP", "ExternalIP"} {
		var addrs []netip.Addr
		for _, a := range node.Addresses {
			if a.Type == kind {
				addrs = append(addrs, a.IP)
			}
		}
		if len(addrs) > 0 {
			return addrs
		}
	}
	return nil
}

// Start begins to follow the machine's addresses, which goes on after the end of
// ctx, until stop. That returns once nothing goes on any more.
func (w *Watcher) Start(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		w.Run(ctx)
	}()
	return func() {
		cancel()
		<-ended
	}
}

// Run follows the machine's addresses until ctx ends, and returns then. What it
// cannot do it logs and tries again; Addresses keeps the last that were seen.
func (w *Watcher) Run(ctx context.Context) {
	ticker := w.opts.Clock.NewTicker(w.opts.Interval)
	defer ticker.Stop()
	log := klog.FromContext(ctx)
	var notified <-chan struct{}
	for ctx.Err() == nil {
		if notified == nil {
			var err error
			if notified, err = subscribe(ctx, w.opts.NetNS); err != nil {
				log.Error(err, "Not notified of the node's addresses, looking at an interval", "interval", w.opts.Interval)
			}
		}
		if err := w.look(); err != nil {
			log.Error(err, "Keeping the node's addresses as they were")
		}
		select {
		case <-ctx.Done():
		case <-ticker.C():
		case _, ok := <-notified:
			if !ok {
				notified = nil // and what was lost may have been a change
			}
			select {
			case <-ctx.Done():
			case <-w.opts.Clock.After(settle):
			}
		}
	}
	drain(notified)
}

// drain waits until the one who notifies has ended.
func drain(notified <-chan struct{}) {
	if notified != nil {
		for range notified {
		}
	}
}

func (w *Watcher) look() error {
	s, err := look(w.opts.NetNS, w.opts.ExcludeInterfaces)
	if err != nil {
		return fmt.Errorf("reading the node's addresses: %w", err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.seen = s
	w.publish()
	return nil
}

// publish works out the addresses. The caller holds the lock.
func (w *Watcher) publish() {
	primary := w.internal
	if primary == nil {
		primary = w.seen.outgoing
	}
	w.list.Set(w.opts.Selection.of(w.seen.all, primary)...)
}

// anywhere are addresses that only default routes lead to, as nobody has them
// (RFC 5737, RFC 3849).
var anywhere = [...]netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}
