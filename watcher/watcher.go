// SPDX-License-Identifier: Apache-2.0

// Package watcher contains code for all sources of cluster state. It selects the Services
// and EndpointSlices for a proxy, and converts objects of the Kubernetes API to types of
// package api. Each subpackage fills a cluster.State from another source: kube from an
// API server, and file from manifests. The function remote.Watch fills a state from
// another kpng server.
//
// A [Converter] does the selection and the conversion. It also accepts invalid objects:
// it omits invalid parts from the result, and returns an error for each invalid part. The caller
// should log the errors. An error names the field, such as spec.ports[1].protocol, and not the
// object. It returns at most ten errors for an object; the last one states how many it omits. The
// valid parts of an object remain usable.
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

	"github.com/kpng-project/kpng/internal/parameters"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// LabelServiceProxyName is the label by which Kubernetes assigns objects to service
// proxies. The EndpointSlice controller copies it from a Service to its EndpointSlices.
const LabelServiceProxyName = "service.kubernetes.io/service-proxy-name"

// Options selects the services for a proxy, and the metadata to keep. The zero value is
// for a proxy without a name, such as kube-proxy.
type Options struct {
	// ServiceProxyName is the proxy's name (KEP 2447). It selects services whose label
	// service.kubernetes.io/service-proxy-name has this value, including headless services.
	// An empty name selects services without this label, except headless services.
	ServiceProxyName string

	// Skip, if set, returns true for services that the proxy must ignore although
	// ServiceProxyName selects them. It may use any field of the API object, such as
	// annotations or spec.loadBalancerClass, except metadata.managedFields, which may be
	// missing. The result must depend on the object alone. Skip must not modify or keep the
	// object. Skip must be safe for concurrent use. If Skip panics, the service is not
	// ignored, and the converter reports the panic as an error of the service.
	Skip func(*corev1.Service) bool

	// ServiceNameLabel is the label that contains the name of an EndpointSlice's service.
	// The default is kubernetes.io/service-name. Another label selects other slices, which a
	// third party creates, for example for secondary networks. A slice without the label
	// belongs to no service.
	ServiceNameLabel string

	// IgnoreExternalIPs makes the proxy ignore spec.externalIPs, like a cluster without the
	// feature gate AllowServiceExternalIPs (KEP-5707). External IPs let any user who may
	// create services claim any address.
	IgnoreExternalIPs bool

	// KeepLabels and KeepAnnotations are patterns of path.Match. Services keep only labels
	// and annotations whose keys match, by default none. "*" does not match a slash, so "*"
	// selects all keys without a prefix, and "*/*" all keys with a prefix.
	KeepLabels      []string
	KeepAnnotations []string

	// KeepSliceLabels are patterns of path.Match. EndpointSlices keep only labels whose keys
	// match (api.EndpointSlice.Labels).
	KeepSliceLabels []string

	// KeepTargets keeps the names of the pods of endpoints (api.Endpoint.Target). Targets
	// that are not pods are never kept.
	KeepTargets bool

	// OtherAnnotations are names of service proxies: "cilium", "kube-router" or "calico". The
	// converter reads the traffic parameters of services, such as api.Service.Algorithm, from
	// the annotations of kpng (docs/reference/semantics.md), and then from the annotations of
	// these proxies.
	OtherAnnotations []string

	// AllPorts, if set, reports whether a service is an all-ports service
	// (api.Service.AllPorts). It has the same restrictions as Skip. If it panics, the service
	// is not an all-ports service, and the panic is reported. [AllPortsAnnotated] returns a
	// function that checks an annotation.
	AllPorts func(*corev1.Service) bool
}

// AllPortsAnnotated returns a function for Options.AllPorts. It selects a service if
// strconv.ParseBool returns true for the value of the annotation with this name.
func AllPortsAnnotated(name string) func(*corev1.Service) bool {
	return func(s *corev1.Service) bool {
		on, err := strconv.ParseBool(s.Annotations[name])
		return on && err == nil
	}
}

