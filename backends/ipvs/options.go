// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"time"

	"github.com/kpng-project/kpng/internal/kernelnode"
	"github.com/kpng-project/kpng/internal/nftrule"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
)

// Options are a backend's settings. The zero value is useful.
type Options struct {
	// Instance distinguishes the backends of one node. The backend's nftables table is
	// "kpng-ipvs-<Instance>" of family inet. The value of Instance has at most 64 letters,
	// digits, "-", "_" and ".". Default: empty, for the table "kpng-ipvs".
	Instance string
	// Interface is the name of the instance's interface, of type dummy. Each instance needs
	// its own interface. The backend creates the interface; Cleanup deletes it. The alias of
	// the interface is the name of the table. If an interface with this alias exists, the
	// backend uses that interface and does not rename it. Default: "kpng-ipvs", or
	// "kpng-<Instance>".
	Interface string

	// Scheduler is the IPVS scheduler of services, such as rr, wrr, lc, wlc, sh or mh. All
	// endpoints have the weight 1. Default: rr.
	Scheduler string
	// SchedulerAnnotation is the name of the service annotation that overrides Scheduler.
	// The source of the services must deliver this annotation. Default:
	// "kpng.io/ipvs-scheduler".
	SchedulerAnnotation string

	// MasqueradeMark is exactly one bit of the packet mark. The backend sets it in the first
	// packet of a connection to be masqueraded, and clears it at hook postrouting. The bit
	// must not be 0x4000, which kube-proxy uses. Several instances may use the same bit.
	// Default: 0x2000.
	MasqueradeMark uint32
	// MasqueradeAll masquerades all connections to cluster IPs.
	MasqueradeAll bool
	// MasqueradeOutsiders masquerades connections to cluster IPs from outside the pod
	// network, which ClusterCIDRs and PodInterfaces define. If these options define no pods
	// of an IP family, nothing is masqueraded in that family.
	MasqueradeOutsiders bool
	// ClusterCIDRs contain the addresses of all pods of the cluster. The backend treats
	// these pods as pods of this node. Therefore their traffic to external frontends of
	// services with externalTrafficPolicy Local may reach endpoints on all nodes.
	ClusterCIDRs []netip.Prefix
	// PodInterfaces are the interfaces of this node's pods, such as "cni0". A name that ends
	// in "*" is a prefix of names. Traffic from these interfaces counts as traffic of this
	// node's pods.
	PodInterfaces []string

	// NodeAddresses is the source of the addresses on which node ports are open. The backend
	// ignores loopback addresses. Default: the primary addresses of the node, see package
	// nodeaddr.
	NodeAddresses nodeaddr.Source
	// NodeNetworks contain the addresses of the cluster's nodes. If an external or
	// load-balancer IP of a service is the address of another node, the backend ignores this
	// IP, so that its packets go to the other node. Without NodeNetworks, the backend makes
	// the address local, so that this node cannot reach the other node at any port.
	// NodeNetworks must not contain load-balancer IPs that no machine has. Default: no
	// networks.
	NodeNetworks []netip.Prefix
	// HealthzPort is the port of the program's own health checks. Load balancers check
	// services with externalTrafficPolicy Cluster at this port. The backend translates the
	// destination of these checks from the load-balancer IP to the first address of
	// NodeAddresses, unless the machine has the load-balancer IP. It also translates the
	// destination of checks of health-check node ports. Default: 0, which translates only
	// checks of health-check node ports.
	HealthzPort uint16
	// Conntrack is a sink that deletes the connection-tracking entries of removed endpoints.
	// It receives each change after the backend has programmed it. The backend starts and
	// stops this sink. Default: a reconciler of package conntrack.
	Conntrack sink.Sink

	// Sysctls selects what the backend does with wrong kernel settings. Default:
	// ReportSysctls.
	Sysctls SysctlMode
	// StrictARP adds two kernel settings to those to which Sysctls applies. With these two
	// settings, the node does not answer ARP requests for addresses of services.
	StrictARP bool

	// Drain limits how long Cleanup waits for connections. If Drain is not 0, another backend
	// for the same services must already run. Cleanup first leaves all new connections to
	// that backend. Then it waits until no established TCP or SCTP connection uses a virtual
	// server, and no socket of this node has an address of a service as its local address.
	// After this time, Cleanup does not wait for the remaining connections, which end. Default
	// 0: Cleanup does not wait.
	Drain time.Duration

	// NetNS is the file descriptor of the network namespace to program. It must stay open.
	// Default 0: the namespace in which the process started.
	NetNS int
}

// SysctlMode selects what to do with kernel settings that have wrong values.
type SysctlMode uint8

// The modes.
const (
	// ReportSysctls corrects only the settings of IPVS (net.ipv4.vs.*), because the backend
	// does not work without them. It logs other wrong settings.
	ReportSysctls SysctlMode = iota
	// SetSysctls corrects all settings.
	SetSysctls
	// IgnoreSysctls only checks that net.ipv4.vs.conntrack is 1.
	IgnoreSysctls
)

var (
	instanceName  = regexp.MustCompile(`^[A-Za-z0-9_.-]{0,64}$`)
	interfaceName = regexp.MustCompile(`^[A-Za-z0-9_.@:-]{1,15}$`)
	schedulerName = regexp.MustCompile(`^[a-z0-9_]{1,15}$`)
)

// complete checks o and fills in the defaults.
func (o *Options) complete() error {
	o.Interface = cmp.Or(o.Interface, "kpng-"+cmp.Or(o.Instance, "ipvs"))
	o.Scheduler = cmp.Or(o.Scheduler, "rr")
	o.SchedulerAnnotation = cmp.Or(o.SchedulerAnnotation, "kpng.io/ipvs-scheduler")
	o.MasqueradeMark = cmp.Or(o.MasqueradeMark, kernelnode.DefaultMark)

	var errs []error
	if !instanceName.MatchString(o.Instance) {
		errs = append(errs, fmt.Errorf("instance %q must have at most 64 letters, digits, \"_\", \".\" and \"-\"", o.Instance))
	}
	if o.Instance == "ipvs" {
		errs = append(errs, errors.New("instance \"ipvs\" has the interface of the instance without a name"))
	}
	if !interfaceName.MatchString(o.Interface) {
		errs = append(errs, fmt.Errorf("%q is not an interface name", o.Interface))
	}
	if !schedulerName.MatchString(o.Scheduler) {
		errs = append(errs, fmt.Errorf("%q is not the name of a scheduler", o.Scheduler))
	}
	errs = append(errs, kernelnode.CheckMasquerading(o.MasqueradeMark, o.PodInterfaces, o.MasqueradeOutsiders, len(o.PodInterfaces)+len(o.ClusterCIDRs) > 0))
	for _, cidr := range slices.Concat(o.ClusterCIDRs, o.NodeNetworks) {
		if !cidr.IsValid() {
			errs = append(errs, errors.New("a CIDR of pods or nodes is not valid"))
		}
	}
	if o.Drain < 0 {
		errs = append(errs, fmt.Errorf("the time to drain connections is %v, not 0 or more", o.Drain))
	}
	return errors.Join(errs...)
}

func (o *Options) tableName() string {
	if o.Instance == "" {
		return "kpng-ipvs"
	}
	return "kpng-ipvs-" + o.Instance
}

func (o *Options) pods() nftrule.Pods {
	return nftrule.Pods{CIDRs: o.ClusterCIDRs, Interfaces: o.PodInterfaces}
}
