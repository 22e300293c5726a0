// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"strings"

	"github.com/kpng-project/kpng/internal/wire/localv1"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"k8s.io/apimachinery/pkg/types"
)

// Field numbers of the messages that this file assembles from marshalled parts.
const (
	opItemSync        protowire.Number = 1
	opItemSet         protowire.Number = 2
	opItemReplace     protowire.Number = 100
	opItemBatch       protowire.Number = 101
	opItemResume      protowire.Number = 102
	opItemStale       protowire.Number = 103
	valueRef          protowire.Number = 1
	valueBytes        protowire.Number = 2
	refSet            protowire.Number = 1
	refPath           protowire.Number = 2
	wholeService      protowire.Number = 1
	wholeEndpoints    protowire.Number = 2
	keyedEndpointKey  protowire.Number = 1
	keyedEndpointData protowire.Number = 2
	endpointLocal     protowire.Number = 3
)

// frame is a marshalled OpItem, encoded as an element of the field Batch of another
// OpItem. Batch is a repeated field. So several consecutive frames encode one OpItem, and
// its Batch has the items of all frames.
type frame []byte

func newFrame(item *localv1.OpItem) frame {
	return appendField(nil, opItemBatch, localv1.Marshal(item))
}

// item returns the marshalled OpItem, without the tag and length of the field Batch.
func (f frame) item() []byte {
	_, _, tag := protowire.ConsumeTag(f)
	_, length := protowire.ConsumeVarint(f[tag:])
	return f[tag+length:]
}

// A beginning has a Set for each endpoint. So setFrame encodes the Set fast, without
// package proto.
func setFrame(set localv1.Set, path string, value []byte) frame {
	path = strings.ToValidUTF8(path, "\uFFFD") // protobuf strings have to be UTF-8
	ref := protowire.SizeTag(refSet) + protowire.SizeVarint(uint64(set)) + sizeField(refPath, len(path))
	both := sizeField(valueRef, ref)
	if len(value) > 0 {
		both += sizeField(valueBytes, len(value))
	}
	item := sizeField(opItemSet, both)
	f := appendHead(make(frame, 0, sizeField(opItemBatch, item)), opItemBatch, item)
	f = appendHead(f, opItemSet, both)
	f = appendHead(f, valueRef, ref)
	f = protowire.AppendVarint(protowire.AppendTag(f, refSet, protowire.VarintType), uint64(set))
	f = protowire.AppendString(protowire.AppendTag(f, refPath, protowire.BytesType), path)
	if len(value) > 0 {
		f = appendField(f, valueBytes, value)
	}
	return f
}

func deleteFrame(set localv1.Set, path string) frame {
	return newFrame(&localv1.OpItem{Op: &localv1.OpItem_Delete{Delete: &localv1.Ref{Set: set, Path: path}}})
}

func resetFrame() frame {
	return newFrame(&localv1.OpItem{Op: &localv1.OpItem_Reset_{Reset_: &localv1.EmptyOp{}}})
}

// Each answer has its own Sync, so syncFrame encodes it fast, without package proto.
func syncFrame(token []byte, stale bool) frame {
	size := sizeField(opItemSync, 0)
	if token != nil {
		size += sizeField(opItemResume, len(token))
	}
	if stale {
		size += protowire.SizeTag(opItemStale) + protowire.SizeVarint(1)
	}
	f := appendHead(make(frame, 0, sizeField(opItemBatch, size)), opItemBatch, size)
	f = appendField(f, opItemSync, nil)
	if token != nil {
		f = appendField(f, opItemResume, token)
	}
	if stale {
		f = protowire.AppendVarint(protowire.AppendTag(f, opItemStale, protowire.VarintType), 1)
	}
	return f
}

// replaceFrame returns the frame of an operation that sends a whole service.
func replaceFrame(service []byte, endpoints []wireEndpoint) frame {
	whole := sizeWhole(service, endpoints)
	item := sizeField(opItemReplace, whole)
	f := make(frame, 0, sizeField(opItemBatch, item))
	f = appendHead(f, opItemBatch, item)
	f = appendHead(f, opItemReplace, whole)
	return appendWhole(f, service, endpoints)
}

// encodeWhole returns the encoding of a WholeService.
func encodeWhole(service []byte, endpoints []wireEndpoint) []byte {
	return appendWhole(make([]byte, 0, sizeWhole(service, endpoints)), service, endpoints)
}

func appendWhole(b, service []byte, endpoints []wireEndpoint) []byte {
	b = appendField(b, wholeService, service)
	for i := range endpoints {
		e := &endpoints[i]
		b = appendHead(b, wholeEndpoints, e.keyedSize())
		b = protowire.AppendString(protowire.AppendTag(b, keyedEndpointKey, protowire.BytesType), e.key)
		b = appendField(b, keyedEndpointData, e.value)
	}
	return b
}

func sizeWhole(service []byte, endpoints []wireEndpoint) int {
	size := sizeField(wholeService, len(service))
	for i := range endpoints {
		size += sizeField(wholeEndpoints, endpoints[i].keyedSize())
	}
	return size
}

// keyedSize returns the size of the encoded KeyedEndpoint.
func (e *wireEndpoint) keyedSize() int {
	return sizeField(keyedEndpointKey, len(e.key)) + sizeField(keyedEndpointData, len(e.value))
}

// appendHead appends the tag and the length of a field.
func appendHead(b []byte, number protowire.Number, size int) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, number, protowire.BytesType), uint64(size))
}

// sizeField returns the size of a field with its tag and its length.
func sizeField(number protowire.Number, size int) int {
	return protowire.SizeTag(number) + protowire.SizeBytes(size)
}

func appendField(b []byte, number protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, number, protowire.BytesType), value)
}

func servicePath(key types.NamespacedName) string { return key.Namespace + "/" + key.Name }

func endpointPath(key types.NamespacedName, endpoint string) string {
	return key.Namespace + "/" + key.Name + "/" + endpoint
}

// raw is a marshalled message. Streams may share its bytes, so nothing may modify them.
type raw struct{ bytes mem.BufferSlice }

// rawCodec sends the bytes of a raw message unchanged. For all other messages it uses the
// default codec.
type rawCodec struct{ encoding.CodecV2 }

// Marshal implements encoding.CodecV2.
func (c rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	if r, ok := v.(*raw); ok {
		return r.bytes, nil
	}
	return c.CodecV2.Marshal(v)
}

// appendLocal appends the encoding of an endpoint, with the field Local.
func appendLocal(b, endpoint []byte) []byte {
	at := 0
	for at < len(endpoint) {
		number, _, size := protowire.ConsumeField(endpoint[at:])
		if number > endpointLocal {
			break
		}
		at += size
	}
	b = append(b, endpoint[:at]...)
	b = protowire.AppendVarint(protowire.AppendTag(b, endpointLocal, protowire.VarintType), 1)
	return append(b, endpoint[at:]...)
}
