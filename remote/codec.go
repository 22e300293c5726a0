// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the codec that rawCodec falls back to
	"google.golang.org/grpc/mem"
)

// raw is a message that is marshalled already. Its bytes may be shared: they are
// read and not changed.
type raw struct{ bytes mem.BufferSlice }

// rawCodec is the usual codec, but for messages that are raw.
type rawCodec struct{ encoding.CodecV2 }

func newRawCodec() rawCodec { return rawCodec{encoding.GetCodecV2("proto")} }

// Marshal implements encoding.CodecV2.
func (c rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	if r, ok := v.(*raw); ok {
		return r.bytes, nil
	}
	return c.CodecV2.Marshal(v)
}
