// SPDX-License-Identifier: Apache-2.0

package program

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/ebpf"
	"github.com/kpng-project/kpng/backends/iptables"
	"github.com/kpng-project/kpng/backends/ipvs"
	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/backends/userspace"
	"github.com/kpng-project/kpng/internal/kernelnode"
	"github.com/kpng-project/kpng/internal/ownership"
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"
)

// leftover describes rules or devices in the kernel that another service proxy has
// left. They may handle connections to services before the rules of this backend.
type leftover struct {
	what, remove string
	// The field "by" is the backend of kpng that has left them. It is zero for
	// kube-proxy.
	by instance
}

// instance is an instance of a backend of kpng.
type instance struct{ backend, name string }

// cleanupCommand is the command that removes everything of the instance.
func (i instance) cleanupCommand() string {
	if i.name == "" {
		return "kpng cleanup " + i.backend
	}
	return "kpng cleanup " + i.backend + " --instance " + i.name
}

func (l *leftover) proxy() string {
	if l.by == (instance{}) {
		return "kube-proxy"
	}
	return "kpng"
}

func (l *leftover) problem() string {
	return fmt.Sprintf("rules of %s without a running owner may take connections to services: %s; remove them with: %s", l.proxy(), l.what, l.remove)
}

// lookInterval is the shortest time between two searches for leftovers. A search finds
// rules of a proxy that was started or stopped in the meantime. For example, an upgrade
// of the cluster may create kube-proxy again.
const lookInterval = time.Minute

// removeInterval takes the place of lookInterval with --remove-other-backends, so that the
// rules of another backend disappear soon after its process has ended.
const removeInterval = 5 * time.Second

// leftovers searches for leftovers of other proxies while a backend runs.
type leftovers struct {
	self         instance
	removeOthers bool
	flags        *pflag.FlagSet
	count        *prometheus.GaugeVec
	// programmed is true after the first pass that programmed all services. Then the
	// channel wake starts a search.
	programmed atomic.Bool
	wake       chan struct{}
	// The field now is time.Now, and the field cleanUp is the function cleanUp. Tests
	// replace both.
	now     func() time.Time
	cleanUp func(ctx context.Context, i instance, bpffs string) error
	// searchTime is the duration of the last search. After a removal of an instance has
	// failed, retryAt has the time of the next attempt.
	searchTime time.Duration
	retryAt    map[instance]time.Time

	mu    sync.Mutex
	found []leftover
	// fault is the last error of a search.
	fault string
}

func newLeftovers(backend string) *leftovers {
	l := &leftovers{
		self: instance{backend: backend}, wake: make(chan struct{}, 1),
		now: time.Now, cleanUp: cleanUp, retryAt: map[instance]time.Time{},
		count: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Namespace: "kpng", Name: "leftovers", Help: "Rules and devices of other service proxies that have no running owner, by proxy: kpng or kube-proxy.",
		}, []string{"proxy"}),
	}
	l.setFound(nil)
	return l
}

func (l *leftovers) register(fs *pflag.FlagSet) {
	l.flags = fs
	fs.BoolVar(&l.removeOthers, "remove-other-backends", false, "after all services are programmed, remove what other backends of kpng with the same instance have left on this node")
}

// setProgrammed records that all services are programmed.
func (l *leftovers) setProgrammed() {
	if !l.programmed.Swap(true) {
		l.wake <- struct{}{}
	}
}

// problems returns a sentence for each leftover of the last search.
func (l *leftovers) problems() (all []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.found {
		all = append(all, l.found[i].problem())
	}
	return all
}

// follow repeats the search until stop is called.
func (l *leftovers) follow(ctx context.Context) (stop func()) {
	l.self.name = flagValue(l.flags, "instance")
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var running sync.WaitGroup
	running.Go(func() {
		for ctx.Err() == nil {
			l.look(ctx)
			select {
			case <-ctx.Done():
			case <-l.wake:
			case <-time.After(l.pause()):
			}
		}
	})
	return func() {
		cancel()
		running.Wait()
	}
}

// pause returns the time from the end of a call of look to the next search. It does not
// depend on the duration of removals, because a removal may wait for the end of
// connections.
func (l *leftovers) pause() time.Duration {
	interval := lookInterval
	if l.removeOthers {
		interval = removeInterval
	}
	return max(interval, kernelnode.PauseFactor*l.searchTime)
}

// look searches once, logs what has changed since the last search, and removes leftovers
// of other backends if that is requested.
func (l *leftovers) look(ctx context.Context) {
	log := klog.FromContext(ctx)
	begin := l.now()
	found, err := l.find(ctx)
	l.searchTime = l.now().Sub(begin)
	if ctx.Err() != nil {
		return
	}
	fault := ""
	if err != nil {
		if fault = err.Error(); fault != l.fault {
			log.Error(err, "Cannot look for rules that other proxies left")
		}
	}
	l.fault = fault
	for i := range found {
		if f := &found[i]; !slices.Contains(l.found, *f) {
			log.Info("Rules of another proxy without a running owner may take connections to services; remove them", "proxy", f.proxy(), "found", f.what, "remove", f.remove)
		}
	}
	for _, f := range l.found {
		if err == nil && !slices.Contains(found, f) {
			log.Info("Rules of another proxy have been removed", "proxy", f.proxy(), "was", f.what)
		}
	}
	l.setFound(found)
	if l.removeOthers && l.programmed.Load() {
		l.setFound(slices.DeleteFunc(slices.Clone(found), func(f leftover) bool { return l.remove(ctx, f) }))
	}
}

