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
	// Selection selects the addresses. Default: primary.
	Selection Selection
	// ExcludeInterfaces are names of interfaces whose addresses are not the node's own,
	// because a proxy adds addresses of services there, such as kube-ipvs0. Default: none.
	ExcludeInterfaces []string
	// NetNS is the file descriptor of the network namespace. It must stay open while the
	// Watcher is used. Default 0: the namespace of the process. Linux only.
	NetNS int
	// Interval is the time between checks without a notification. Linux sends notifications
	// of addresses, but not of a changed default route; other systems send none. Default ten
	// seconds.
	Interval time.Duration
	// Clock measures the interval. Default: the real clock.
	Clock clock.WithTicker
}

// burstDelay is how long a Watcher waits after a notification, because addresses often
// change in bursts.
const burstDelay = 50 * time.Millisecond

// Watcher is a Source with the addresses of the machine. SetNode passes the Node object
// to it.
type Watcher struct {
	opts Options
	list List

	mu       sync.Mutex
	seen     machineAddresses
	internal []netip.Addr // of the Node object; nil while it is unknown
}

// machineAddresses are the addresses of a machine.
type machineAddresses struct {
	all []netip.Addr
	// outgoing are the source addresses of the default routes.
	outgoing []netip.Addr
}

// New returns a Watcher and reads the addresses once. It returns an error if that fails.
// Without Run or Start, the addresses do not change.
func New(opts Options) (*Watcher, error) {
	if opts.Interval == 0 {
		opts.Interval = 10 * time.Second
	}
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	w := &Watcher{opts: opts}
	if err := w.read(); err != nil {
		return nil, err
	}
	return w, nil
}

// Addresses implements Source.
func (w *Watcher) Addresses() ([]netip.Addr, <-chan struct{}) { return w.list.Addresses() }

// SetNode sets the Node object, or nil if it is unknown. It takes effect before SetNode
// returns.
func (w *Watcher) SetNode(node *api.Node) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.internal = OfNode(node)
	w.publish()
}

// OfNode returns the addresses of a Node object: its InternalIPs or, if it has none, its
// ExternalIPs.
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

// Start follows the machine's addresses in the background until the function stop is
// called, even after ctx ends. That function waits until all goroutines have ended.
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

// Run follows the machine's addresses until ctx ends. It logs and retries failures. After
// a failure, Addresses returns the last known addresses.
func (w *Watcher) Run(ctx context.Context) {
	ticker := w.opts.Clock.NewTicker(w.opts.Interval)
	defer ticker.Stop()
	log := klog.FromContext(ctx)
	var notified <-chan struct{}
	for ctx.Err() == nil {
		if notified == nil {
			var err error
			if notified, err = subscribe(ctx, w.opts.NetNS); err != nil {
				log.Error(err, "No notifications of node addresses; polling", "interval", w.opts.Interval)
			}
		}
		if err := w.read(); err != nil {
			log.Error(err, "Cannot read node addresses; keeping the last known ones")
		}
		select {
		case <-ctx.Done():
		case <-ticker.C():
		case _, ok := <-notified:
			if !ok {
				notified = nil // subscribe again, because a lost notification may have been a change
			}
			select {
			case <-ctx.Done():
			case <-w.opts.Clock.After(burstDelay):
			}
		}
	}
	drain(notified)
}

// drain waits until the goroutine that sends notifications has ended.
func drain(notified <-chan struct{}) {
	if notified != nil {
		for range notified {
		}
	}
}

func (w *Watcher) read() error {
	s, err := readAddresses(w.opts.NetNS, w.opts.ExcludeInterfaces)
	if err != nil {
		return fmt.Errorf("read node addresses: %w", err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.seen = s
	w.publish()
	return nil
}

// publish computes the selected addresses and sets the list. The caller holds the lock.
func (w *Watcher) publish() {
	primary := w.internal
	if primary == nil {
		primary = w.seen.outgoing
	}
	w.list.Set(w.opts.Selection.of(w.seen.all, primary)...)
}

// unrouted has addresses that match only default routes, because they are reserved for
// documentation (RFC 5737, RFC 3849).
var unrouted = [...]netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}
