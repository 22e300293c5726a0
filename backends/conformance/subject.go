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

// AllPortsAnnotation is the annotation with which the kit makes a service an
// all-ports service, by the value "true" (see watcher.AllPortsAnnotated).
const AllPortsAnnotation = "conformance.kpng.io/all-ports"

// Subject is a proxy under test. The kit calls one method at a time.
type Subject interface {
	// Publish makes the cluster that the proxy's processes see equal to objects,
	// which it may keep and must not change. It is called before the first Start,
	// and returns when processes that run are bound to learn of it.
	Publish(ctx context.Context, objects *Objects) error
	// Start starts a process of the proxy in the network namespace of site's node.
	// It need not wait until it has programmed anything.
	Start(ctx context.Context, site Site) (Process, error)
	// Cleanup removes everything that processes of the same site have left. It is
	// called while none runs.
	Cleanup(ctx context.Context, site Site) error
}

// Settler is implemented by a Subject that knows when all processes that run have
// programmed what was published. Settle waits for that.
type Settler interface {
	Settle(ctx context.Context) error
}

// Process is a running process of a proxy.
type Process interface {
	// Kill ends it as SIGKILL does, and returns when it has ended.
	Kill() error
	// Output returns the end of what it has printed, for failures to show.
	Output() string
}

// Objects is a cluster as the Kubernetes API has it: its objects are valid and
// have the defaults filled in that an API server would fill in.
//
// Where a Publisher cannot write all at once, it deletes what is not there any
// more, then writes nodes, services and slices, each in this order.
type Objects struct {
	Nodes    []*corev1.Node
	Services []*corev1.Service
	Slices   []*discoveryv1.EndpointSlice
}

// MasqueradeOption says whose connections to cluster IPs get a source address of
// the node.
type MasqueradeOption string

// The choices. Without any, connections from pods and from the node keep theirs,
// and nothing is checked of those from outside the pod network.
const (
	MasqueradeDefault MasqueradeOption = ""
	// MasqueradeOutside is for those from outside Site.ClusterCIDRs.
	MasqueradeOutside MasqueradeOption = "outside"
	// MasqueradeAll is for all.
	MasqueradeAll MasqueradeOption = "all"
)

// Site says where a process of the proxy runs, and how it is to be set up.
type Site struct {
	// NodeName is the name of the Node object.
	NodeName string
	// Instance names what the proxy makes in the kernel, such as tables, apart from
	// what other processes on the node make: lower-case letters, digits and "-", at
	// most 15.
	Instance string
	// ServiceProxyName says which services to serve, as
	// watcher.Options.ServiceProxyName does.
	ServiceProxyName string
	// NodePortCIDRs are the addresses of the node at which node ports are to be
	// served. The node has others.
	NodePortCIDRs []netip.Prefix
	// ClusterCIDRs have all pods, PodCIDRs those of this node.
	ClusterCIDRs, PodCIDRs []netip.Prefix
	// PodInterfaces is how the names of the interfaces begin that lead to this
	// node's pods, and no others.
	PodInterfaces string
	// Masquerade is for connections to cluster IPs.
	Masquerade MasqueradeOption

	host *world.Host
}

// Do calls f on a thread that is in the network namespace of the node: what f
// listens on, dials and starts is there, and stays. f must not leave its goroutine.
func (s Site) Do(f func() error) error { return s.host.Do(f) }

// Start starts cmd in the network namespace of the node, to be killed should this
// process end before. The channel has the error with which it ended.
func (s Site) Start(cmd *exec.Cmd) (ended <-chan error, err error) { return s.host.Start(cmd) }
