// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfilter

import (
	"encoding/binary"
	"slices"

	"golang.org/x/sys/unix"
)

// Builder encodes a sequence of netlink messages. The zero value is empty.
type Builder struct{ b []byte }

// headersLen is the length of the two headers of a message.
const headersLen = unix.NLMSG_HDRLEN + 4

// Encoded returns the encoded messages. A call of another method makes the slice invalid.
func (w *Builder) Encoded() []byte { return w.b }

// Len returns the length of the encoded messages in octets.
func (w *Builder) Len() int { return len(w.b) }

// Grow makes room for n more octets.
func (w *Builder) Grow(n int) { w.b = slices.Grow(w.b, n) }

// Begin starts a message, and returns the argument for End. The upper octet of msgType is
// the subsystem.
func (w *Builder) Begin(msgType, flags uint16, family byte) int {
	at := len(w.b)
	w.b = append(w.b, 0, 0, 0, 0) // length, set by End
	w.b = binary.NativeEndian.AppendUint16(w.b, msgType)
	w.b = binary.NativeEndian.AppendUint16(w.b, flags|unix.NLM_F_REQUEST)
	w.b = append(w.b, 0, 0, 0, 0, 0, 0, 0, 0) // sequence number, set by Conn.setSequenceNumbers, and netlink port
	w.b = append(w.b, family, unix.NFNETLINK_V0, 0, 0)
	return at
}

// End ends a message.
func (w *Builder) End(at int) { binary.NativeEndian.PutUint32(w.b[at:], uint32(len(w.b)-at)) }

// beginBatch starts a sequence of nf_tables messages that take effect together, and
// endBatch ends it. The kernel refuses the sequence with ERESTART unless the argument
// generation is 0 or the number of the kernel's last transaction.
func (w *Builder) beginBatch(generation uint32) { w.batch(unix.NFNL_MSG_BATCH_BEGIN, generation) }
func (w *Builder) endBatch()                    { w.batch(unix.NFNL_MSG_BATCH_END, 0) }

func (w *Builder) batch(msgType uint16, generation uint32) {
	at := w.Begin(msgType, 0, unix.AF_UNSPEC)
	binary.BigEndian.PutUint16(w.b[at+headersLen-2:], unix.NFNL_SUBSYS_NFTABLES)
	if generation != 0 {
		w.Uint32(unix.NFNL_BATCH_GENID, generation)
	}
	w.End(at)
}

// Nest starts a nested attribute. It returns the argument for EndNest.
func (w *Builder) Nest(attr uint16) int {
	at := len(w.b)
	w.header(attr|unix.NLA_F_NESTED, 0)
	return at
}

// EndNest ends a nested attribute.
func (w *Builder) EndNest(at int) { binary.NativeEndian.PutUint16(w.b[at:], uint16(len(w.b)-at)) }

// header encodes the header of an attribute with n octets of data.
func (w *Builder) header(attr uint16, n int) {
	w.b = binary.NativeEndian.AppendUint16(w.b, uint16(attrHeader+n))
	w.b = binary.NativeEndian.AppendUint16(w.b, attr)
}

// Raw appends octets that are already encoded.
func (w *Builder) Raw(v []byte) { w.b = append(w.b, v...) }

// Bytes encodes an attribute with any data.
func (w *Builder) Bytes(attr uint16, v ...byte) {
	w.header(attr, len(v))
	w.b = append(w.b, v...)
	w.pad()
}

// String encodes an attribute that is a string.
func (w *Builder) String(attr uint16, s string) {
	w.header(attr, len(s)+1)
	w.b = append(w.b, s...)
	w.b = append(w.b, 0)
	w.pad()
}

// Uint32 encodes an attribute that is a number in network byte order.
func (w *Builder) Uint32(attr uint16, v uint32) {
	w.header(attr, 4)
	w.b = binary.BigEndian.AppendUint32(w.b, v)
}

func (w *Builder) pad() {
	for len(w.b)%4 != 0 {
		w.b = append(w.b, 0)
	}
}
