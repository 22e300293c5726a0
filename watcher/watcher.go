// SPDX-License-Identifier: Apache-2.0

// Package watcher contains the common parts of all sources of cluster state. It selects
// the services and endpoint slices of a proxy, and converts objects of the Kubernetes API
// to the model of package api. Each subpackage is a source that fills a cluster.State:
// kube reads an API server, file reads manifests, and remote reads another kpng.
//
// A [Converter] does the selection and the conversion. It accepts valid and invalid
// objects. It omits invalid parts from the result and returns each as a [Problem] for the
// caller to log. The rest of the object is served.
//
//	c, err := watcher.New(watcher.Options{ServiceProxyName: "example"})
//	…
//	if c.WantsService(object) {
//		service, problems := c.Service(object)
//		…
//	}
package watcher

import (
	"cmp"
	"fmt"
	"path"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
)

// The labels with which Kubernetes assigns objects to service proxies. The endpoint-slice
// controller copies the first from services to their slices. It sets the second on the
// slices of headless services.
const (
	LabelServiceProxyName = "service.kubernetes.io/service-proxy-name"
	LabelHeadless         = corev1.IsHeadlessService
)

// Options select the services of a proxy and the metadata to keep. The zero value is for
// a cluster's general proxy.
type Options struct {
	// ServiceProxyName selects the services to serve (KEP 2447): those whose label
	// service.kubernetes.io/service-proxy-name has this value, including headless ones.
	// Empty selects the services without this label, except headless ones.
	ServiceProxyName string

	// Skip, if set, reports services that are not served although the label selects them. It
	// receives the API object and may use any field, such as annotations or
	// spec.loadBalancerClass. The result must depend on the object alone. Skip must not
	// modify or keep the object. It is called from several goroutines.
	Skip func(*corev1.Service) bool

	// ServiceNameLabel is the label of a slice that contains its service's name. Slices
	// without it belong to no service. Another label selects slices that a third party
	// creates in addition to those of Kubernetes, for example for secondary networks.
	// Default: kubernetes.io/service-name.
	ServiceNameLabel string

	// IgnoreExternalIPs ignores spec.externalIPs, like a cluster without the feature gate
	// AllowServiceExternalIPs (KEP-5707). With external IPs, any user who may create
	// services can claim any address.
	IgnoreExternalIPs bool

	// KeepLabels and KeepAnnotations are patterns of path.Match for the labels and
	// annotations of a service to keep. A "*" does not match a slash: "*" matches all keys
	// without a prefix, "*/*" all keys with one. Default: none.
	KeepLabels      []string
	KeepAnnotations []string

	// KeepSliceLabels are patterns for the labels of slices to keep
	// (api.EndpointSlice.Labels).
	KeepSliceLabels []string

	// KeepTargets keeps the pods behind endpoints (api.Endpoint.Target). Targets of other
	// kinds are never kept.
	KeepTargets bool

	// AllPorts, if set, reports whether a service is an all-ports service
	// (api.Service.AllPorts). It must not modify or keep the object. [AllPortsAnnotated]
	// returns such a function for an annotation.
	AllPorts func(*corev1.Service) bool
}

// AllPortsAnnotated returns a function for Options.AllPorts. That function selects
// services whose annotation of this name has a value that strconv.ParseBool parses as
// true.
func AllPortsAnnotated(name string) func(*corev1.Service) bool {
	return func(s *corev1.Service) bool {
		on, err := strconv.ParseBool(s.Annotations[name])
		return on && err == nil
	}
}

// Converter filters API objects and converts them to the model. It does not modify or
// keep objects, and its results do not refer to them. It stores strings that many objects
// repeat, such as names of nodes and zones, only once. It is safe for concurrent use.
type Converter struct {
	options Options
	// Two tables, so that the reflectors of services and slices do not wait for each other.
	ofServices, ofSlices shared
}

