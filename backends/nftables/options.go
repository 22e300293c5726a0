// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strings"
	"time"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendoptions"
)

// Options are the settings of the dataplane. It supports all options of
// [backends.Options].
//
// It programs only one table of family inet, called "kpng" or "kpng2", or for an instance
// "kpng-<Instance>" or "kpng2-<Instance>". An update to a version with another table layout
// replaces the table by a table with the other name. Instance has at most 64 letters,
// digits, "-", "_" and ".". It must not be "ipvs" or begin with "ipvs-", because the
// backend ipvs uses the names of these tables. The backend ipvs makes dataplanes of this
// package with the instance "of-ipvs" and with instances that begin with "of-ipvs-".
//
// The Observer's method Wrote is called after each attempt at a transaction, with its size
// in bytes. Its method Holds gets the number of "elements" in the maps and sets of the table.
type Options struct {
	backends.Options

	// DNATPriority is the priority of the chains at hooks prerouting and output, which
	// select endpoints. SNATPriority is the priority of the chain at hook postrouting,
	// which masquerades. Both priorities determine the order among the chains of type nat
	// of all programs. If one of these chains translates a packet, the kernel skips the
	// later ones. Of two chains with the same priority, the newer one sees a packet first.
	// Zero selects the default. Default: -100 (dstnat) and 100 (srcnat).
	DNATPriority, SNATPriority int32

	// ServiceCIDRs are the ranges of cluster IPs. The dataplane drops new connections to an
	// address in these ranges if no service has the address. This applies to connections
	// from this node and to forwarded connections. Default: none.
	ServiceCIDRs []netip.Prefix

	// FollowServiceCIDRs provides ServiceCIDRs that change, such as the CIDRs of the
	// cluster's ServiceCIDR objects (kube.FollowServiceCIDRs). The dataplane calls it on
	// a goroutine of its own. The function must call its argument set with all CIDRs, and
	// again after each change, until ctx ends. The function must not call set from
	// several goroutines. Until the first call, the table keeps the CIDRs that it has.
	// With this function, ServiceCIDRs must be empty. Default: none.
	FollowServiceCIDRs func(ctx context.Context, set func([]netip.Prefix))

	// DropInvalid makes the dataplane drop forwarded packets that connection tracking
	// cannot assign to a connection. If such packets are accepted, a client may receive
	// packets with an untranslated source: the address of the endpoint in place of the
	// service's address. The client then resets the connection. Do not set it if replies to
	// clients may take another path than their requests. Default: false, which accepts
	// them, as kube-proxy does in mode nftables.
	DropInvalid bool
}

type public = Options

// options are the public options, and what only tests replace.
type options struct {
	public
	// exchange sends the batch of a transaction and receives the answer, by a call of send.
	// Default: only calls send.
	exchange func(batch []byte, send func(batch []byte) error) error
	// now is the clock of pauses. Default: [time.Now].
	now func() time.Time
	// maxDumped limits the endpoints that a pass reads at its beginning, and maxHashSlots the
	// slots of all lists with stable hashing. Default: the constants of these names.
	maxDumped, maxHashSlots int
}

var instanceName = regexp.MustCompile(`^[A-Za-z0-9_.-]{0,64}$`)

// complete checks o and sets the defaults.
func (o *Options) complete() error {
	o.DNATPriority = cmp.Or(o.DNATPriority, -100)
	o.SNATPriority = cmp.Or(o.SNATPriority, 100)
	errs := []error{backendoptions.Complete(&o.Options, false, "Instance", "MasqueradeMark", "MasqueradeAll", "MasqueradeOutsiders",
		"ClusterCIDRs", "NodePodCIDRs", "PodInterfaces", "AcceptUnknownPorts", "NodeAddresses", "Conntrack", "Sysctls", "Stats", "Observer", "NetNS")}
	if !instanceName.MatchString(o.Instance) {
		errs = append(errs, fmt.Errorf("instance %q must have at most 64 letters, digits, \"_\", \".\" and \"-\"", o.Instance))
	}
	if o.Instance == "ipvs" || strings.HasPrefix(o.Instance, "ipvs-") {
		errs = append(errs, fmt.Errorf("instance %q has a table name of the backend ipvs", o.Instance))
	}
	if len(o.ServiceCIDRs) > 0 && o.FollowServiceCIDRs != nil {
		errs = append(errs, errors.New("ServiceCIDRs and FollowServiceCIDRs exclude each other"))
	}
	for _, cidr := range o.ServiceCIDRs {
		if !cidr.IsValid() {
			errs = append(errs, errors.New("a service CIDR is not valid"))
		}
	}
	// Connection tracking has priority -200 at the hooks prerouting and output. The kernel
	// requires that chains of type nat come after connection tracking.
	for _, priority := range []int32{o.DNATPriority, o.SNATPriority} {
		if priority <= -200 {
			errs = append(errs, fmt.Errorf("priority %d is not after connection tracking (-200)", priority))
		}
		if priority == latePriority {
			errs = append(errs, fmt.Errorf("priority %d is that of the chains that refuse connections", priority))
		}
	}
	return errors.Join(errs...)
}

// object names the objects that only one process may program.
func (o *Options) object() string { return "nftables table " + o.tables()[0] }

// tables returns the two possible names of the instance's table. There are two, because a
// new table can exist beside an old table with another layout.
func (o *Options) tables() [2]string {
	if o.Instance == "" {
		return [...]string{"kpng", "kpng2"}
	}
	return [...]string{"kpng-" + o.Instance, "kpng2-" + o.Instance}
}
