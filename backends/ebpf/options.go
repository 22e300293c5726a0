// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"cmp"
	"errors"
	"fmt"
	"hash/maphash"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendoptions"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// Options are the settings of the dataplane. The dataplane supports only these fields of
// [backends.Options]: Instance, NodeAddresses, Stats and Observer. Set the other fields
// in the options of the other sink (see [New]). Without NodeAddresses, the other sink
// handles all node ports.
//
// The maps and links are in the directory "kpng-ebpf", or for an instance
// "kpng-ebpf-<Instance>", below BPFFS. Instance has at most 64 letters, digits, "-" and "_".
//
// With Stats, the programs count the connections of at most MaxMembers pairs of a frontend
// and an endpoint. The other sink needs this option, too, so that its numbers are added.
//
// After Sync or Verify may have changed the maps, the Observer's method Holds gets the
// numbers of "frontends", "endpoints" and "members" in them. The kinds "max_frontends",
// "max_endpoints" and "max_members" are the options MaxFrontends, MaxEndpoints and
// MaxMembers. The kind "services_left" is the number of services that need more than
// their share of the maps, or have a frontend that did not fit into the maps. The other
// sink handles these frontends. The method Wrote is not called.
type Options struct {
	backends.Options

	// Cgroup is a directory of the cgroup file system, version 2. The programs handle
	// sockets that processes in this cgroup and in cgroups below it have opened. Default:
	// the root of the file system. Start fails if the root is not visible, as in a container
	// with a cgroup namespace of its own.
	Cgroup string
	// BPFFS is the mount point of a BPF file system that stays mounted while the backend
	// does not run. Default: /sys/fs/bpf.
	BPFFS string

	// HostNetworkOnly restricts the programs to sockets in the network namespace in which
	// the process started. Packets of pods then still have the service as destination.
	// Service meshes, and pods that run virtual machines, may need this destination. Linux
	// 5.14 or newer is required.
	HostNetworkOnly bool
	// ExcludedCgroups are at most 4,096 paths of cgroups below Cgroup, such as
	// "system.slice/mesh.service". A path has at most 16 elements. If a process connects
	// or sends while it is in one of these cgroups, or in a cgroup below it, the other
	// sink handles the connection or datagram. Existing connections stay. A cgroup need
	// not exist yet: Verify excludes it when it has been made.
	ExcludedCgroups []string
	// ExcludedPods returns the UIDs of pods whose cgroups are excluded, too. For a static
	// pod, this is the UID that kubelet uses, not the UID of the mirror pod. Pods without a
	// cgroup on this node are ignored. Together with ExcludedCgroups, at most 4,096 cgroups
	// are excluded. Start and Verify call the function; it must not block. While the
	// caller does not know the pods, the result known is false. Then the programs
	// continue to exclude the same pods. Default: no pods.
	ExcludedPods func() (pods []types.UID, known bool)
	// TCPOnly restricts the programs to TCP. The other sink handles all UDP ports.
	TCPOnly bool
	// Annotation is the name of a service annotation. The programs do not handle services
	// that have this annotation with the value "false". The source of the services must
	// deliver this annotation. Default: "kpng.io/ebpf".
	Annotation string

	// MaxFrontends is the maximum number of pairs of an address and a port that the
	// programs handle. A service may use at most an eighth of this number, of MaxEndpoints
	// and of MaxMembers, but 64 are always allowed. The other sink handles services that
	// need more. Default: 262,144.
	MaxFrontends int
	// MaxEndpoints is the maximum number of endpoints of all services together. Frontends
	// with the same endpoints share them, even if they belong to different services. While
	// a list of endpoints changes, both the old list and the new list count. Default:
	// 1,048,576.
	MaxEndpoints int
	// MaxMembers is the maximum number of endpoints of all UDP frontends and all frontends
	// with session affinity together. Default: 262,144.
	MaxMembers int
	// MaxClients is the maximum number of clients whose endpoints the programs remember for
	// session affinity. One cluster IP may have at most an eighth of them, but 64 are
	// always allowed. The other sink handles further clients of the cluster IP. The
	// programs also remember the services of at most MaxClients TCP sockets, for
	// getpeername. When there are more clients or TCP sockets, the kernel forgets those
	// that were unused for the longest time. The programs handle at most MaxClients
	// connected UDP sockets, and leave others to the other sink. Default: 65,536.
	MaxClients int
}

