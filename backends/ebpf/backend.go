// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/kpng-project/kpng/sink"
	"k8s.io/klog/v2"
)

// Backend is a sink that programs services into another sink and into eBPF maps. See the
// package comment.
type Backend struct {
	opts  Options
	proxy sink.Sink

	mu        sync.Mutex // guards the fields below
	cgroup    string
	programs  *programs
	dataplane *dataplane
	// complete is true while the maps have the services of a whole pass. Otherwise, the
	// backend does not let the programs translate connections.
	complete bool
	// beatAt is the time of the last heartbeat.
	beatAt time.Time
	// compareAt is the time of the next comparison with the kernel.
	compareAt time.Time
	// compared is the time spent on the comparison that has begun.
	compared time.Duration
}

var (
	_ sink.Sink     = (*Backend)(nil)
	_ sink.Starter  = (*Backend)(nil)
	_ sink.Stopper  = (*Backend)(nil)
	_ sink.Cleaner  = (*Backend)(nil)
	_ sink.Verifier = (*Backend)(nil)
)

// New returns a backend. The argument proxy is another sink, such as that of package
// nftables.
// This sink must program all services for all traffic. It must not masquerade all
// connections, because connections through eBPF keep the address of the client. The
// backend starts, stops and cleans up the other sink. New does not access the kernel. It
// returns an error if opts are invalid.
func New(proxy sink.Sink, opts Options) (*Backend, error) {
	if err := opts.complete(); err != nil {
		return nil, fmt.Errorf("ebpf options: %w", err)
	}
	return &Backend{opts: opts, proxy: proxy}, nil
}

// Unwrap returns the other sink, see [sink.As].
func (b *Backend) Unwrap() sink.Sink { return b.proxy }

// Start implements [sink.Starter]. It starts the other sink, opens or makes the maps, and
// attaches the programs. Programs of an earlier process are replaced without
// interruption. If no process has run for ten minutes, the programs translate connections
// after the first pass has ended. Start needs CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON. If
// another process programs the instance, the error wraps [sink.ErrOwned].
func (b *Backend) Start(ctx context.Context) error {
	// The other sink comes first, because another process may own its objects. Then the
	// programs of that process must stay.
	if s, ok := sink.As[sink.Starter](b.proxy); ok {
		if err := s.Start(ctx); err != nil {
			return err
		}
	}
	if err := b.start(ctx); err != nil {
		return errors.Join(err, b.stopProxy(ctx))
	}
	return nil
}

func (b *Backend) start(ctx context.Context) (err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.cgroup = b.opts.Cgroup; b.cgroup == "" {
		if b.cgroup, err = findCgroup(); err != nil {
			return err
		}
	}
	if err := checkFileSystems(b.cgroup, b.opts.BPFFS); err != nil {
		return err
	}
	p, err := load(ctx, &b.opts)
	if err != nil {
		return err
	}
	if err := p.attach(&b.opts, b.cgroup); err != nil {
		return errors.Join(err, p.close())
	}
	b.programs, b.complete = p, false
	b.compareAt = time.Now().Add(repairPause)
	b.dataplane = &dataplane{
		planner:   b.opts.planner(),
		frontends: kernelTable[frontendKey, list]{"frontends", p.Frontends},
		slots:     kernelTable[slotKey, address]{"slots", p.Slots},
		members:   kernelTable[memberKey, uint32]{"members", p.Members},
		clientTables: clientTables{
			clients: kernelTable[clientKey, choice]{"clients", p.Clients},
			counts:  kernelTable[clusterIP, uint64]{"client_counts", p.ClientCounts},
			now:     p.time,
		},
		capacity: size{b.opts.MaxFrontends, b.opts.MaxEndpoints, b.opts.MaxMembers},
	}
	return nil
}

// Stop implements [sink.Stopper]. The programs continue to work; see Cleanup.
func (b *Backend) Stop(ctx context.Context) error {
	return errors.Join(b.stopProxy(ctx), b.stop())
}

func (b *Backend) stopProxy(ctx context.Context) error {
	if s, ok := sink.As[sink.Stopper](b.proxy); ok {
		return s.Stop(ctx)
	}
	return nil
}

func (b *Backend) stop() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.programs == nil {
		return nil
	}
	p := b.programs
	b.programs = nil
	return p.close()
}

// Cleanup implements [sink.Cleaner]. It detaches the programs and deletes the maps of the
// instance if they exist, and cleans up the other sink. The backend need not be started.
// If another process uses the maps, they stay, and the error wraps [sink.ErrOwned]. If
// another process programs only the objects of the other sink, such as the backend
// nftables in place of this one, only those objects stay.
func (b *Backend) Cleanup(ctx context.Context) error {
	var err error
	if s, ok := sink.As[sink.Cleaner](b.proxy); ok {
		err = s.Cleanup(ctx)
	}
	removeErr := b.remove()
	if errors.Is(err, sink.ErrOwned) && removeErr == nil {
		klog.FromContext(ctx).Info("Removed only the eBPF programs and maps", "reason", err)
		return nil
	}
	return errors.Join(err, removeErr)
}

