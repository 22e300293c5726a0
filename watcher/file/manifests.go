// SPDX-License-Identifier: Apache-2.0

package file

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"unicode/utf8"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/watcher"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	utilnet "k8s.io/utils/net"
	"k8s.io/utils/ptr"
	kjson "sigs.k8s.io/json"
)

// manifests contains the objects that a set of files defines for the proxy.
type manifests struct {
	services []*api.Service
	slices   []*api.EndpointSlice
	nodes    []*api.Node
	warnings []string // about ignored parts and likely mistakes
	files    int
}

// maxListed limits the number of problems that an error lists.
const maxListed = 20

// parser reads files one after the other and collects their objects. It names the
// location of an object in this form: "a.yaml: document 2 (line 10): items[3]: Service
// default/web".
type parser struct {
	converter    *watcher.Converter
	named        bool // true if the proxy has a name (ServiceProxyName)
	manifests    manifests
	problems     []error
	unlisted     int                           // number of problems beyond maxListed
	defined      map[string]string             // location of each object
	ignored      map[string][]string           // locations of objects of other kinds
	selectorless map[types.NamespacedName]bool // services whose EndpointSlices need no label; see watcher.Converter.WantsSlice
	undecided    []*api.EndpointSlice          // slices that are for the proxy only if their service is in the map selectorless

	// Other goroutines may read these fields, which show the progress.
	reading atomic.Pointer[string] // the file that is being read
	objects atomic.Int64           // number of parsed objects
}

func newParser(options watcher.Options) (*parser, error) {
	converter, err := watcher.New(options)
	return &parser{
		converter: converter, named: options.ServiceProxyName != "",
		defined: map[string]string{}, ignored: map[string][]string{}, selectorless: map[types.NamespacedName]bool{},
	}, err
}

// finish completes the manifests after the last file. It returns the problems of all
// files.
func (p *parser) finish() error {
	for _, s := range p.undecided {
		if p.named && p.selectorless[s.ServiceKey()] {
			p.manifests.slices = append(p.manifests.slices, s)
		}
	}
	for _, kind := range slices.Sorted(maps.Keys(p.ignored)) {
		p.warn(p.ignored[kind][0], "%s ignored (objects: %d)", kind, len(p.ignored[kind]))
	}
	if p.unlisted > 0 {
		p.problems = append(p.problems, fmt.Errorf("and %d more errors", p.unlisted))
	}
	return errors.Join(p.problems...)
}

func (p *parser) warn(at, format string, args ...any) {
	p.manifests.warnings = append(p.manifests.warnings, at+": "+fmt.Sprintf(format, args...))
}

func (p *parser) fail(at, format string, args ...any) {
	if len(p.problems) == maxListed {
		p.unlisted++
		return
	}
	p.problems = append(p.problems, errors.New(at+": "+fmt.Sprintf(format, args...)))
}

// The method file parses one file. If ctx ends, parsing may end before the last document.
func (p *parser) file(ctx context.Context, name string, data []byte) {
	if !utf8.Valid(data) {
		p.fail(name, "not UTF-8 text")
		return
	}
	data = bytes.TrimPrefix(data, []byte("\ufeff"))
	// Use the JSON parser for JSON, because YAML parsers do not know all escapes of JSON.
	documents := yamlDocuments
	if strings.EqualFold(filepath.Ext(name), ".json") || json.Valid(data) {
		documents = jsonDocuments
	}
	empty, number := true, 0
	documents(data, func(line int, document []byte, err error) bool {
		number++
		at := fmt.Sprintf("%s: document %d (line %d)", name, number, line)
		if err != nil {
			p.fail(at, "%v", err)
		} else if string(document) != "null" {
			p.object(ctx, at, document, metav1.TypeMeta{})
		}
		empty = empty && string(document) == "null"
		return ctx.Err() == nil
	})
	if empty {
		p.fail(name, "empty; use a List without items if there are no objects")
	}
}

