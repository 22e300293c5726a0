// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"context"
	"net/netip"
	"os/exec"

	"github.com/kpng-project/kpng/conformance/internal/world"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// AllPortsAnnotation is the annotation of all-ports services in the kit. Its value is
// "true" (see watcher.AllPortsAnnotated).
const AllPortsAnnotation = "conformance.kpng.io/all-ports"

// Subject is a proxy under test. The kit calls its methods one at a time.
type Subject interface {
	// Publish replaces all objects in the cluster of the proxy. Publish may store the given
	// objects, but must not modify them. The kit calls Publish before the first Start. After
	// Publish has returned, running processes must receive the change without a further
	// call.
	Publish(ctx context.Context, objects *Objects) error
	// Start starts a process of the proxy in the network namespace of the site's node. It
	// need not wait until services are programmed.
	Start(ctx context.Context, site Site) (Process, error)
	// Cleanup removes all kernel objects that processes of the same site created. The kit
	// calls it while no process of the site runs.
	Cleanup(ctx context.Context, site Site) error
}

// Settler is an optional interface of a Subject. Its method Settle waits until all
// running processes have programmed the published objects.
type Settler interface {
	Settle(ctx context.Context) error
}

// Process is a running process of a proxy.
type Process interface {
	// Kill ends the process without a chance to clean up, as SIGKILL does. Kill waits until
	// the process has ended.
	Kill() error
	// Output returns the last output of the process, for failure messages.
	Output() string
}

// Objects is the content of a cluster: valid objects of the Kubernetes API, with the
// defaults that an API server sets.
//
// A Publisher that cannot write all objects in one step must first delete the objects
// that are no longer in Objects. Then it must write Nodes, Services and EndpointSlices,
// in this order.
type Objects struct {
	Nodes    []*corev1.Node
	Services []*corev1.Service
	Slices   []*discoveryv1.EndpointSlice
}

// MasqueradeOption selects which connections to cluster IPs are masqueraded.
type MasqueradeOption string

// The masquerade options. With MasqueradeDefault, connections from pods and from the node
// keep their source, and the kit does not check the source of connections from outside
// the pod network.
const (
	MasqueradeDefault MasqueradeOption = ""
	// MasqueradeOutside masquerades connections from outside Site.ClusterCIDRs.
	MasqueradeOutside MasqueradeOption = "outside"
	// MasqueradeAll masquerades all connections.
	MasqueradeAll MasqueradeOption = "all"
)

// Site is the configuration of a proxy process.
type Site struct {
	// NodeName is the name of the Node object.
	NodeName string
	// Instance is a name for the proxy's kernel objects, such as tables. No other proxy
	// on the node has the same name. The name has at most 15 characters: lower-case
	// letters, digits and "-".
	Instance string
	// ServiceProxyName selects services; see watcher.Options.ServiceProxyName.
	ServiceProxyName string
	// NodePortCIDRs contain the node addresses at which node ports must be served. The node
	// also has addresses outside these ranges. Cases of the feature LocalhostNodePorts add the
	// ranges 127.0.0.0/8 and ::1/128.
	NodePortCIDRs []netip.Prefix
	// ClusterCIDRs contain the addresses of all pods. PodCIDRs contain the addresses of the
	// pods on this node.
	ClusterCIDRs, PodCIDRs []netip.Prefix
	// PodInterfaces is the prefix of the names of interfaces to this node's pods. No other
	// interface has this prefix.
	PodInterfaces string
	// Masquerade selects which connections to cluster IPs are masqueraded.
	Masquerade MasqueradeOption
	// Cgroup is the directory of a cgroup (version 2). This cgroup contains exactly the
	// sockets of the node and of its pods. The field is empty unless Options.Cgroup is true.
	Cgroup string

	host *world.Host
}

// Do calls f on a thread in the network namespace of the node. Sockets that f opens and
// processes that f starts stay in that namespace. The function f must not start
// goroutines.
func (s Site) Do(f func() error) error { return s.host.Do(f) }

// Start starts cmd in the network namespace of the node. The kernel kills the new process
// if this process ends first. The returned channel delivers the exit error of cmd.
func (s Site) Start(cmd *exec.Cmd) (ended <-chan error, err error) { return s.host.Start(cmd) }