// remove removes a leftover of another backend with the same instance name. It reports
// whether the leftover is removed. After an error, it retries when lookInterval has
// passed.
func (l *leftovers) remove(ctx context.Context, f leftover) bool {
	if f.by == (instance{}) || f.by.name != l.self.name || l.now().Before(l.retryAt[f.by]) {
		return false
	}
	log := klog.FromContext(ctx).WithValues("backend", f.by.backend, "found", f.what)
	if err := l.cleanUp(ctx, f.by, l.bpffs()); err != nil {
		l.retryAt[f.by] = l.now().Add(lookInterval)
		if ctx.Err() == nil {
			log.Error(err, "Cannot remove the rules of another backend; retrying")
		}
		return false
	}
	log.Info("Removed the rules of another backend")
	return true
}

// drainTime is how long established connections through IPVS may continue after another
// backend has replaced IPVS.
const drainTime = time.Hour

// cleanUp removes everything of an instance that no process owns.
func cleanUp(ctx context.Context, i instance, bpffs string) error {
	clean := func(c sink.Cleaner, err error) error {
		if err != nil {
			return err
		}
		return c.Cleanup(ctx)
	}
	switch i.backend {
	case "nftables":
		return clean(nftables.New(nftables.Options{Options: backends.Options{Instance: i.name}}))
	case "iptables":
		return clean(iptables.New(iptables.Options{Options: backends.Options{Instance: i.name}}))
	case "ipvs":
		return clean(ipvs.New(ipvs.Options{Options: backends.Options{Instance: i.name}, Drain: drainTime}))
	case "ebpf":
		// Clean up only the backend ebpf. The table of nftables beside it is a leftover of
		// its own.
		nothing := sink.Func(func(context.Context, *sink.Changes) error { return nil })
		return clean(ebpf.New(nothing, ebpf.Options{Options: backends.Options{Instance: i.name}, BPFFS: bpffs}))
	case "userspace":
		return clean(userspace.New(userspace.Options{AddAddresses: true}))
	}
	return fmt.Errorf("no clean-up of backend %s", i.backend)
}

func (l *leftovers) setFound(found []leftover) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.found = found
	for _, proxy := range []string{"kube-proxy", "kpng"} {
		n := 0
		for i := range found {
			if found[i].proxy() == proxy {
				n++
			}
		}
		l.count.WithLabelValues(proxy).Set(float64(n))
	}
}

func (l *leftovers) bpffs() string {
	if dir := flagValue(l.flags, "bpffs"); dir != "" {
		return dir
	}
	return "/sys/fs/bpf"
}

// find searches the network namespace of the calling thread. If a part of the search
// fails, find returns the results of the other parts and an error. It also returns the
// leftovers of kube-proxy, unless this proxy has a proxy name of its own. In that case,
// kube-proxy usually runs.
func (l *leftovers) find(ctx context.Context) (found []leftover, err error) {
	all, err := findAll(ctx, l.bpffs())
	seen := map[instance]bool{}
	for _, f := range all {
		switch {
		case f.by != (instance{}):
			if seen[f.by] || l.isSelf(f.by) || l.isOwned(f.by) {
				continue
			}
			seen[f.by] = true
		case flagValue(l.flags, "service-proxy-name") != "":
			continue
		case f.what == ipvsServers && (l.self.backend == "ipvs" || slices.ContainsFunc(all, func(f leftover) bool { return f.by.backend == "ipvs" })):
			continue // they may belong to the backend ipvs
		}
		found = append(found, f)
	}
	return found, err
}

// isSelf reports whether i is this backend, or a part of it.
func (l *leftovers) isSelf(i instance) bool {
	return i == l.self || l.self.backend == "ebpf" && i == instance{"nftables", l.self.name}
}

// isOwned reports whether a running process owns an instance.
func (l *leftovers) isOwned(i instance) bool {
	suffix := ""
	if i.name != "" {
		suffix = "-" + i.name
	}
	switch i.backend {
	case "nftables":
		return ownership.IsOwned("nftables table kpng" + suffix)
	case "ebpf":
		// A process with the backend ebpf also owns this table.
		return l.self != instance{"nftables", i.name} && ownership.IsOwned("nftables table kpng"+suffix)
	case "ipvs":
		return ownership.IsOwned("nftables table kpng-ipvs" + suffix)
	case "iptables":
		return ownership.IsOwned("iptables chains KPNG-" + i.name + map[bool]string{true: "-"}[i.name != ""])
	default:
		return ownership.IsOwned(fmt.Sprintf("local routes of protocol %d", userspaceProtocol))
	}
}

// findAll returns the rules and devices of all proxies, whether they have a running owner
// or not.
func findAll(ctx context.Context, bpffs string) (found []leftover, err error) {
	var errs []error
	for _, find := range []func(context.Context) ([]leftover, error){
		nftablesLeftovers, legacyLeftovers, interfaceLeftovers, serverLeftovers, routeLeftovers,
		func(context.Context) ([]leftover, error) { return ebpfLeftovers(bpffs) },
	} {
		some, err := find(ctx)
		found = append(found, some...)
		errs = append(errs, err)
	}
	return found, errors.Join(errs...)
}
