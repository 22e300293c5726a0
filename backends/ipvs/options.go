// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"time"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendoptions"
)

// Options are the settings of the dataplane. It does not support NodePodCIDRs and
// AcceptUnknownPorts of [backends.Options].
//
// Its nftables table of family inet is "kpng-ipvs", or for an instance
// "kpng-ipvs-<Instance>". Instance has at most 56 letters, digits, "-", "_" and ".".
//
// If IPVS cannot serve a service, the backend nftables programs that service. Its instance
// is "of-ipvs", or for an instance "of-ipvs-<Instance>", so no other dataplane may have
// this instance. It gets all options of [backends.Options] except Conntrack and Sysctls. It
// calls only the method Drifted of the Observer.
//
// Sysctls also applies to the settings of IPVS (net.ipv4.vs.*). The mode ReportSysctls
// corrects them as well, because the dataplane does not work without them. With
// IgnoreSysctls, the dataplane only checks that net.ipv4.vs.conntrack is 1.
//
// The Observer's method Wrote is called after each change of the table, with the number of
// its elements. Its method Holds gets the numbers of "servers" of IPVS and of "elements" of
// the table.
type Options struct {
	backends.Options

	// Interface is the name of the instance's interface, of type dummy. Each instance needs
	// its own interface. The dataplane creates the interface; Cleanup deletes it. The alias of
	// the interface is the name of the table. If an interface with this alias exists, the
	// dataplane uses that interface and does not rename it. Default: "kpng-ipvs", or
	// "kpng-<Instance>".
	Interface string

	// Scheduler is the IPVS scheduler of services, such as rr, wrr, lc, wlc, sh or mh. If
	// endpoints of a service have different weights, its scheduler is wrr in place of rr, and
	// wlc in place of lc. The scheduler sh ignores weights. Default: rr.
	Scheduler string
	// SchedulerAnnotation is the name of the service annotation that overrides Scheduler.
	// The source of the services must deliver this annotation. Default:
	// "kpng.io/ipvs-scheduler".
	SchedulerAnnotation string

	// NodeNetworks contain the addresses of the cluster's nodes. If an external or
	// load-balancer IP of a service is the address of another node, the dataplane ignores
	// this IP. So packets to this IP go to the other node. Without NodeNetworks, the
	// dataplane makes the address local, so that this node cannot reach the other node at
	// any port. Leave out load-balancer IPs that belong to no machine: the dataplane would
	// ignore them, too. Default: no networks.
	NodeNetworks []netip.Prefix
	// HealthzPort is the port of the program's own health checks. Load balancers check
	// services with externalTrafficPolicy Cluster at this port. The dataplane translates the
	// destination of these checks from the load-balancer IP to the first address of
	// NodeAddresses, unless the machine has the load-balancer IP. It also translates the
	// destination of checks of health-check node ports. Default: 0, which translates only
	// checks of health-check node ports.
	HealthzPort uint16

	// StrictARP makes Sysctls apply to two more kernel settings. With these two settings,
	// the node does not answer ARP requests for addresses of services.
	StrictARP bool

	// Drain limits how long Cleanup waits for connections. If Drain is not 0, another
	// dataplane for the same services must already run. Cleanup first leaves all new
	// connections to that dataplane. Then it waits for two conditions: no established TCP
	// or SCTP connection uses a virtual server, and no socket of this node has an address
	// of a service as its local address. After this time, Cleanup waits no longer, and
	// the remaining connections end. Default 0: Cleanup does not wait.
	Drain time.Duration
}

type public = Options

// options are the public options, and what only tests replace.
type options struct {
	public
	// servers and routes may replace the virtual servers and the local addresses of the
	// kernel, which they get. Default: none.
	servers func(virtualServers) virtualServers
	routes  func(localRoutes) localRoutes
	// exchange sends the batch of a transaction and receives the answer, by a call of send.
	// Default: only calls send.
	exchange func(batch []byte, send func(batch []byte) error) error
	// maxElements limits the elements of a transaction. Default: maxTransaction.
	maxElements int
	// verifyInterval is an option of package reconcile. Default: the constant of this name.
	verifyInterval time.Duration
}

var (
	instanceName  = regexp.MustCompile(`^[A-Za-z0-9_.-]{0,56}$`)
	interfaceName = regexp.MustCompile(`^[A-Za-z0-9_.@:-]{1,15}$`)
	schedulerName = regexp.MustCompile(`^[a-z0-9_]{1,15}$`)
)

// complete checks o and fills in the defaults.
func (o *Options) complete() error {
	o.Interface = cmp.Or(o.Interface, "kpng-"+cmp.Or(o.Instance, "ipvs"))
	o.Scheduler = cmp.Or(o.Scheduler, "rr")
	o.SchedulerAnnotation = cmp.Or(o.SchedulerAnnotation, "kpng.io/ipvs-scheduler")

	errs := []error{backendoptions.Complete(&o.Options, false, "Instance", "MasqueradeMark", "MasqueradeAll", "MasqueradeOutsiders", "ClusterCIDRs", "PodInterfaces",
		"NodeAddresses", "Conntrack", "Sysctls", "Stats", "Observer", "NetNS")}
	if !instanceName.MatchString(o.Instance) {
		errs = append(errs, fmt.Errorf("instance %q must have at most 56 letters, digits, \"_\", \".\" and \"-\"", o.Instance))
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
	for _, cidr := range o.NodeNetworks {
		if !cidr.IsValid() {
			errs = append(errs, errors.New("a CIDR of nodes is not valid"))
		}
	}
	if o.Drain < 0 {
		errs = append(errs, fmt.Errorf("the time to drain connections is %v, not 0 or more", o.Drain))
	}
	return errors.Join(errs...)
}

// restInstance returns the instance of the backend nftables for services that IPVS cannot
// serve.
func (o *Options) restInstance() string {
	if o.Instance == "" {
		return "of-ipvs"
	}
	return "of-ipvs-" + o.Instance
}

func (o *Options) tableName() string {
	if o.Instance == "" {
		return "kpng-ipvs"
	}
	return "kpng-ipvs-" + o.Instance
}
