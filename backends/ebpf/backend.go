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

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendoptions"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// backend is the dataplane of this package. It programs services into another sink
// and into eBPF maps.
type backend struct {
	opts  options
	proxy sink.Sink

	mu        sync.Mutex // guards the fields below
	cgroup    string
	programs  *programs
	dataplane *dataplane
	// udp and tcp destroy sockets. They may be nil.
	udp, tcp *sweeper
	// resets has the services that request resets of TCP connections.
	resets map[types.NamespacedName]*api.View
	// complete is true while the maps have the services of a whole pass. Otherwise, the
	// backend does not let the programs translate connections.
	complete   bool
	exclusions exclusions
	// endAddresses ends the goroutine that follows the addresses of the node.
	endAddresses func()
	// beatAt is the time of the last heartbeat.
	beatAt time.Time
	// repairAt is the time of the next repair by Verify.
	repairAt time.Time
}

var (
	_ backends.Dataplane = (*backend)(nil)
	_ backends.Inspector = (*backend)(nil)
	_ backends.Counter   = (*backend)(nil)
)

// New returns a dataplane, which is also a [backends.Inspector] and a [backends.Counter].
// The argument proxy is another sink, such as a dataplane of nftables. This sink must
// program all services for all traffic. It must not masquerade all connections, because
// connections through eBPF keep the address of the client. The dataplane starts, stops
// and cleans up the other sink. New does not access the kernel. It returns an error if
// opts are invalid.
//
// Start needs CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON. An error of eBPF does not fail Sync: the
// other sink then handles all connections until a later pass has ended.
//
// The dataplane honours the same traffic parameters as the other sink (see
// [backends.Capable]). The programs honour weights, and leave services with other
// parameters to the other sink if that sink honours them.
//
// The dataplane also has this method, which [sink.As] finds:
//
//	Counts() (translated, left map[string]uint64, err error)
//
// Counts reads the counters of the programs. It requires a started dataplane. A new process
// continues with the numbers of the process before it. For each hook, the map
// "translated" has the number of addresses that the programs replaced. The hooks are
// connect4, sendmsg4, recvmsg4, getpeername4, and the same names with 6. At connect and
// sendmsg, an endpoint replaces a service. At recvmsg and getpeername, a service replaces
// an endpoint.
//
// The map "left" counts the connections and datagrams that the programs left to the other
// sink, although the maps have their frontend. Its keys are the reasons:
//
//   - abandoned: the process has not run for ten minutes, or an error paused the programs.
//   - no_endpoint: only existing UDP sockets may use the endpoints.
//   - list_changed: the list of endpoints changed at this moment.
//   - no_memory: there is no memory for the record of the socket, or the cluster IP has too
//     many clients with session affinity.
//   - bound_port: the socket had a port before it connected.
//   - ambiguous: the source of an answer to the UDP socket could be wrong.
//   - excluded: the process is in an excluded cgroup.
func New(proxy sink.Sink, opts Options) (backends.Dataplane, error) {
	b, err := newBackend(proxy, options{public: opts})
	if err != nil {
		return nil, err
	}
	return b, nil
}

func newBackend(proxy sink.Sink, opts options) (*backend, error) {
	if err := opts.complete(); err != nil {
		return nil, fmt.Errorf("ebpf options: %w", err)
	}
	opts.Observer = backendoptions.Observe(opts.Observer)
	if opts.now == nil {
		opts.now = time.Now
	}
	opts.verifyInterval = cmp.Or(opts.verifyInterval, minPause)
	return &backend{opts: opts, proxy: proxy}, nil
}

// Unwrap returns the other sink, see [sink.As].
func (b *backend) Unwrap() sink.Sink { return b.proxy }

// SharedOptions implements [backendoptions.Sharer].
func (b *backend) SharedOptions() (string, *backends.Options) { return "ebpf", &b.opts.Options }

