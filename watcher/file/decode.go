// SPDX-License-Identifier: Apache-2.0

package file

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"

	yaml3 "go.yaml.in/yaml/v3"
)

// decoder puts trees into API types strictly: it tells of every value of a
// wrong type, every field that the type does not have and every field that is
// there twice, with the line of each. Decoding by way of JSON, as is usual,
// would forget the lines and stop at the first wrong type.
type decoder struct {
	// invalid and unknown receive what is wrong.
	invalid, unknown func(n *yaml3.Node, message string)
	// fields caches the fields of each struct type by their JSON name.
	fields map[reflect.Type]map[string][]int
}

// decode sets v, a pointer, to what n says.
func (d *decoder) decode(n *yaml3.Node, v any) { d.value(n, reflect.ValueOf(v).Elem(), "") }

func (d *decoder) value(n *yaml3.Node, v reflect.Value, path string) {
	if n.ShortTag() == "!!null" {
		return
	}
	if v.Kind() == reflect.Pointer {
		v.Set(reflect.New(v.Type().Elem()))
		d.value(n, v.Elem(), path)
		return
	}
	if u, ok := v.Addr().Interface().(json.Unmarshaler); ok {
		text, err := json.Marshal(plain(n))
		if err == nil {
			err = u.UnmarshalJSON(text)
		}
		if err != nil {
			d.invalid(n, fmt.Sprintf("%s: %v", path, err))
		}
		return
	}
	switch kind := v.Kind(); {
	case kind == reflect.Struct && n.Kind == yaml3.MappingNode:
		d.structure(n, v, path)
	case kind == reflect.Map && n.Kind == yaml3.MappingNode:
		d.mapping(n, v, path)
	case kind == reflect.Slice && n.Kind == yaml3.SequenceNode:
		v.Set(reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content)))
		for i, item := range n.Content {
			d.value(item, v.Index(i), fmt.Sprintf("%s[%d]", path, i))
		}
	case kind == reflect.String && isString(n):
		v.SetString(n.Value)
	case kind == reflect.Bool && n.ShortTag() == "!!bool":
		var b bool
		if err := n.Decode(&b); err != nil {
			d.invalid(n, fmt.Sprintf("%s: %v", path, err))
		}
		v.SetBool(b)
	case v.CanInt() && n.ShortTag() == "!!int":
		var i int64
		if err := n.Decode(&i); err != nil || v.OverflowInt(i) {
			d.invalid(n, fmt.Sprintf("%s: %s is out of range", path, n.Value))
			return
		}
		v.SetInt(i)
	default:
		message := fmt.Sprintf("%s: %s where %s belongs", path, describeNode(n), describeType(v))
		if kind == reflect.String && n.Kind == yaml3.ScalarNode {
			message += ": put it in quotes"
		}
		d.invalid(n, message)
	}
}

func (d *decoder) structure(n *yaml3.Node, v reflect.Value, path string) {
	fields := d.fieldsOf(v.Type())
	for name, pair := range d.pairs(n, path) {
		index, known := fields[name]
		if !known {
			d.unknown(pair[0], fmt.Sprintf("unknown field %q", join(path, name)))
			continue
		}
		d.value(pair[1], v.FieldByIndex(index), join(path, name))
	}
}

func (d *decoder) mapping(n *yaml3.Node, v reflect.Value, path string) {
	v.Set(reflect.MakeMapWithSize(v.Type(), len(n.Content)/2))
	for name, pair := range d.pairs(n, path) {
		element := reflect.New(v.Type().Elem()).Elem()
		d.value(pair[1], element, fmt.Sprintf("%s[%s]", path, name))
		v.SetMapIndex(reflect.ValueOf(name).Convert(v.Type().Key()), element)
	}
}

// pairs yields the fields of a mapping, each as key and value, the first of
// each name.
func (d *decoder) pairs(n *yaml3.Node, path string) func(yield func(string, [2]*yaml3.Node) bool) {
	return func(yield func(string, [2]*yaml3.Node) bool) {
		seen := make(map[string]bool, len(n.Content)/2)
		for i := 0; i+1 < len(n.Content); i += 2 {
			key := n.Content[i]
			switch {
			case key.Kind != yaml3.ScalarNode:
				d.invalid(key, fmt.Sprintf("%s: %s as the name of a field", path, describeNode(key)))
			case seen[key.Value]:
				d.invalid(key, fmt.Sprintf("field %q is there twice", join(path, key.Value)))
			default:
				seen[key.Value] = true
				if !yield(key.Value, [2]*yaml3.Node{key, n.Content[i+1]}) {
					return
				}
			}
		}
	}
}

