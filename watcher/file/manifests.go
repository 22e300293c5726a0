// SPDX-License-Identifier: Apache-2.0

package file

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	yaml3 "go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/watcher"
)

// Manifests is what a set of manifests says: what is meant for the proxy, each
// object once, in no particular order.
type Manifests struct {
	Services []*api.Service
	Slices   []*api.EndpointSlice
	Nodes    []*api.Node
	// Warnings tell what was left out and what looks like a mistake.
	Warnings []*Error
}

// maxEndpoints is how many endpoints the API server admits in a slice.
const maxEndpoints = 1000

// maxErrors bounds the errors that are collected at all.
const maxErrors = 1000

// parser reads files one by one and collects what they say.
type parser struct {
	converter *watcher.Converter
	// anySlice says that wanted services without a selector are served with
	// slices of whatever labels; see watcher.Converter.WantsSlice.
	anySlice bool
	decoder  decoder

	manifests    Manifests
	errors       Errors
	defined      map[string]*Error             // where each object is
	ignored      map[string]*ignored           // by apiVersion and kind
	selectorless map[types.NamespacedName]bool // wanted services
	undecided    []*api.EndpointSlice          // wanted if their service is in selectorless
}

// ignored is a kind of object that is none of a proxy's business.
type ignored struct {
	first *Error
	count int
}

func newParser(options watcher.Options) (*parser, error) {
	converter, err := watcher.New(options)
	if err != nil {
		return nil, err
	}
	return &parser{
		converter:    converter,
		anySlice:     options.ServiceProxyName != "",
		decoder:      decoder{fields: map[reflect.Type]map[string][]int{}},
		defined:      map[string]*Error{},
		ignored:      map[string]*ignored{},
		selectorless: map[types.NamespacedName]bool{},
	}, nil
}

// result returns what all files say, or Errors.
func (p *parser) result() (*Manifests, error) {
	if len(p.errors) > 0 {
		return nil, p.errors
	}
	for _, s := range p.undecided {
		if p.selectorless[s.ServiceKey()] {
			p.manifests.Slices = append(p.manifests.Slices, s)
		}
	}
	for _, kind := range slices.Sorted(maps.Keys(p.ignored)) {
		i := p.ignored[kind]
		i.first.Message = fmt.Sprintf("%s is not read (objects: %d)", kind, i.count)
		p.manifests.Warnings = append(p.manifests.Warnings, i.first)
	}
	return &p.manifests, nil
}

// file reads one file. When ctx ends, the result means nothing.
func (p *parser) file(ctx context.Context, name string, data []byte) {
	before := len(p.errors)
	docs, errs := documents(ctx, name, data)
	for _, err := range errs {
		p.fail(&Error{File: name, Line: err.line, Message: err.message})
	}
	docs = slices.DeleteFunc(docs, func(d document) bool { return d.root.ShortTag() == "!!null" })
	if len(docs) == 0 && len(errs) == 0 {
		p.fail(&Error{File: name, Message: "empty; a List without items says that there is nothing"})
	}
	for _, doc := range docs {
		p.node(ctx, place{file: name, first: doc.first}, doc.root, metav1.TypeMeta{})
	}
	slices.SortStableFunc(p.errors[before:], func(a, b *Error) int { return cmp.Compare(a.Line, b.Line) })
}

func (p *parser) fail(err *Error) {
	if len(p.errors) < maxErrors {
		p.errors = append(p.errors, err)
	}
}

func (p *parser) warn(err *Error) { p.manifests.Warnings = append(p.manifests.Warnings, err) }

// place is where the nodes of a document are: their lines count from first.
type place struct {
	file   string
	first  int
	object string
}

func (at place) error(line int, message string) *Error {
	return &Error{File: at.file, Line: at.first + line, Object: at.object, Message: message}
}

// node reads an object, or the objects of a list. The items of a typed list,
// as the API server sends them, do not repeat their type; it is handed in.
func (p *parser) node(ctx context.Context, at place, n *yaml3.Node, itemOf metav1.TypeMeta) {
	if ctx.Err() != nil {
		return
	}
	if n.Kind != yaml3.MappingNode {
		p.fail(at.error(n.Line, describeNode(n)+" where an object belongs"))
		return
	}
	apiVersion := cmp.Or(text(n, "apiVersion"), itemOf.APIVersion)
	kind := cmp.Or(text(n, "kind"), itemOf.Kind)
	if apiVersion == "" || kind == "" {
		p.fail(at.error(n.Line, "an object needs apiVersion and kind"))
		return
	}
	if of, isList := strings.CutSuffix(kind, "List"); isList {
		if key, items := child(n, "items"); key != nil || of == "" {
			itemOf = metav1.TypeMeta{}
			if of != "" {
				itemOf = metav1.TypeMeta{APIVersion: apiVersion, Kind: of}
			}
			p.items(ctx, at, items, itemOf)
			return
		}
	}

	at.object = kind
	if name := text(n, "metadata", "name"); name != "" {
		if kind != "Node" {
			name = cmp.Or(text(n, "metadata", "namespace"), metav1.NamespaceDefault) + "/" + name
		}
		at.object += " " + name
	}
	switch apiVersion + " " + kind {
	case "v1 Service":
		p.service(at, n)
	case "discovery.k8s.io/v1 EndpointSlice":
		p.slice(at, n)
	case "v1 Node":
		p.clusterNode(at, n)
	default:
		kind := apiVersion + " " + kind
		if p.ignored[kind] == nil {
			at.object = ""
			p.ignored[kind] = &ignored{first: at.error(n.Line, "")}
		}
		p.ignored[kind].count++
	}
}