// New returns a Converter. It returns an error if ServiceProxyName is not a valid label
// value, if ServiceNameLabel is not a valid label name, or if a pattern in KeepLabels,
// KeepAnnotations or KeepSliceLabels is malformed.
func New(o Options) (*Converter, error) {
	if faults := validation.IsValidLabelValue(o.ServiceProxyName); len(faults) > 0 {
		return nil, fmt.Errorf("service proxy name %q: %s", o.ServiceProxyName, strings.Join(faults, "; "))
	}
	if faults := validation.IsQualifiedName(cmp.Or(o.ServiceNameLabel, discoveryv1.LabelServiceName)); len(faults) > 0 {
		return nil, fmt.Errorf("service name label %q: %s", o.ServiceNameLabel, strings.Join(faults, "; "))
	}
	for _, list := range [...]struct {
		option   string
		patterns []string
	}{{"KeepLabels", o.KeepLabels}, {"KeepAnnotations", o.KeepAnnotations}, {"KeepSliceLabels", o.KeepSliceLabels}} {
		for _, p := range list.patterns {
			if _, err := path.Match(p, ""); err != nil {
				return nil, fmt.Errorf("%s pattern %q: %w", list.option, p, err)
			}
		}
	}
	return &Converter{options: o}, nil
}

// WantsService reports whether Options.ServiceProxyName and Options.Skip select s.
func (c *Converter) WantsService(s *corev1.Service) bool {
	if s == nil || c.options.Skip != nil && c.options.Skip(s) {
		return false
	}
	if name := c.options.ServiceProxyName; name != "" {
		return s.Labels[LabelServiceProxyName] == name
	}
	_, elsewhere := s.Labels[LabelServiceProxyName]
	return !elsewhere && !isHeadless(s)
}

// WantsSlice reports whether the labels of s select it. With a ServiceProxyName, the
// label must have that value. Without one, s must not belong to a headless service. The
// general proxy accepts slices with any service.kubernetes.io/service-proxy-name, as
// kube-proxy does. That label selects services, and on a slice it may be older than on
// the service.
//
// With a ServiceProxyName, all other slices of wanted services without a selector are
// also served (see [Selectorless]). The endpoint-slice controller does not create them,
// so they may lack the label.
func (c *Converter) WantsSlice(s *discoveryv1.EndpointSlice) bool {
	if s == nil {
		return false
	}
	if name := c.options.ServiceProxyName; name != "" {
		return s.Labels[LabelServiceProxyName] == name
	}
	_, headless := s.Labels[LabelHeadless]
	return !headless
}

// Selectorless reports whether s has no selector. The endpoint-slice controller creates
// no slices for such a service.
func Selectorless(s *corev1.Service) bool {
	return len(s.Spec.Selector) == 0 && s.Spec.Type != corev1.ServiceTypeExternalName
}

// Problem is an invalid part of an object, which the converter omitted.
type Problem struct {
	// Kind is Service, EndpointSlice or Node.
	Kind string
	// Object is the key of the object. Nodes have no namespace.
	Object types.NamespacedName
	// Field is the path of the field, such as spec.ports[1].protocol.
	Field string
	// Message describes the problem.
	Message string
}

// Error returns the problem in one line with object and field.
func (p Problem) Error() string {
	object := p.Object.Name
	if p.Object.Namespace != "" {
		object = p.Object.String()
	}
	return fmt.Sprintf("%s %s: %s: %s", p.Kind, object, p.Field, p.Message)
}

// maxProblems limits the problems of one object, so that a slice with a thousand bad
// endpoints does not cause a thousand log lines.
const maxProblems = 10

// A report collects the problems of one object.
type report struct {
	kind            string
	namespace, name string
	problems        []Problem
	omitted         int
}

func (r *report) add(field, format string, args ...any) {
	if len(r.problems) == maxProblems {
		r.omitted++
		return
	}
	r.problems = append(r.problems, Problem{
		Kind:    r.kind,
		Object:  types.NamespacedName{Namespace: r.namespace, Name: r.name},
		Field:   field,
		Message: fmt.Sprintf(format, args...),
	})
}

// done returns the collected problems. The last one includes the number of omitted
// problems.
func (r *report) done() []Problem {
	if r.omitted > 0 {
		last := &r.problems[len(r.problems)-1]
		last.Message += fmt.Sprintf(" (and %d more problems)", r.omitted)
	}
	return r.problems
}
