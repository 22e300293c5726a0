// SPDX-License-Identifier: Apache-2.0

package file

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/watcher"
	"sigs.k8s.io/yaml"
)

// DefaultAllPortsAnnotation is what Write marks all-ports services with unless
// told otherwise. Kubernetes has no field for that.
const DefaultAllPortsAnnotation = "all-ports"

// WriteOptions say how Write writes. The zero value writes YAML that is read
// without a proxy name.
type WriteOptions struct {
	// JSON writes a List in JSON instead of documents in YAML.
	JSON bool
	// ServiceProxyName, if not empty, is written as the label
	// service.kubernetes.io/service-proxy-name of services and slices, for who
	// reads with watcher.Options.ServiceProxyName. The state does not have it.
	ServiceProxyName string
	// AllPortsAnnotation is the annotation that all-ports services get, for who
	// reads with watcher.AllPortsAnnotated. Default: DefaultAllPortsAnnotation.
	AllPortsAnnotation string
}

// Write writes the services, slices and nodes of s to w as manifests, in order.
// Who reads them with the proxy name and the annotation of opts, and keeps the
// labels and annotations that s has, gets a state that is equal to s.
//
// It returns an error that names the object if there is one that manifests cannot
// tell: one that an API server would not have. What was written by then is to be
// thrown away, as with an error of w.
func Write(w io.Writer, s *cluster.Snapshot, opts WriteOptions) error {
	if opts.AllPortsAnnotation == "" {
		opts.AllPortsAnnotation = DefaultAllPortsAnnotation
	}
	converter, err := watcher.New(watcher.Options{
		ServiceProxyName: opts.ServiceProxyName,
		KeepLabels:       everyKey,
		KeepAnnotations:  everyKey,
		AllPorts:         watcher.AllPortsAnnotated(opts.AllPortsAnnotation),
	})
	if err != nil {
		return err
	}
	out := bufio.NewWriter(w)
	e := encoder{out: out, json: opts.JSON}
	o := objects{opts: opts, converter: converter}
	e.begin()
	for key, service := range s.Services.All() {
		if err := e.object(o.service(service)); err != nil {
			return fmt.Errorf("write Service %s: %w", key, err)
		}
	}
	for key, slice := range s.Slices.All() {
		if err := e.object(o.slice(slice)); err != nil {
			return fmt.Errorf("write EndpointSlice %s: %w", key, err)
		}
	}
	for name, node := range s.Nodes.All() {
		if err := e.object(o.node(node)); err != nil {
			return fmt.Errorf("write Node %s: %w", name, err)
		}
	}
	e.end()
	return out.Flush()
}

// everyKey are the patterns that all labels and annotations match.
var everyKey = []string{"*", "*/*"}

// encoder writes objects one after the other. The writer keeps its first error to
// itself until it is flushed.
type encoder struct {
	out     *bufio.Writer
	json    bool
	objects int
}

func (e *encoder) begin() {
	if e.json {
		e.out.WriteString(`{"apiVersion":"v1","kind":"List","items":[`)
	}
}

// object writes an object, unless there is an error already.
func (e *encoder) object(object any, err error) error {
	if err != nil {
		return err
	}
	separator, marshal := "---\n", yaml.Marshal
	if e.json {
		separator, marshal = ",\n", json.Marshal
		if e.objects == 0 {
			separator = "\n"
		}
	}
	text, err := marshal(object)
	if err != nil {
		return err
	}
	e.objects++
	e.out.WriteString(separator)
	e.out.Write(text)
	return nil
}

func (e *encoder) end() {
	switch {
	case e.json:
		e.out.WriteString("\n]}\n")
	case e.objects == 0:
		e.out.WriteString("apiVersion: v1\nkind: List\nitems: []\n")
	}
}