// remove detaches the programs and deletes the maps, unless another process uses them.
func (b *Backend) remove() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	dir := b.opts.directory()
	if _, err := os.Stat(dir); err == nil && b.programs == nil {
		lock, err := lockDirectory(dir)
		if errors.Is(err, sink.ErrOwned) {
			return err
		}
		if err == nil {
			defer lock.Close()
		}
	}
	return remove(&b.opts)
}

// Sync implements [sink.Sink]. It writes c to the maps, passes c to the other sink, and
// returns the result of the other sink. So new connections do not use removed endpoints
// while the other sink takes long or fails.
//
// An error of eBPF does not fail Sync. The backend logs it and pauses the programs, so that
// the other sink handles all connections. Verify later requests a new pass.
func (b *Backend) Sync(ctx context.Context, c *sink.Changes) (err error) {
	defer func() { err = b.proxy.Sync(ctx, c) }() // runs even if the method program panics
	b.program(ctx, c)
	return nil
}

// repairPause is the time from an error of eBPF to the next attempt to use eBPF.
const repairPause = time.Minute

// program writes the changes to the maps. From the end of a pass on, it lets the programs
// translate connections.
func (b *Backend) program(ctx context.Context, c *sink.Changes) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.complete && b.dataplane.records == nil && !c.First {
		return // after an error, the maps are not written until the next pass begins
	}
	b.checkAge()
	err := b.dataplane.sync(ctx, c)
	complete := b.complete || c.Last
	if err == nil && complete {
		err = b.beat()
	}
	if err != nil {
		b.fail(ctx, err)
		return
	}
	if complete && !b.complete {
		klog.FromContext(ctx).Info("The eBPF programs translate connections")
	}
	b.complete = complete
	b.opts.Used(b.dataplane.usage())
}

// patience is the time without a heartbeat after which the programs leave all connections to
// the other sink.
const patience = 10 * time.Minute

// checkAge stops the use of the maps until the next pass has ended if the programs have
// already stopped to use them. This happens after the process was frozen, or after the other
// sink blocked.
func (b *Backend) checkAge() {
	if b.complete && time.Since(b.beatAt) >= patience {
		b.complete, b.compareAt = false, time.Time{}
	}
}

// beat lets the programs translate connections for the time patience.
func (b *Backend) beat() error {
	if b.programs == nil {
		return nil
	}
	b.beatAt = time.Now()
	return b.programs.beat()
}

// fail pauses the programs until a later pass has ended. The maps may miss changes, so the
// pause also applies to the next process.
func (b *Backend) fail(ctx context.Context, err error) {
	b.complete, b.dataplane.records = false, nil
	b.compareAt = time.Now().Add(repairPause)
	if b.programs != nil {
		err = errors.Join(err, b.programs.pause())
	}
	klog.FromContext(ctx).Error(err, "Paused the eBPF programs; all services are handled without eBPF", "retryAfter", repairPause)
}

// minPause is the shortest time between two comparisons with the kernel. The pause after
// a comparison is at least pauseFactor times as long as the comparison, so that
// comparisons use at most 2 % of a CPU.
const (
	minPause    = 10 * time.Second
	pauseFactor = 50
)

// Verify implements [sink.Verifier]. It verifies the other sink. From time to time, it
// compares the maps with the records of the backend, and tries to add services that did
// not fit into the maps. If another program has detached the eBPF programs, it attaches
// them again. After an error of eBPF, it requests a new pass.
func (b *Backend) Verify(ctx context.Context) error {
	var err error
	if s, ok := sink.As[sink.Verifier](b.proxy); ok {
		err = s.Verify(ctx)
	}
	return errors.Join(err, b.verify(ctx))
}

func (b *Backend) verify(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.programs == nil {
		return nil
	}
	b.checkAge()
	if b.complete {
		if err := b.beat(); err != nil {
			return err
		}
	}
	now := time.Now()
	if now.Before(b.compareAt) {
		return nil
	}
	if !b.complete {
		b.compareAt = now.Add(repairPause)
		return fmt.Errorf("fill the eBPF maps (%w)", sink.ErrStartOver)
	}
	if b.dataplane.records == nil {
		return nil
	}
	err := b.reattach(ctx)
	done, compareErr := b.dataplane.compare(ctx)
	b.compared += time.Since(now)
	if err = errors.Join(err, compareErr); err == nil && !done {
		return nil // ctx ended; the next call continues
	}
	if err == nil {
		err = b.dataplane.retry()
		b.opts.Used(b.dataplane.usage())
	}
	b.compareAt = time.Now().Add(max(minPause, pauseFactor*b.compared))
	b.compared = 0
	return err
}

func (b *Backend) reattach(ctx context.Context) error {
	if b.programs.attached(&b.opts, b.cgroup) {
		return nil
	}
	klog.FromContext(ctx).Info("Another program detached eBPF programs; attaching them again", "cgroup", b.cgroup)
	return b.programs.attach(&b.opts, b.cgroup)
}

// VerifyInterval returns the time between two calls of Verify. It is the interval of the
// other sink, or ten seconds if that sink has none.
func (b *Backend) VerifyInterval() time.Duration {
	if s, ok := sink.As[interface{ VerifyInterval() time.Duration }](b.proxy); ok {
		return cmp.Or(s.VerifyInterval(), minPause)
	}
	return minPause
}