// object reads an object, or each object of a list. If data is an item of a typed list,
// such as ServiceList, itemOf is the item's type, which the item may omit.
func (p *parser) object(ctx context.Context, at string, data []byte, itemOf metav1.TypeMeta) {
	var head struct {
		metav1.TypeMeta `json:",inline"`
		Metadata        struct {
			Name      string `json:"name"`
			Namespace string `json:"namespace"`
		} `json:"metadata"`
		Items json.RawMessage `json:"items"`
	}
	// Ignore values of the wrong type here; decode reports them.
	duplicates, _ := kjson.UnmarshalStrict(data, &head, kjson.DisallowDuplicateFields)
	apiVersion, kind := cmp.Or(head.APIVersion, itemOf.APIVersion), cmp.Or(head.Kind, itemOf.Kind)
	if apiVersion == "" || kind == "" {
		p.fail(at, "not an object with apiVersion and kind")
		return
	}
	if of, isList := strings.CutSuffix(kind, "List"); isList && (head.Items != nil || of == "") {
		var items []json.RawMessage
		if head.Items != nil && json.Unmarshal(head.Items, &items) != nil {
			p.fail(at, "items: not a list")
		}
		for _, err := range duplicates {
			p.fail(at, "%v", err)
		}
		if itemOf = (metav1.TypeMeta{APIVersion: apiVersion, Kind: of}); of == "" {
			itemOf.APIVersion = "" // the items of a plain List name their types
		}
		for i := 0; i < len(items) && ctx.Err() == nil; i++ {
			p.object(ctx, fmt.Sprintf("%s: items[%d]", at, i), items[i], itemOf)
		}
		return
	}
	kinds := map[string]func(string, []byte){"v1 Service": p.service, "discovery.k8s.io/v1 EndpointSlice": p.slice, "v1 Node": p.node}
	read := kinds[apiVersion+" "+kind]
	if read == nil {
		p.ignored[apiVersion+" "+kind] = append(p.ignored[apiVersion+" "+kind], at)
		return
	}
	object := kind
	if name := head.Metadata.Name; name != "" {
		if kind != "Node" {
			name = cmp.Or(head.Metadata.Namespace, metav1.NamespaceDefault) + "/" + name
		}
		object += " " + name
		if first, again := p.defined[object]; again {
			p.fail(at+": "+object, "already defined in %s", first)
		}
		p.defined[object] = at
	}
	read(at+": "+object, data)
	p.objects.Add(1)
}

func (p *parser) service(at string, data []byte) {
	var in corev1.Service
	if !p.decode(at, data, &in, &in.ObjectMeta, validation.IsDNS1123Label) {
		return
	}
	p.validate(at, &in)
	service, problems := p.converter.Service(&in)
	p.report(at, problems)
	if p.converter.WantsService(&in) {
		p.manifests.services = append(p.manifests.services, service)
		p.selectorless[service.Key()] = watcher.Selectorless(&in)
	}
}

func (p *parser) slice(at string, data []byte) {
	var in discoveryv1.EndpointSlice
	if !p.decode(at, data, &in, &in.ObjectMeta, validation.IsDNS1123Subdomain) {
		return
	}
	if count, limit := len(in.Endpoints), 1000; count > limit {
		p.warn(at, "endpoints: the slice has %d; an API server admits %d", count, limit)
	}
	slice, problems := p.converter.EndpointSlice(&in)
	p.report(at, problems)
	if p.converter.WantsSlice(&in) && slice != nil {
		p.manifests.slices = append(p.manifests.slices, slice)
	} else if slice != nil {
		p.undecided = append(p.undecided, slice)
	}
}

func (p *parser) node(at string, data []byte) {
	var in corev1.Node
	if !p.decode(at, data, &in, &in.ObjectMeta, validation.IsDNS1123Subdomain) {
		return
	}
	node, problems := p.converter.Node(&in)
	p.report(at, problems)
	p.manifests.nodes = append(p.manifests.nodes, node)
}

// decode decodes an object and reports whether it is valid.
//
// An unknown field is an error, because the user may have misspelt it. If the object has
// a UID, the field causes only a warning, because a newer API server may have written it.
func (p *parser) decode(at string, data []byte, into any, meta *metav1.ObjectMeta, rule func(string) []string) bool {
	wrong, unknown := decode(data, into, maxListed-len(p.problems))
	for _, err := range append(wrong, unknown...) {
		if meta.UID != "" && strings.HasPrefix(err.Error(), "unknown field") {
			p.warn(at, "%v ignored", err)
		} else {
			p.fail(at, "%v", err)
		}
	}
	if len(wrong) > 0 {
		return false
	}
	p.checkName(at, "metadata.name", meta.Name, rule)
	if _, isNode := into.(*corev1.Node); !isNode {
		meta.Namespace = cmp.Or(meta.Namespace, metav1.NamespaceDefault)
		p.checkName(at, "metadata.namespace", meta.Namespace, validation.IsDNS1123Label)
	}
	return true
}

