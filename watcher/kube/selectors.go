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

// endpointSliceController is who makes the slices of services with a selector,
// as their label endpointslice.kubernetes.io/managed-by says.
const endpointSliceController = "endpointslice-controller.k8s.io"

// unlabelled reports whether the common watch of slices leaves s out.
func (w *watch) unlabelled(s *discoveryv1.EndpointSlice) bool { return !w.converter.WantsSlice(s) }

// handmade reports whether the common watch leaves s out and it is not the work
// of the endpoint-slice controller.
func (w *watch) handmade(s *discoveryv1.EndpointSlice) bool {
	return w.unlabelled(s) && s.Labels[discoveryv1.LabelManagedBy] != endpointSliceController
}

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
	return w.slices("", absent(watcher.LabelServiceProxyName), absent(watcher.LabelHeadless))
}

// ownSource returns the slices of one service that the common watch leaves out.
func (w *watch) ownSource(service types.NamespacedName) source[*discoveryv1.EndpointSliceList] {
	return w.slices(service.Namespace,
		equals(discoveryv1.LabelServiceName, service.Name),
		differs(watcher.LabelServiceProxyName, w.opts.ServiceProxyName))
}

// handmadeSource returns the slices of all services that the common watch
// leaves out, except those that the endpoint-slice controller makes.
func (w *watch) handmadeSource() source[*discoveryv1.EndpointSliceList] {
	return w.slices("",
		differs(watcher.LabelServiceProxyName, w.opts.ServiceProxyName),
		differs(discoveryv1.LabelManagedBy, endpointSliceController))
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
