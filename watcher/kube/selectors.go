// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kpng-project/kpng/watcher"
)

func (w *watch) serviceSource() source[*corev1.ServiceList] {
	src := source[*corev1.ServiceList]{
		client:   w.clients.services(),
		resource: schema.GroupResource{Resource: services},
	}
	if name := w.opts.ServiceProxyName; name != "" {
		src.labels = equals(watcher.LabelServiceProxyName, name)
	} else {
		src.labels = absent(watcher.LabelServiceProxyName)
		src.fields = fields.OneTermNotEqualSelector("spec.clusterIP", corev1.ClusterIPNone).String()
	}
	return src
}

func (w *watch) nodeSource() source[*corev1.NodeList] {
	src := source[*corev1.NodeList]{
		client:   w.clients.nodes(),
		resource: schema.GroupResource{Resource: nodes},
	}
	if name := w.opts.NodeName; name != "" {
		src.fields = fields.OneTermEqualSelector("metadata.name", name).String()
	}
	return src
}

// sliceSource returns the common watch: the slices that bear the labels of
// services that the proxy wants.
func (w *watch) sliceSource() source[*discoveryv1.EndpointSliceList] {
	if name := w.opts.ServiceProxyName; name != "" {
		return w.slices("", equals(watcher.LabelServiceProxyName, name))
	}
	return w.slices("", absent(watcher.LabelHeadless))
}

// ownSource returns the slices of one service that the common watch leaves out.
func (w *watch) ownSource(service types.NamespacedName) source[*discoveryv1.EndpointSliceList] {
	return w.slices(service.Namespace,
		equals(discoveryv1.LabelServiceName, service.Name),
		differs(watcher.LabelServiceProxyName, w.opts.ServiceProxyName))
}

// sharedSource returns the slices of all services that the common watch leaves
// out. Whoever made them: those of the endpoint-slice controller outlast the
// selector of their service.
func (w *watch) sharedSource() source[*discoveryv1.EndpointSliceList] {
	return w.slices("", differs(watcher.LabelServiceProxyName, w.opts.ServiceProxyName))
}

func (w *watch) slices(namespace string, requirements ...string) source[*discoveryv1.EndpointSliceList] {
	return source[*discoveryv1.EndpointSliceList]{
		client:    w.clients.endpointSlices(namespace),
		resource:  schema.GroupResource{Group: discoveryv1.GroupName, Resource: endpointSlices},
		namespace: namespace,
		labels:    strings.Join(requirements, ","),
	}
}

// Requirements of a label selector. One that a label differs from a value is
// met if the label is absent.
func equals(label, value string) string  { return label + "=" + value }
func differs(label, value string) string { return label + "!=" + value }
func absent(label string) string         { return "!" + label }
