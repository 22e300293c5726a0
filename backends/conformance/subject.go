// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"context"
	"net/netip"
	"os/exec"

	"github.com/kpng-project/kpng/backends/conformance/internal/world"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// AllPortsAnnotation is the annotation with which the kit marks all-ports services, with
// the value "true" (see watcher.AllPortsAnnotated).
const AllPortsAnnotation = "conformance.kpng.io/all-ports"

// Subject is a proxy under test. Calls of its methods never overlap.
type Subject interface {
	// Publish makes the cluster that the proxy sees equal to objects. It may keep objects
	// and must not modify them. It is called before the first Start. It returns when running
	// processes are certain to receive the change.
	Publish(ctx context.Context, objects *Objects) error
	// Start starts a process of the proxy in the network namespace of site's node. It need
	// not wait for programming.
	Start(ctx context.Context, site Site) (Process, error)
	// Cleanup removes everything that processes of the same site created. It is called while
	// none runs.
	Cleanup(ctx context.Context, site Site) error
}

// Settler is implemented by a Subject that knows when all running processes have
// programmed the published objects. Settle waits for that.
type Settler interface {
	Settle(ctx context.Context) error
}

// Process is a running process of a proxy.
type Process interface {
	// Kill kills the process like SIGKILL and waits for its end.
	Kill() error
	// Output returns the last output of the process, for failure messages.
	Output() string
}

// Objects is a cluster as in the Kubernetes API. Its objects are valid and have an API
// server's defaults.
//
// A Publisher that cannot write all objects at once first deletes missing objects. Then
// it writes nodes, services and slices, in this order.
type Objects struct {
	Nodes    []*corev1.Node
	Services []*corev1.Service
	Slices   []*discoveryv1.EndpointSlice
}

// MasqueradeOption selects the connections to cluster IPs that are masqueraded.
type MasqueradeOption string

// The options. Without one, connections from pods and from the node keep their source.
// The kit does not check those from outside the pod network.
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
	// Instance distinguishes the proxy's kernel objects, such as tables, from those of other
	// processes on the node. It has lower-case letters, digits and "-", at most 15
	// characters.
	Instance string
	// ServiceProxyName selects the services like watcher.Options.ServiceProxyName.
	ServiceProxyName string
	// NodePortCIDRs contain the node addresses at which node ports must be served. The node
	// has others.
	NodePortCIDRs []netip.Prefix
	// ClusterCIDRs contain all pods, and PodCIDRs those of this node.
	ClusterCIDRs, PodCIDRs []netip.Prefix
	// PodInterfaces is the prefix of the names of interfaces to this node's pods. No other
	// interfaces have it.
	PodInterfaces string
	// Masquerade applies to connections to cluster IPs.
	Masquerade MasqueradeOption

	host *world.Host
}

// Do calls f on a thread in the network namespace of the node. Sockets and processes that
// f opens stay in the namespace. f must not start goroutines.
func (s Site) Do(f func() error) error { return s.host.Do(f) }

// Start starts cmd in the network namespace of the node. The kernel kills it if this
// process ends first. The channel receives the exit error.
func (s Site) Start(cmd *exec.Cmd) (ended <-chan error, err error) { return s.host.Start(cmd) }
