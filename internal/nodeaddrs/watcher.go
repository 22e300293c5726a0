// SPDX-License-Identifier: Apache-2.0

package nodeaddrs

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

// Options are the settings of a Watcher. The zero value selects the defaults.
type Options struct {
	// Selection and ExcludeInterfaces are the same as in nodeaddr.Options.
	Selection         []string
	ExcludeInterfaces []string
	// NetNS is a file descriptor of the network namespace. It must stay open while the
	// Watcher is used. NetNS works only on Linux. Default 0: the network namespace of the
	// process.
	NetNS int
}

// After the time interval, the Watcher reads the addresses even without a notification.
// Linux sends no notification when only a default route changes. On other systems, there
// are no notifications.
const interval = 10 * time.Second

// burstDelay is how long the Watcher waits after a notification before it reads the
// addresses. It waits because addresses often change in bursts.
const burstDelay = 50 * time.Millisecond

// Watcher follows the addresses of the machine. Pass the Node object to [SetNode], because
// it has the primary addresses.
type Watcher struct {
	opts     Options
	selected selection
	clock    clock.WithTicker
	list     List

	mu       sync.Mutex
	seen     machineAddresses
	internal []netip.Addr // addresses of the Node object; nil while it is unknown
}

type machineAddresses struct {
	all []netip.Addr
	// outgoing has the source addresses of packets on the default routes.
	outgoing []netip.Addr
}

// New reads the addresses and returns a Watcher. It returns an error if the selection is
// invalid, or if it cannot read the addresses. Until Start is called, the Watcher does not
// read the addresses again.
func New(opts Options) (*Watcher, error) { return newWatcher(opts, clock.RealClock{}) }

func newWatcher(opts Options, clock clock.WithTicker) (*Watcher, error) {
	selected, err := parseSelection(opts.Selection)
	if err != nil {
		return nil, err
	}
	w := &Watcher{opts: opts, selected: selected, clock: clock}
	if err := w.read(); err != nil {
		return nil, err
	}
	return w, nil
}

// Addresses implements nodeaddr.Source.
func (w *Watcher) Addresses() ([]netip.Addr, <-chan struct{}) { return w.list.Addresses() }

// SetNode passes the Node object to src if src has a method SetNode. A [Watcher] has this
// method. A nil node means that the Node object is unknown. When the method SetNode of a
// Watcher returns, the Watcher's addresses are up to date. A sink that has a
// nodeaddr.Source calls SetNode with Changes.Node if Changes.NodeChanged is true. Several
// sinks may call SetNode for the same source.
func SetNode(src any, node *api.Node) {
	if s, ok := src.(interface{ SetNode(*api.Node) }); ok {
		s.SetNode(node)
	}
}

// SetNode sets the Node object, which has the primary addresses. See the function
// [SetNode].
func (w *Watcher) SetNode(node *api.Node) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.internal = OfNode(node)
	w.publish()
}

// OfNode implements nodeaddr.OfNode.
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

// Start follows the addresses of the machine until the function stop is called, even if
// ctx ends earlier. If it cannot read the addresses, it logs an error and tries again
// later. Meanwhile Addresses returns the last known addresses. The function stop returns
// when all goroutines have ended.
func (w *Watcher) Start(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		w.run(ctx)
	}()
	return func() {
		cancel()
		<-ended
	}
}

func (w *Watcher) run(ctx context.Context) {
	ticker := w.clock.NewTicker(interval)
	defer ticker.Stop()
	log := klog.FromContext(ctx)
	var notified <-chan struct{}
	for ctx.Err() == nil {
		if notified == nil {
			var err error
			if notified, err = subscribe(ctx, w.opts.NetNS); err != nil {
				log.Error(err, "No notifications of node addresses; polling", "interval", interval)
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
				notified = nil // the loop subscribes again, because notifications were lost
			}
			select {
			case <-ctx.Done():
			case <-w.clock.After(burstDelay):
			}
		}
	}
	drain(notified)
}

// drain waits until the goroutine of subscribe has ended.
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

// publish updates the addresses that Addresses returns. The caller must hold the lock.
func (w *Watcher) publish() {
	primary := w.internal
	if primary == nil {
		primary = w.seen.outgoing
	}
	w.list.Set(w.selected.of(w.seen.all, primary)...)
}

// unrouted has addresses that are reserved for documentation (RFC 5737, RFC 3849). Only
// default routes lead to them.
var unrouted = [...]netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}
