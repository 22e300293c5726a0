// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfilter

import (
	"context"
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// Check calls fill to encode messages, and sends them as an nf_tables transaction without
// an end. The kernel checks such a transaction and then discards it. For each message, in
// order, Check calls f with the kernel's error or nil. If Check itself returns an error,
// the kernel has checked no message, for example because it has no nf_tables.
func (c *Conn) Check(ctx context.Context, fill func(*Builder), f func(error)) error {
	var w Builder
	w.beginBatch(0)
	begin := w.Len()
	fill(&w)
	for b := w.b[begin:]; len(b) > 0; b = b[binary.NativeEndian.Uint32(b):] {
		requestAck(b)
	}
	first, last := c.setSequenceNumbers(w.b)
	if err := c.send(w.b); err != nil {
		return err
	}
	for next := first + 1; next <= last; {
		var refused error
		err := c.receive(func(h header, payload []byte) {
			switch {
			case h.msgType != unix.NLMSG_ERROR || h.seq != first && h.seq != next:
			case h.seq == first && errorOf(payload) != 0:
				refused = c.failure(w.b, h, payload)
			case h.seq == first: // ignored: some kernels acknowledge the message that begins a transaction
			case errorOf(payload) != 0:
				next++
				f(c.failure(w.b, h, payload))
			default:
				next++
				f(nil)
			}
		})
		if err != nil {
			return err
		}
		if refused != nil {
			return refused
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	return nil
}