// fieldsOf returns the index of each field of a struct type by its JSON name.
// The API's types inline some embedded structs.
func (d *decoder) fieldsOf(t reflect.Type) map[string][]int {
	if known, ok := d.fields[t]; ok {
		return known
	}
	fields := make(map[string][]int, t.NumField())
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case name == "" && f.Anonymous:
			for inner, index := range d.fieldsOf(f.Type) {
				fields[inner] = append([]int{i}, index...)
			}
		case name != "" && name != "-":
			fields[name] = []int{i}
		}
	}
	d.fields[t] = fields
	return fields
}

// plain returns what n says as encoding/json would put it into an any.
func plain(n *yaml3.Node) any {
	switch n.Kind {
	case yaml3.MappingNode:
		m := make(map[string]any, len(n.Content)/2)
		for i := 0; i+1 < len(n.Content); i += 2 {
			m[n.Content[i].Value] = plain(n.Content[i+1])
		}
		return m
	case yaml3.SequenceNode:
		list := make([]any, len(n.Content))
		for i, item := range n.Content {
			list[i] = plain(item)
		}
		return list
	}
	var scalar any = n.Value
	if !isString(n) {
		if err := n.Decode(&scalar); err != nil {
			return n.Value
		}
	}
	return scalar
}

// isString reports whether n is text for the API: what YAML takes for a point
// in time or for binary data is, too.
func isString(n *yaml3.Node) bool {
	switch n.ShortTag() {
	case "!!str", "!!timestamp", "!!binary":
		return n.Kind == yaml3.ScalarNode
	default:
		return false
	}
}

func describeNode(n *yaml3.Node) string {
	switch {
	case n.Kind == yaml3.MappingNode:
		return "a mapping"
	case n.Kind == yaml3.SequenceNode:
		return "a list"
	case isString(n):
		return fmt.Sprintf("the text %q", n.Value)
	default:
		return n.Value
	}
}

func describeType(v reflect.Value) string {
	switch v.Kind() {
	case reflect.Struct, reflect.Map:
		return "a mapping"
	case reflect.Slice:
		return "a list"
	case reflect.String:
		return "text"
	case reflect.Bool:
		return "true or false"
	default:
		return "a whole number"
	}
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// child returns the key and the value of a field of the mapping n, nil if it
// has none.
func child(n *yaml3.Node, name string) (key, value *yaml3.Node) {
	if n != nil && n.Kind == yaml3.MappingNode {
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i].Value == name {
				return n.Content[i], n.Content[i+1]
			}
		}
	}
	return nil, nil
}

// text returns the text at a path of field names below n, empty if there is none.
func text(n *yaml3.Node, path ...string) string {
	for _, name := range path {
		_, n = child(n, name)
	}
	if n == nil || !isString(n) {
		return ""
	}
	return n.Value
}

// lineOf returns the line of the field at path, written as in the messages of
// the API server: spec.ports[0].port, metadata.labels[app]. If n has no such
// field, it is the line of what should hold it.
func lineOf(n *yaml3.Node, path string) int {
	line := n.Line
	for path != "" && n != nil {
		var name string
		var key *yaml3.Node
		if rest, isIndex := strings.CutPrefix(path, "["); isIndex {
			name, path, _ = strings.Cut(rest, "]")
		} else {
			path = strings.TrimPrefix(path, ".")
			end := strings.IndexAny(path, ".[")
			if end < 0 {
				end = len(path)
			}
			name, path = path[:end], path[end:]
		}
		if n.Kind == yaml3.SequenceNode {
			var i int
			if _, err := fmt.Sscan(name, &i); err != nil || i < 0 || i >= len(n.Content) {
				return line
			}
			n = n.Content[i]
			key = n
		} else {
			key, n = child(n, name)
		}
		if n != nil {
			line = key.Line
		}
	}
	return line
}