// Start implements [sink.Starter]. It starts the other sink, opens or makes the maps, and
// attaches the programs. Programs of an earlier process are replaced without
// interruption. If no process has run for ten minutes, the programs translate connections
// after the first pass has ended.
func (b *backend) Start(ctx context.Context) error {
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

func (b *backend) start(ctx context.Context) (err error) {
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
	p, err := load(ctx, &b.opts.public)
	if err != nil {
		return err
	}
	b.programs, b.complete, b.exclusions = p, false, exclusions{missing: map[string]bool{}}
	err = b.writeExcluded(ctx)
	if err == nil {
		err = p.attach(&b.opts.public, b.cgroup)
	}
	if err != nil {
		b.programs = nil
		return errors.Join(err, p.close())
	}
	b.resets = map[types.NamespacedName]*api.View{}
	b.udp = nil
	if p.sweepsUDP {
		b.udp = (&sweeper{netNS: p.netNSFD(), protocol: unix.IPPROTO_UDP, peers: p.UdpConns, lost: b.lostUDP}).start(ctx)
	}
	b.tcp = (&sweeper{netNS: p.netNSFD(), protocol: unix.IPPROTO_TCP, peers: p.TcpPeers, lost: b.lostTCP}).start(ctx)
	b.repairAt = b.opts.now().Add(repairPause)
	d := &dataplane{
		planner: b.planner(),
		tables: tables{
			frontends: kernelTable[frontendKey, list]{"frontends", p.Frontends},
			slots:     kernelTable[slotKey, address]{"slots", p.Slots},
			members:   kernelTable[memberKey, uint32]{"members", p.Members},
			clientTables: clientTables{
				clients: kernelTable[clientKey, choice]{"clients", p.Clients},
				counts:  kernelTable[ipKey, uint64]{"client_counts", p.ClientCounts},
				now:     p.time,
			},
		},
		capacity: size{b.opts.MaxFrontends, b.opts.MaxEndpoints, b.opts.MaxMembers},
	}
	if b.opts.tables != nil {
		d.tables = b.opts.tables(d.tables)
	}
	if b.opts.Stats {
		d.owners = map[frontendKey]owner{}
	}
	b.dataplane = d.open(b.opts.verifyInterval, b.opts.Observer.Drifted)
	b.endAddresses = b.followAddresses(ctx)
	return nil
}

// Stop implements [sink.Stopper]. The programs continue to work; see Cleanup.
func (b *backend) Stop(ctx context.Context) error {
	return errors.Join(b.stopProxy(ctx), b.stop())
}

func (b *backend) stopProxy(ctx context.Context) error {
	if s, ok := sink.As[sink.Stopper](b.proxy); ok {
		return s.Stop(ctx)
	}
	return nil
}

func (b *backend) stop() error {
	if b.endAddresses != nil {
		b.endAddresses()
	}
	b.mu.Lock()
	p := b.programs
	b.programs = nil
	b.mu.Unlock()
	if p == nil {
		return nil
	}
	b.udp.close()
	b.tcp.close()
	return p.close()
}

// Cleanup implements [sink.Cleaner]. It detaches the programs and deletes the maps of the
// instance if they exist, and cleans up the other sink. The backend need not be started. If
// another process uses the maps, they stay, and the error wraps [sink.ErrOwned]. If another
// process programs only the objects of the other sink, for example with the backend
// nftables alone, only those objects stay.
func (b *backend) Cleanup(ctx context.Context) error {
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
func (b *backend) remove() error {
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
	return remove(&b.opts.public, b.programs.netNSFD())
}

// Sync implements [sink.Sink]. It writes c to the maps, passes c to the other sink, and
// returns the result of the other sink. So new connections do not use removed endpoints
// while the other sink takes long or fails.
//
// An error of eBPF does not fail Sync. The backend logs it and pauses the programs, so that
// the other sink handles all connections. Verify later requests a new pass. Only a service
// whose plan panics fails.
func (b *backend) Sync(ctx context.Context, c *sink.Changes) (err error) {
	var failed error
	defer func() { // runs even if the method program panics
		if err = b.proxy.Sync(ctx, c); failed != nil {
			err = errors.Join(err, failed)
		}
	}()
	failed = b.program(ctx, c)
	return nil
}

// repairPause is the time from an error of eBPF to the next attempt to use eBPF.
const repairPause = time.Minute

// program writes the changes to the maps. At the end of a pass, it lets the programs
// translate connections. The result is nil or a [*sink.Failed].
func (b *backend) program(ctx context.Context, c *sink.Changes) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.recordResets(c)
	if !b.complete && b.dataplane.lists == nil && !c.First {
		return nil // after an error, the maps are not written until the next pass begins
	}
	b.checkAge()
	failed := b.dataplane.sync(ctx, c)
	if _, ok := sink.Acknowledged(failed); !ok {
		b.fail(ctx, failed)
		return nil
	}
	complete := b.complete || c.Last
	if complete {
		if err := b.beat(); err != nil {
			b.fail(ctx, err)
			return failed
		}
	}
	if complete && (b.dataplane.lostUDP || !b.complete) {
		b.udp.request()
	}
	if complete && !b.complete {
		klog.FromContext(ctx).Info("The eBPF programs translate connections")
	}
	b.complete = complete
	b.reportUsage()
	return failed
}

// reportUsage reports the numbers of elements in the maps.
func (b *backend) reportUsage() {
	u := b.dataplane.usage()
	b.opts.Observer.Holds("max_frontends", b.opts.MaxFrontends)
	b.opts.Observer.Holds("max_endpoints", b.opts.MaxEndpoints)
	b.opts.Observer.Holds("max_members", b.opts.MaxMembers)
	b.opts.Observer.Holds("frontends", u.frontends)
	b.opts.Observer.Holds("endpoints", u.endpoints)
	b.opts.Observer.Holds("members", u.members)
	b.opts.Observer.Holds("services_left", u.servicesLeft)
}

// patience is a time without a heartbeat. After this time, the programs leave all
// connections to the other sink.
const patience = 10 * time.Minute

// checkAge checks whether the programs have stopped using the maps because there was no
// heartbeat. This happens if the process was frozen or the other sink blocked. Then
// checkAge makes the programs leave all connections to the other sink until the next pass
// has ended.
func (b *backend) checkAge() {
	if b.complete && b.opts.now().Sub(b.beatAt) >= patience {
		b.complete, b.repairAt = false, time.Time{}
	}
}

// beat lets the programs translate connections for the time patience.
func (b *backend) beat() error {
	if b.programs == nil {
		return nil
	}
	b.beatAt = b.opts.now()
	return b.programs.beat()
}

// fail pauses the programs until a later pass has ended. The maps may miss changes, so the
// pause also applies to the next process.
func (b *backend) fail(ctx context.Context, err error) {
	b.complete, b.dataplane.lists = false, nil
	b.repairAt = b.opts.now().Add(repairPause)
	if b.programs != nil {
		err = errors.Join(err, b.programs.pause())
	}
	klog.FromContext(ctx).Error(err, "Paused the eBPF programs; all services are handled without eBPF", "retryAfter", repairPause)
}

// minPause is the shortest time between two comparisons with the kernel.
const minPause = 10 * time.Second

// Verify implements [sink.Verifier]. It verifies the other sink. From time to time, it
// compares the maps with the records of the backend, repairs the differences, and tries
// to add services that did not fit into the maps. If another program has detached the
// eBPF programs, it attaches them again. After an error of eBPF, it requests a new pass.
func (b *backend) Verify(ctx context.Context) error {
	var err error
	if s, ok := sink.As[sink.Verifier](b.proxy); ok {
		err = s.Verify(ctx)
	}
	return errors.Join(err, b.verify(ctx))
}

func (b *backend) verify(ctx context.Context) error {
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
	if err := b.writeExcluded(ctx); err != nil {
		return err
	}
	now := b.opts.now()
	if now.Before(b.repairAt) {
		return nil
	}
	if !b.complete {
		b.repairAt = now.Add(repairPause)
		return fmt.Errorf("fill the eBPF maps (%w)", sink.ErrStartOver)
	}
	err := errors.Join(b.reattach(ctx), b.writeAddresses(ctx), b.dataplane.reconciler.Verify(ctx))
	if ctx.Err() != nil {
		return err // the next call continues
	}
	if err == nil {
		err = b.dataplane.retry(ctx)
		b.reportUsage()
	}
	if err == nil && b.opts.Stats {
		err = b.forgetPairs(ctx)
	}
	b.repairAt = b.opts.now().Add(minPause)
	// A socket may have been slow to connect to an endpoint that was removed meanwhile.
	b.udp.request()
	if len(b.resets) > 0 {
		b.tcp.request()
	}
	return err
}

func (b *backend) reattach(ctx context.Context) error {
	if b.programs.attached(&b.opts.public, b.cgroup) {
		return nil
	}
	klog.FromContext(ctx).Info("Another program detached eBPF programs; attaching them again", "cgroup", b.cgroup)
	b.opts.Observer.Drifted(true)
	return b.programs.attach(&b.opts.public, b.cgroup)
}

// VerifyInterval returns the time between two calls of Verify. It is the interval of the
// other sink, or ten seconds if that sink has none.
func (b *backend) VerifyInterval() time.Duration {
	if s, ok := sink.As[interface{ VerifyInterval() time.Duration }](b.proxy); ok {
		return cmp.Or(s.VerifyInterval(), minPause)
	}
	return minPause
}
