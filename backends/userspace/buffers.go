// SPDX-License-Identifier: Apache-2.0

package userspace

import "sync"

// buffers is a pool of buffers for streams. It is safe for concurrent use.
type buffers struct{ pool sync.Pool }

// bufferSize is the size of a buffer. Streams copy bytes through such a buffer.
const bufferSize = 32 << 10

func newBuffers() *buffers {
	return &buffers{sync.Pool{New: func() any {
		b := make([]byte, bufferSize)
		return &b
	}}}
}

func (b *buffers) get() *[]byte { return b.pool.Get().(*[]byte) }

func (b *buffers) put(buffer *[]byte) { b.pool.Put(buffer) }
