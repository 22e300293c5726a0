// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"path"
	"slices"

	"github.com/kpng-project/kpng/internal/parameters"
	"github.com/kpng-project/kpng/watcher"
	"google.golang.org/protobuf/encoding/protowire"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// Objects are decoded from protobuf without the fields that the proxy does not need. Most
// of an object is information for other programs, such as metadata.managedFields. The numbers of
// fields come from the files generated.proto of k8s.io/api and k8s.io/apimachinery.

// decoder decodes an object from protobuf. The next call may change the result of the
// previous call. After an error the result contains only the fields that precede the
// error in the message.
type decoder[O any] func(message []byte) (O, error)

// decoders has one function for each kind of object. Each function returns a new decoder.
type decoders struct {
	service func() decoder[*corev1.Service]
	slice   func() decoder[*discoveryv1.EndpointSlice]
	node    func() decoder[*corev1.Node]
}

func newDecoders(o watcher.Options) decoders {
	var ofService, ofSlice []string
	if reader, err := parameters.NewReader(o.OtherAnnotations); err == nil { // watcher.New returns the error
		ofService, ofSlice = reader.Keys()
	}
	service := fieldSet{
		1: {fields: fieldSet{
			1: all, 3: all, 5: all, 6: all, 8: all, // name, namespace, uid, resourceVersion, creationTimestamp
			11: entries(o.KeepLabels, watcher.LabelServiceProxyName), 12: entries(o.KeepAnnotations, ofService...),
		}},
		2: all,                        // spec
		3: {fields: fieldSet{1: all}}, // status.loadBalancer
	}
	if o.Skip != nil || o.AllPorts != nil {
		const managedFields = 17
		metadata := fieldSet(slices.Repeat([]*part{all}, 64))
		metadata[managedFields] = nil
		service = fieldSet{1: {fields: metadata}, 2: all, 3: all}
	}
	slice := fieldSet{
		1: {fields: fieldSet{
			1: all, 3: all, 6: all, // name, namespace, resourceVersion
			11: entries(o.KeepSliceLabels, cmp.Or(o.ServiceNameLabel, discoveryv1.LabelServiceName),
				discoveryv1.LabelManagedBy, watcher.LabelServiceProxyName, corev1.IsHeadlessService),
			12: entries(nil, append(ofSlice, corev1.EndpointsLastChangeTriggerTime)...),
		}},
		3: all, 4: all, // ports, addressType
	}
	node := fieldSet{
		1: {fields: fieldSet{1: all, 3: all, 5: all, 6: all, 9: all, 11: all}}, // name, namespace, uid, resourceVersion, deletionTimestamp, labels
		2: {fields: fieldSet{1: all, 5: all, 7: all}},                          // podCIDR, taints, podCIDRs
		3: {fields: fieldSet{5: all}},                                          // addresses
	}
	return decoders{
		service: func() decoder[*corev1.Service] { return newDecoder[corev1.Service](service) },
		slice: func() decoder[*discoveryv1.EndpointSlice] {
			d := &sliceDecoder{rest: newDecoder[discoveryv1.EndpointSlice](slice), targets: o.KeepTargets}
			return d.decode
		},
		node: func() decoder[*corev1.Node] { return newDecoder[corev1.Node](node) },
	}
}

// newDecoder returns a decoder for objects with only the selected fields.
func newDecoder[O any, P interface {
	*O
	Unmarshal([]byte) error
}](fields fieldSet) decoder[P] {
	var buffer []byte
	var zero O
	object := P(new(O))
	return func(message []byte) (P, error) {
		var err error
		buffer, err = fields.appendTo(buffer[:0], message)
		*object = zero
		return object, cmp.Or(object.Unmarshal(buffer), err)
	}
}

// fieldSet selects fields of a protobuf message. The index of an element is a field's
// number. A nil element omits the field.
type fieldSet []*part

// part selects the content of a field. An empty part selects all content.
type part struct {
	// fields, if not nil, selects the fields of a message.
	fields fieldSet
	// key, if not nil, selects the entries of a map by their keys.
	key func(string) bool
}

var all = &part{}

// entries returns a part that selects map entries whose keys match a pattern or a name.
func entries(patterns []string, names ...string) *part {
	return &part{key: func(key string) bool {
		return slices.Contains(names, key) || slices.ContainsFunc(patterns, func(p string) bool {
			ok, _ := path.Match(p, key)
			return ok
		})
	}}
}

// appendTo appends the selected fields of message to out. After an error, the result has
// the selected fields that precede the error in message.
func (s fieldSet) appendTo(out, message []byte) ([]byte, error) {
	for len(message) > 0 {
		f, rest, err := nextField(message)
		if err != nil {
			return out, err
		}
		whole := message[:len(message)-len(rest)]
		message = rest
		var keep *part
		if number := f.tag >> 3; number < uint64(len(s)) {
			keep = s[number]
		}
		switch {
		case keep == nil:
		case keep.key != nil:
			// Check only the first field of an entry: every known encoder writes the key first.
			if entry, _, err := nextField(f.bytes); err == nil && entry.tag == 1<<3|delimited && keep.key(string(entry.bytes)) {
				out = append(out, whole...)
			}
		case keep.fields != nil && f.tag&7 == delimited:
			// The new header fits in the place of the old header, because the field does not grow.
			start := len(out)
			out = append(out, whole[:len(whole)-len(f.bytes)]...)
			body := len(out)
			out, err = keep.fields.appendTo(out, f.bytes)
			length := len(out) - body
			header := protowire.AppendVarint(protowire.AppendVarint(out[:start], f.tag), uint64(length))
			out = append(header, out[body:body+length]...)
			if err != nil {
				return out, err
			}
		default:
			out = append(out, whole...)
		}
	}
	return out, nil
}

