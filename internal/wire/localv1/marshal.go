// SPDX-License-Identifier: Apache-2.0

package localv1

import (
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Marshal returns the encoding of m. Equal messages have equal encodings within one build
// of the program. Objects of an API server may contain strings that are not UTF-8.
// Protobuf cannot encode such strings, so Marshal replaces invalid bytes by U+FFFD in the
// output. Marshal does not modify m, because m shares maps and lists with other values.
func Marshal(m proto.Message) []byte {
	deterministic := proto.MarshalOptions{Deterministic: true}
	b, err := deterministic.Marshal(m)
	if err != nil {
		m = proto.Clone(m)
		repairStrings(m.ProtoReflect())
		b, err = deterministic.Marshal(m)
	}
	if err != nil {
		panic(fmt.Sprintf("localv1: marshal %s: %v", m.ProtoReflect().Descriptor().FullName(), err)) // cannot happen: repairStrings has replaced all invalid strings
	}
	return b
}

// repairStrings replaces every string in m by valid UTF-8.
func repairStrings(m protoreflect.Message) {
	m.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		switch {
		case field.IsMap():
			repairMap(field, value.Map())
		case field.IsList():
			for list, i := value.List(), 0; i < list.Len(); i++ {
				if v, changed := repairValue(field, list.Get(i)); changed {
					list.Set(i, v)
				}
			}
		default:
			if v, changed := repairValue(field, value); changed {
				m.Set(field, v)
			}
		}
		return true
	})
}

// repairMap repairs the keys and values of a map. The value of a repaired key moves to
// the new key.
func repairMap(field protoreflect.FieldDescriptor, m protoreflect.Map) {
	fixed := map[string]protoreflect.Value{}
	m.Range(func(key protoreflect.MapKey, value protoreflect.Value) bool {
		v, changed := repairValue(field.MapValue(), value)
		if k := valid(key.String()); changed || k != key.String() {
			m.Clear(key)
			fixed[k] = v
		}
		return true
	})
	for key, value := range fixed {
		m.Set(protoreflect.ValueOfString(key).MapKey(), value)
	}
}

// repairValue returns v with valid UTF-8, and reports whether the result differs from v.
// It modifies messages in place.
func repairValue(field protoreflect.FieldDescriptor, v protoreflect.Value) (protoreflect.Value, bool) {
	switch field.Kind() {
	case protoreflect.MessageKind:
		repairStrings(v.Message())
	case protoreflect.StringKind:
		if s := valid(v.String()); s != v.String() {
			return protoreflect.ValueOfString(s), true
		}
	}
	return v, false
}

func valid(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }
