// SPDX-License-Identifier: Apache-2.0

// Package watcher is what all sources of cluster state share: which services
// and endpoint slices a proxy is meant for, and how objects of the Kubernetes
// API become the model of package api. Each of its subpackages is a source
// that fills a cluster.State: kube reads an API server, file reads manifests.
//
// A [Converter] answers both questions. It takes objects as they come, valid
// or not: whatever it cannot use is left out of the result and returned as a
// [Problem], for the caller to log, and the rest of the object is served.
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

// The labels by which Kubernetes marks what is for which service proxy. The
// endpoint-slice controller copies the first from services to their slices and
// sets the second on the slices of headless services.
const (
	LabelServiceProxyName = "service.kubernetes.io/service-proxy-name"
	LabelHeadless         = corev1.IsHeadlessService
)

// Options say which services a proxy serves and what it wants to know of them.
// The zero value is that of a cluster's general proxy.
type Options struct {
	// ServiceProxyName selects the services to serve (KEP 2447): those whose
	// label service.kubernetes.io/service-proxy-name equals it, headless ones
	// included. Empty selects the services without this label, except headless
	// ones.
	ServiceProxyName string

	// Skip, if set, reports services that are not served although their label
	// says so. It gets the object of the API, for it to judge by anything: a list
	// of names, annotations, spec.loadBalancerClass. It must depend on the object
	// alone, must neither change nor keep it, and is called from several
	// goroutines.
	Skip func(*corev1.Service) bool

	// ServiceNameLabel is the label of a slice that names its service. Slices
	// without it belong to no service. Another label than the default selects
	// slices that somebody makes beside those of Kubernetes, for example for
	// secondary networks. Default: kubernetes.io/service-name.
	ServiceNameLabel string

	// IgnoreExternalIPs leaves spec.externalIPs out, as a cluster does without
	// the feature gate AllowServiceExternalIPs (KEP-5707). Everybody who may
	// create services can claim any address by them.
	IgnoreExternalIPs bool

	// KeepLabels and KeepAnnotations name the labels and annotations of a
	// service that the model carries, as patterns of path.Match. A "*" matches
	// no slash: "*" stands for all keys without a prefix, "*/*" for all with
	// one. None are kept by default.
	KeepLabels      []string
	KeepAnnotations []string

	// KeepSliceLabels does the same for labels of slices (api.EndpointSlice.Labels).
	KeepSliceLabels []string

	// KeepTargets keeps the pods behind endpoints (api.Endpoint.Target). Other kinds
	// of targets are never kept.
	KeepTargets bool

	// AllPorts, if set, says of a service whether it is an all-ports service
	// (api.Service.AllPorts). It must not change or keep the object.
	// [AllPortsAnnotated] returns one that goes by an annotation.
	AllPorts func(*corev1.Service) bool
}

// AllPortsAnnotated returns a function for Options.AllPorts that makes those services
// all-ports services whose annotation of this name holds a true value as
// strconv.ParseBool reads it.
func AllPortsAnnotated(name string) func(*corev1.Service) bool {
	return func(s *corev1.Service) bool {
		on, err := strconv.ParseBool(s.Annotations[name])
		return on && err == nil
	}
}

// Converter filters API objects and converts them to the model. It never keeps
// or changes an object, and what it returns does not refer to it. Strings that
// many objects repeat, such as the names of nodes and zones, are stored once. It
// is safe for concurrent use.
type Converter struct {
	options Options
	// Apart, so that the reflectors of services and slices do not wait for each
	// other.
	ofServices, ofSlices shared
}

// New returns a Converter. Errors are a ServiceProxyName that cannot be the
// value of a label, a ServiceNameLabel that cannot be the name of one, and a
// malformed pattern in KeepLabels, KeepAnnotations or KeepSliceLabels.
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

// WantsService reports whether s is for this proxy, as
// Options.ServiceProxyName and Options.Skip say.
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

// WantsSlice reports whether s is for this proxy by its labels alone: with a
// ServiceProxyName, if its label equals that; without one, if it is not that of
// a headless service. The general proxy takes slices with any
// service.kubernetes.io/service-proxy-name, as kube-proxy does: that label
// decides about services, and on a slice it may be older than on the service.
//
// With a ServiceProxyName, all other slices of wanted services without a
// selector are served, too (see [Selectorless]). The endpoint-slice controller
// does not make those, and so they may lack the label.
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

// Selectorless reports whether s has no selector, so that the endpoint-slice
// controller leaves its slices to others.
func Selectorless(s *corev1.Service) bool {
	return len(s.Spec.Selector) == 0 && s.Spec.Type != corev1.ServiceTypeExternalName
}

// Problem is something in an object that cannot be used and has been left out.
type Problem struct {
	// Kind is Service, EndpointSlice or Node.
	Kind string
	// Object names the object; nodes have no namespace.
	Object types.NamespacedName
	// Field is the path of the field, such as spec.ports[1].protocol.
	Field string
	// Message says what is wrong with it.
	Message string
}

// Error returns the problem in one line that names object and field.
func (p Problem) Error() string {
	object := p.Object.Name
	if p.Object.Namespace != "" {
		object = p.Object.String()
	}
	return fmt.Sprintf("%s %s: %s: %s", p.Kind, object, p.Field, p.Message)
}

// maxProblems bounds what is reported of one object, so that a slice of a
// thousand bad endpoints does not make a thousand lines of log.
const maxProblems = 10

// report collects the problems of one object.
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

// done returns what was collected, the last entry saying how many more there were.
func (r *report) done() []Problem {
	if r.omitted > 0 {
		last := &r.problems[len(r.problems)-1]
		last.Message += fmt.Sprintf(" (and %d more problems)", r.omitted)
	}
	return r.problems
}