func (p *parser) items(ctx context.Context, at place, items *yaml3.Node, itemOf metav1.TypeMeta) {
	switch {
	case items == nil || items.ShortTag() == "!!null":
	case items.Kind != yaml3.SequenceNode:
		p.fail(at.error(items.Line, "items: "+describeNode(items)+" where a list belongs"))
	default:
		for _, item := range items.Content {
			p.node(ctx, at, item, itemOf)
		}
	}
}

func (p *parser) service(at place, n *yaml3.Node) {
	var object corev1.Service
	if !p.decode(at, n, &object) {
		return
	}
	object.Namespace = cmp.Or(object.Namespace, metav1.NamespaceDefault)
	service, problems := p.converter.Service(&object)
	failed := p.report(at, n, problems, func(c check) { c.service(&object) })
	if failed || !p.converter.WantsService(&object) {
		return
	}
	p.manifests.Services = append(p.manifests.Services, service)
	if watcher.Selectorless(&object) && p.anySlice {
		p.selectorless[service.Key()] = true
	}
}

func (p *parser) slice(at place, n *yaml3.Node) {
	var object discoveryv1.EndpointSlice
	if !p.decode(at, n, &object) {
		return
	}
	object.Namespace = cmp.Or(object.Namespace, metav1.NamespaceDefault)
	slice, problems := p.converter.EndpointSlice(&object)
	failed := p.report(at, n, problems, func(c check) {
		c.name("metadata.name", object.Name, validation.IsDNS1123Subdomain)
		c.name("metadata.namespace", object.Namespace, validation.IsDNS1123Label)
	})
	if failed {
		return
	}
	if count := len(object.Endpoints); count > maxEndpoints {
		p.warn(at.error(lineOf(n, "endpoints"), fmt.Sprintf("endpoints: %d of them; an API server admits %d in a slice", count, maxEndpoints)))
	}
	switch {
	case slice == nil:
	case p.converter.WantsSlice(&object):
		p.manifests.Slices = append(p.manifests.Slices, slice)
	case p.anySlice:
		p.undecided = append(p.undecided, slice)
	}
}

func (p *parser) clusterNode(at place, n *yaml3.Node) {
	var object corev1.Node
	if !p.decode(at, n, &object) {
		return
	}
	node, problems := p.converter.Node(&object)
	failed := p.report(at, n, problems, func(c check) {
		c.name("metadata.name", object.Name, validation.IsDNS1123Subdomain)
	})
	if !failed {
		p.manifests.Nodes = append(p.manifests.Nodes, node)
	}
}

// decode decodes n into object and reports whether that went well.
//
// A field that the type does not have is refused: a misspelt field that is
// ignored does more harm. In an object that an API server has written, which
// its UID tells, such a field is no mistake but that of a later release; it is
// left out with a warning.
func (p *parser) decode(at place, n *yaml3.Node, object any) (ok bool) {
	ok = true
	fail := func(n *yaml3.Node, message string) {
		ok = false
		p.fail(at.error(n.Line, message))
	}
	p.decoder.invalid, p.decoder.unknown = fail, fail
	if text(n, "metadata", "uid") != "" {
		p.decoder.unknown = func(n *yaml3.Node, message string) { p.warn(at.error(n.Line, message+" is not read")) }
	}
	p.decoder.decode(n, object)
	return ok
}

// report reports what the converter and our own check say of an object, and
// whether the object has to be refused: an API server lets pass a slice that
// belongs to no service and a node address that is none.
func (p *parser) report(at place, n *yaml3.Node, problems []watcher.Problem, own func(check)) (failed bool) {
	failed = p.definedBefore(at, n)
	own(check{fail: func(field, message string) {
		failed = true
		p.fail(at.error(lineOf(n, field), field+": "+message))
	}})
	for _, problem := range problems {
		err := at.error(lineOf(n, problem.Field), problem.Field+": "+problem.Message)
		if strings.HasPrefix(problem.Field, "metadata.labels[") || strings.HasPrefix(problem.Field, "status.addresses") {
			p.warn(err)
		} else {
			failed = true
			p.fail(err)
		}
	}
	return failed
}

// definedBefore reports an object that is not the first of its name.
func (p *parser) definedBefore(at place, n *yaml3.Node) bool {
	if text(n, "metadata", "name") == "" {
		return false
	}
	here := at.error(n.Line, "")
	if first, again := p.defined[at.object]; again {
		here.Message = fmt.Sprintf("already defined at %s:%d", first.File, first.Line)
		p.fail(here)
		return true
	}
	p.defined[at.object] = here
	return false
}