// field is a field of a protobuf message.
type field struct {
	// tag is the number of the field times 8 plus its wire type.
	tag uint64
	// bytes is the value of a delimited field. number is the value of a varint.
	bytes  []byte
	number uint64
}

// Wire types.
const (
	varint    = uint64(protowire.VarintType)
	delimited = uint64(protowire.BytesType)
)

// nextField reads the first field of a message. rest is the message without this field.
func nextField(message []byte) (f field, rest []byte, err error) {
	number, kind, n := protowire.ConsumeTag(message)
	if n < 0 {
		return f, nil, protowire.ParseError(n)
	}
	rest = message[n:]
	f.tag = protowire.EncodeTag(number, kind)
	switch kind {
	case protowire.BytesType:
		f.bytes, n = protowire.ConsumeBytes(rest)
	case protowire.VarintType:
		f.number, n = protowire.ConsumeVarint(rest)
	default:
		n = protowire.ConsumeFieldValue(number, kind, rest)
	}
	if n < 0 {
		return f, nil, protowire.ParseError(n)
	}
	return f, rest[n:], nil
}

// sliceDecoder decodes EndpointSlices. It reuses the memory of earlier endpoints.
type sliceDecoder struct {
	// rest decodes all fields except the endpoints.
	rest decoder[*discoveryv1.EndpointSlice]
	// targets is true if references to pods are decoded.
	targets   bool
	endpoints []discoveryv1.Endpoint
	// texts has one copy of each name of a node or zone, and of each hostname.
	texts map[string]*string
}

func (d *sliceDecoder) decode(message []byte) (*discoveryv1.EndpointSlice, error) {
	s, err := d.rest(message)
	d.endpoints = d.endpoints[:0]
	for len(message) > 0 && err == nil {
		var f field
		if f, message, err = nextField(message); err == nil && f.tag == 2<<3|delimited {
			err = d.endpoint(f.bytes)
		}
	}
	s.Endpoints = d.endpoints
	return s, err
}

// endpoint decodes an endpoint and appends it to d.endpoints.
func (d *sliceDecoder) endpoint(message []byte) (err error) {
	if n := len(d.endpoints); n < cap(d.endpoints) {
		d.endpoints = d.endpoints[:n+1]
	} else {
		d.endpoints = append(d.endpoints, discoveryv1.Endpoint{})
	}
	e := &d.endpoints[len(d.endpoints)-1]
	*e = discoveryv1.Endpoint{Addresses: e.Addresses[:0]}
	for len(message) > 0 {
		var f field
		if f, message, err = nextField(message); err != nil {
			return err
		}
		switch f.tag {
		case 1<<3 | delimited:
			e.Addresses = append(e.Addresses, string(f.bytes))
		case 2<<3 | delimited:
			err = decodeConditions(&e.Conditions, f.bytes)
		case 3<<3 | delimited:
			e.Hostname = d.text(f.bytes)
		case 4<<3 | delimited:
			if d.targets {
				e.TargetRef = cmp.Or(e.TargetRef, new(corev1.ObjectReference))
				err = e.TargetRef.Unmarshal(f.bytes)
			}
		case 6<<3 | delimited:
			e.NodeName = d.text(f.bytes)
		case 7<<3 | delimited:
			e.Zone = d.text(f.bytes)
		case 8<<3 | delimited:
			e.Hints = cmp.Or(e.Hints, new(discoveryv1.EndpointHints))
			err = e.Hints.Unmarshal(f.bytes)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// The values of endpoint conditions. They are variables, because the API uses pointers.
var isTrue, isFalse = true, false

func decodeConditions(c *discoveryv1.EndpointConditions, message []byte) (err error) {
	for len(message) > 0 {
		var f field
		if f, message, err = nextField(message); err != nil {
			return err
		}
		value := &isFalse
		if f.number != 0 {
			value = &isTrue
		}
		switch f.tag {
		case 1<<3 | varint:
			c.Ready = value
		case 2<<3 | varint:
			c.Serving = value
		case 3<<3 | varint:
			c.Terminating = value
		}
	}
	return nil
}

// maxTexts is the maximum number of entries in the map texts of a sliceDecoder.
const maxTexts = 1 << 13

// text returns a pointer to the text in b. Equal texts may have the same pointer.
func (d *sliceDecoder) text(b []byte) *string {
	if p := d.texts[string(b)]; p != nil {
		return p
	}
	if d.texts == nil || len(d.texts) == maxTexts {
		d.texts = map[string]*string{}
	}
	text := string(b)
	d.texts[text] = &text
	return &text
}
