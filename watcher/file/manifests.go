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
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/manifest"
	"github.com/kpng-project/kpng/watcher"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	kjson "sigs.k8s.io/json"
)

// manifests contains the objects that a set of files defines for the proxy.
type manifests struct {
	services []*api.Service
	slices   []*api.EndpointSlice
	nodes    []*api.Node
	warnings []string            // about ignored parts and likely mistakes
	problems []func(*cluster.Tx) // record the invalid parts of objects in the state
	files    int
}

// maxListed limits the number of problems that an error lists.
const maxListed = 20

// parser reads files one after the other and collects their objects. It names the
// location of an object in this form: "a.yaml: document 2 (line 10): items[3]: Service
// default/web".
type parser struct {
	converter    *watcher.Converter
	proxyName    string // watcher.Options.ServiceProxyName
	manifests    manifests
	problems     []error
	unlisted     int                           // number of problems beyond maxListed
	defined      map[string]string             // location of each object
	ignored      map[string][]string           // locations of objects of other kinds
	selectorless map[types.NamespacedName]bool // the served services; true if their EndpointSlices need no label, see watcher.Converter.WantsSlice
	undecided    []undecided

	// Other goroutines may read these fields, which show the progress.
	reading atomic.Pointer[string] // the file that is being read
	objects atomic.Int64           // number of parsed objects
}

// undecided is a slice that its labels do not select. A proxy with a name needs it if it
// belongs to a served service without a selector.
type undecided struct {
	at    string
	slice *api.EndpointSlice
}

func newParser(options watcher.Options) (*parser, error) {
	converter, err := watcher.New(options)
	return &parser{
		converter: converter, proxyName: options.ServiceProxyName,
		defined: map[string]string{}, ignored: map[string][]string{}, selectorless: map[types.NamespacedName]bool{},
	}, err
}

// finish completes the manifests after the last file. It returns the problems of all
// files.
func (p *parser) finish() error {
	for _, u := range p.undecided {
		selectorless, served := p.selectorless[types.NamespacedName{Namespace: u.slice.Namespace, Name: u.slice.ServiceName}]
		switch {
		case !served:
		case p.proxyName == "":
			p.warn(u.at, "ignored, because its label %s is only for slices of headless services", corev1.IsHeadlessService)
		case selectorless:
			p.manifests.slices = append(p.manifests.slices, u.slice)
		default:
			p.warn(u.at, "ignored, because it lacks the label %s: %s of its service", watcher.LabelServiceProxyName, p.proxyName)
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

// file parses one file. If ctx ends, parsing may end before the last document.
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
	if !p.decode(at, data, &in, &in.ObjectMeta) {
		return
	}
	in.Namespace = cmp.Or(in.Namespace, metav1.NamespaceDefault)
	p.refuse(at, &in.ObjectMeta, manifest.ValidateService(&in))
	service, problems := p.converter.Service(&in)
	p.report(at, problems)
	if p.converter.WantsService(&in) {
		p.manifests.services = append(p.manifests.services, service)
		p.selectorless[service.Key()] = watcher.Selectorless(&in)
		if len(problems) > 0 {
			p.manifests.problems = append(p.manifests.problems, func(tx *cluster.Tx) { tx.SetServiceProblems(service.Key(), problems) })
		}
	}
}

func (p *parser) slice(at string, data []byte) {
	var in discoveryv1.EndpointSlice
	if !p.decode(at, data, &in, &in.ObjectMeta) {
		return
	}
	in.Namespace = cmp.Or(in.Namespace, metav1.NamespaceDefault)
	if count := len(in.Endpoints); count > manifest.MaxSliceEndpoints {
		p.warn(at, "endpoints: the slice has %d; an API server admits %d", count, manifest.MaxSliceEndpoints)
	}
	p.refuse(at, &in.ObjectMeta, manifest.ValidateSlice(&in))
	slice, problems := p.converter.EndpointSlice(&in)
	p.report(at, problems)
	if p.converter.WantsSlice(&in) && slice != nil {
		p.manifests.slices = append(p.manifests.slices, slice)
	} else if slice != nil {
		p.undecided = append(p.undecided, undecided{at, slice})
	}
	if slice != nil && len(problems) > 0 {
		p.manifests.problems = append(p.manifests.problems, func(tx *cluster.Tx) { tx.SetSliceProblems(slice.Key(), problems) })
	}
}

func (p *parser) node(at string, data []byte) {
	var in corev1.Node
	if !p.decode(at, data, &in, &in.ObjectMeta) {
		return
	}
	in.Namespace = ""
	p.refuse(at, &in.ObjectMeta, manifest.ValidateNode(&in))
	node, problems := p.converter.Node(&in)
	p.report(at, problems)
	p.manifests.nodes = append(p.manifests.nodes, node)
}

// decode decodes an object and reports whether all values have the right types.
//
// An unknown field is an error, because the user may have misspelt it. If the object has
// a UID, the field causes only a warning, because a newer API server may have written it.
func (p *parser) decode(at string, data []byte, into any, meta *metav1.ObjectMeta) bool {
	wrong, unknown := decode(data, into, maxListed-len(p.problems))
	for _, err := range append(wrong, unknown...) {
		if meta.UID != "" && strings.HasPrefix(err.Error(), "unknown field") {
			p.warn(at, "%v ignored", err)
		} else {
			p.fail(at, "%v", err)
		}
	}
	return len(wrong) == 0
}

// refuse reports the reasons why an API server would refuse a new object. If the object
// has a UID, they are only warnings, because an older API server may have admitted it.
func (p *parser) refuse(at string, meta *metav1.ObjectMeta, errs field.ErrorList) {
	report := p.fail
	if meta.UID != "" {
		report = p.warn
	}
	for _, err := range errs {
		report(at, "%v", err)
	}
}

// report reports the parts of an object that the converter omitted. They are only
// warnings: if an API server would refuse them, the method refuse reports them, too.
func (p *parser) report(at string, problems []error) {
	for _, problem := range problems {
		p.warn(at, "%v", problem)
	}
}
