// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfilter

import (
	"encoding/binary"
	"errors"

	"golang.org/x/sys/unix"
)

// Failure is the error of a request that the kernel refused. The request had no effect.
type Failure struct {
	Errno unix.Errno
	// What describes the failed request, such as "making chain services". It may
	// be empty.
	What string
}

func (f *Failure) Error() string {
	reason := f.Errno.Error()
	switch f.Errno {
	case unix.ENFILE:
		reason = "the map is full"
	case unix.EPERM:
		reason += " (CAP_NET_ADMIN is missing)"
	}
	if f.What == "" {
		return reason
	}
	return f.What + ": " + reason
}

// Unwrap returns the error number.
func (f *Failure) Unwrap() error { return f.Errno }

var (
	// ErrUnknownOutcome means that a transaction got no answer. It may have taken effect.
	ErrUnknownOutcome = errors.New("no answer to a transaction")
	// ErrInterrupted means that the dumped objects changed during a dump: the tables of
	// the network namespace, or the connection-tracking table. Query has nevertheless
	// passed the whole answer to its caller.
	ErrInterrupted = errors.New("the dump was interrupted")
)

// IsTransient reports whether a retry may succeed: the kernel was short of memory or
// busy, or a dump was interrupted.
func IsTransient(err error) bool {
	if errors.Is(err, ErrUnknownOutcome) {
		return false // the transaction may have taken effect and must not be repeated
	}
	for _, errno := range []unix.Errno{unix.ENOBUFS, unix.EINTR, unix.EAGAIN, unix.ENOMEM} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return errors.Is(err, ErrInterrupted)
}

// errorOf returns the error number in a message of type NLMSG_ERROR or NLMSG_DONE, or 0
// if there is none.
func errorOf(payload []byte) unix.Errno {
	if len(payload) < 4 {
		return 0
	}
	return unix.Errno(-int32(binary.NativeEndian.Uint32(payload)))
}

// failure decodes an NLMSG_ERROR message, which consists of the header h and the payload.
// The failed request is one of the messages in batch.
func (c *Conn) failure(batch []byte, h header, payload []byte) *Failure {
	f := &Failure{Errno: errorOf(payload)}
	for len(batch) > 0 && binary.NativeEndian.Uint32(batch[8:]) != h.seq {
		batch = batch[binary.NativeEndian.Uint32(batch):]
	}
	if len(batch) == 0 {
		return f
	}
	offset := 0
	if h.flags&unix.NLM_F_ACK_TLVS != 0 && len(payload) > 20 {
		if v := Attribute(payload[20:], unix.NLMSGERR_ATTR_OFFS); len(v) == 4 {
			offset = int(binary.NativeEndian.Uint32(v))
		}
	}
	message := batch[:binary.NativeEndian.Uint32(batch)]
	f.What = c.Describe(binary.NativeEndian.Uint16(message[4:]), message[headersLen:], offset-headersLen)
	return f
}