// report reports the converter's problems with an object as errors. Two problems are only
// warnings, because an API server accepts such objects: an EndpointSlice without a
// service, and an invalid address of a node.
func (p *parser) report(at string, problems []watcher.Problem) {
	for _, problem := range problems {
		report := p.fail
		if strings.HasPrefix(problem.Field, "metadata.labels[") || strings.HasPrefix(problem.Field, "status.addresses") {
			report = p.warn
		}
		report(at, "%s: %s", problem.Field, problem.Message)
	}
}

// checkName checks that name is not empty and that rule accepts it.
func (p *parser) checkName(at, field, checkName string, rule func(string) []string) {
	if checkName == "" {
		p.fail(at, "%s: missing", field)
		return
	}
	for _, message := range rule(checkName) {
		p.fail(at, "%s: %q: %s", field, checkName, message)
	}
}

// oneOf checks that v is one of the known values, or empty, which means the default.
func (p *parser) oneOf(at, field, v string, known ...string) {
	if v != "" && !slices.Contains(known, v) {
		p.fail(at, "%s: %q is not one of %s", field, v, strings.Join(known, ", "))
	}
}

// validate reports some errors for which the API server would reject s. The converter
// does not check for these errors, because it usually gets objects from an API server.
func (p *parser) validate(at string, s *corev1.Service) {
	spec := &s.Spec
	if spec.Type == corev1.ServiceTypeExternalName {
		return
	}
	if len(spec.ClusterIPs) == 0 && spec.ClusterIP != "" {
		spec.ClusterIPs = []string{spec.ClusterIP} // like the API server, which fills clusterIPs
	}
	ips := spec.ClusterIPs
	headless := slices.Contains(ips, corev1.ClusterIPNone)
	if spec.ClusterIP != "" && spec.ClusterIP != ips[0] {
		p.fail(at, "spec.clusterIPs[0]: %q is not spec.clusterIP, %q", ips[0], spec.ClusterIP)
	}
	if headless && len(ips) > 1 {
		p.fail(at, "spec.clusterIPs: None must be the only value")
	}
	if headless && (spec.Type == corev1.ServiceTypeNodePort || spec.Type == corev1.ServiceTypeLoadBalancer) {
		p.fail(at, "spec.clusterIP: None is not allowed with type %s", spec.Type)
	}
	for i, ip := range ips {
		parsed := utilnet.ParseIPSloppy(ip) // parsed is nil if ip is invalid; the converter reports an invalid IP
		is6 := utilnet.IsIPv6(parsed)
		if i > 0 && parsed != nil && utilnet.IsIPv6(utilnet.ParseIPSloppy(ips[0])) == is6 {
			p.fail(at, "spec.clusterIPs[%d]: %s is of the same family as the first", i, ip)
		} else if parsed != nil && i < len(spec.IPFamilies) && spec.IPFamilies[i] == map[bool]corev1.IPFamily{false: "IPv6", true: "IPv4"}[is6] {
			p.fail(at, "spec.clusterIPs[%d]: %s is not an %s address, as spec.ipFamilies[%d] says", i, ip, spec.IPFamilies[i], i)
		}
	}
	if len(spec.Ports) == 0 && !headless {
		p.fail(at, "spec.ports: missing; only headless services may omit ports")
	}
	for i, port := range spec.Ports {
		if port.Name == "" && len(spec.Ports) > 1 {
			p.fail(at, "spec.ports[%d].name: missing; a service with several ports must name each", i)
		} else if port.Name != "" {
			p.checkName(at, fmt.Sprintf("spec.ports[%d].name", i), port.Name, validation.IsDNS1123Label)
		}
		if port.TargetPort.Type == intstr.String && port.TargetPort.StrVal != "" {
			p.checkName(at, fmt.Sprintf("spec.ports[%d].targetPort", i), port.TargetPort.StrVal, validation.IsValidPortName)
		}
	}
	p.oneOf(at, "spec.ipFamilyPolicy", string(ptr.Deref(spec.IPFamilyPolicy, "")), "SingleStack", "PreferDualStack", "RequireDualStack")
	p.oneOf(at, "spec.internalTrafficPolicy", string(ptr.Deref(spec.InternalTrafficPolicy, "")), "Cluster", "Local")
	p.oneOf(at, "spec.externalTrafficPolicy", string(spec.ExternalTrafficPolicy), "Cluster", "Local")
	for i, in := range s.Status.LoadBalancer.Ingress {
		p.oneOf(at, fmt.Sprintf("status.loadBalancer.ingress[%d].ipMode", i), string(ptr.Deref(in.IPMode, "")), "VIP", "Proxy")
	}
}