type public = Options

// options are the public options, and what only tests replace.
type options struct {
	public
	// tables replaces the tables of a new dataplane. Default: they stay.
	tables func(tables) tables
	// now is the clock of heartbeats and repairs. Default: [time.Now].
	now func() time.Time
	// verifyInterval is the shortest time between two comparisons with the kernel. Default:
	// minPause.
	verifyInterval time.Duration
}

var instanceName = regexp.MustCompile(`^[A-Za-z0-9_-]{0,64}$`)

// complete checks o and sets the defaults.
func (o *Options) complete() error {
	o.BPFFS = cmp.Or(o.BPFFS, "/sys/fs/bpf")
	o.Annotation = cmp.Or(o.Annotation, "kpng.io/ebpf")
	o.MaxFrontends = cmp.Or(o.MaxFrontends, 1<<18)
	o.MaxEndpoints = cmp.Or(o.MaxEndpoints, 1<<20)
	o.MaxMembers = cmp.Or(o.MaxMembers, 1<<18)
	o.MaxClients = cmp.Or(o.MaxClients, 1<<16)

	errs := []error{backendoptions.Complete(&o.Options, false, "Instance", "NodeAddresses", "Stats", "Observer")}
	if !instanceName.MatchString(o.Instance) {
		errs = append(errs, fmt.Errorf("instance %q must have at most 64 letters, digits, \"_\" and \"-\"", o.Instance))
	}
	if n := len(o.ExcludedCgroups); n > maxExcluded {
		errs = append(errs, fmt.Errorf("there are %d excluded cgroups, and at most %d are possible", n, maxExcluded))
	}
	for _, path := range o.ExcludedCgroups {
		levels := strings.Split(strings.Trim(path, "/"), "/")
		if path = filepath.Join(levels...); len(levels) > maxCgroupLevels || path == "." || !filepath.IsLocal(path) {
			errs = append(errs, fmt.Errorf("excluded cgroup %q is not a path of 1 to %d elements below the root cgroup", path, maxCgroupLevels))
		}
	}
	for name, size := range o.sizes() {
		if size < 1 || size > 1<<26 {
			errs = append(errs, fmt.Errorf("the size %d of map %s is not from 1 to 67,108,864", size, name))
		}
	}
	return errors.Join(errs...)
}

// sizes returns the maximum number of elements of each map whose size is an option.
func (o *Options) sizes() map[string]int {
	pairs := 1
	if o.Stats {
		pairs = o.MaxMembers
	}
	return map[string]int{
		"connections": pairs,
		"frontends":   o.MaxFrontends, "slots": o.MaxEndpoints, "members": o.MaxMembers,
		"clients": o.MaxClients, "tcp_peers": o.MaxClients, "udp_conns": o.MaxClients, "client_counts": o.MaxClients,
	}
}

// directory returns the directory of the instance's maps and links.
func (o *Options) directory() string {
	if o.Instance == "" {
		return filepath.Join(o.BPFFS, "kpng-ebpf")
	}
	return filepath.Join(o.BPFFS, "kpng-ebpf-"+o.Instance)
}

// share returns the share of a service in a map.
func share(size int) int { return max(size/8, 64) }

func (b *backend) planner() planner {
	o := &b.opts
	p := planner{
		annotation: o.Annotation, tcpOnly: o.TCPOnly, nodePorts: o.NodeAddresses != nil, seed: maphash.MakeSeed(),
		share: size{share(o.MaxFrontends), share(o.MaxEndpoints), share(o.MaxMembers)},
	}
	if c, ok := sink.As[backends.Capable](b.proxy); ok {
		p.below = c.Honours()
	}
	return p
}