// Unselected returns the reason why ServiceProxyName does not select s, for people, or "" if it
// selects s.
func (o *Options) Unselected(s *corev1.Service) string {
	name, labelled := s.Labels[LabelServiceProxyName]
	switch {
	case labelled && (name == "" || name != o.ServiceProxyName):
		return "its label " + LabelServiceProxyName + " is " + cmp.Or(name, "empty")
	case !labelled && o.ServiceProxyName != "":
		return "it has no label " + LabelServiceProxyName
	case !labelled && isHeadless(s):
		return "it is headless (clusterIP: None), and the proxy has no name"
	}
	return ""
}

// Converter filters API objects and converts them to types of package api. It does not
// modify or keep API objects, and its results do not refer to them. To save memory,
// results share equal strings, such as names of nodes and zones. A Converter is safe for
// concurrent use.
type Converter struct {
	options    Options
	parameters *parameters.Reader
	// Separate locks, so that reflectors of services and slices do not wait for each other.
	ofServices, ofSlices shared
}

// New returns a Converter. It returns an error if an option is invalid:
// ServiceProxyName must be a valid label value, ServiceNameLabel a valid label name,
// each element of KeepLabels, KeepAnnotations and KeepSliceLabels a valid pattern, and
// each element of OtherAnnotations a known name.
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
	reader, err := parameters.NewReader(o.OtherAnnotations)
	if err != nil {
		return nil, err
	}
	return &Converter{options: o, parameters: reader}, nil
}

// WantsService reports whether Options.ServiceProxyName selects s and Options.Skip does
// not exclude s. If Skip panics, the method Service reports the panic.
func (c *Converter) WantsService(s *corev1.Service) bool {
	if s == nil || new(report).call("Skip", c.options.Skip, s) {
		return false
	}
	return c.options.Unselected(s) == ""
}

// WantsSlice reports whether the labels of s select s for the proxy. If
// ServiceProxyName is not empty, it must be the value of the label
// [LabelServiceProxyName] of s. If ServiceProxyName is empty, s must not belong to a
// headless service. In this case WantsSlice ignores the label LabelServiceProxyName of s, because
// it may be outdated. As with kube-proxy, only the label of the service decides.
//
// For its selectorless services (see [Selectorless]), a proxy with a ServiceProxyName
// also needs slices without the label LabelServiceProxyName. The EndpointSlice controller
// does not create these slices. WantsSlice returns false for them.
func (c *Converter) WantsSlice(s *discoveryv1.EndpointSlice) bool {
	if s == nil {
		return false
	}
	if name := c.options.ServiceProxyName; name != "" {
		return s.Labels[LabelServiceProxyName] == name
	}
	_, headless := s.Labels[corev1.IsHeadlessService]
	return !headless
}

// Selectorless reports whether s has no selector. It returns false for type ExternalName.
// For a selectorless service, the EndpointSlice controller creates no slices.
func Selectorless(s *corev1.Service) bool {
	return len(s.Spec.Selector) == 0 && s.Spec.Type != corev1.ServiceTypeExternalName
}

// problem is the error for an invalid part of an object. The converter omitted this part.
type problem string

func (p problem) Error() string { return string(p) }

// maxProblems limits the reported problems of one object. A slice with a thousand bad
// endpoints should not cause a thousand log lines.
const maxProblems = 10

// report collects the problems of one object.
type report struct {
	problems []error
	omitted  int
}

func (r *report) add(field, format string, args ...any) {
	if len(r.problems) == maxProblems {
		r.omitted++
		return
	}
	r.problems = append(r.problems, problem(field+": "+fmt.Sprintf(format, args...)))
}

// call returns the result of f(s), where f is the option with this name. It returns false
// if f is nil. If f panics, it reports the panic and returns false.
func (r *report) call(option string, f func(*corev1.Service) bool, s *corev1.Service) (result bool) {
	if f == nil {
		return false
	}
	defer func() {
		if reason := recover(); reason != nil {
			r.add("Options."+option, "panic: %v; using the result false", reason)
			result = false
		}
	}()
	return f(s)
}

// done returns the collected problems. The last problem states how many were omitted.
func (r *report) done() []error {
	if r.omitted > 0 {
		last := &r.problems[len(r.problems)-1]
		*last = problem(fmt.Sprintf("%v (and %d more problems)", *last, r.omitted))
	}
	return r.problems
}
