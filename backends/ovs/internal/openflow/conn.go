// SPDX-License-Identifier: Apache-2.0

package openflow

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"sync"
	"time"
)

// patience limits how long the switch may take to send or receive anything while it
// handles a request. Tests change it.
var patience = 30 * time.Second

// Conn is a connection to a switch. Its methods Watch, Flows, Groups, GroupCounts, Commit and Send must
// not be called concurrently. When one of these methods fails because of the connection,
// the connection is closed.
type Conn struct {
	net.Conn
	cookies Cookies
	// nextID is the ID of the next message.
	nextID uint32

	write sync.Mutex // held while a message is written
	in    chan message
	ended chan struct{} // closed when the connection is lost; then err is set
	err   error
	// changed gets a value when another connection has changed flows.
	changed chan struct{}
}

type message struct {
	kind byte
	id   uint32
	body []byte
}

// Dial connects to the management socket of a bridge. The methods Watch and Flows of the
// connection ignore flows whose cookies are not in the set.
func Dial(ctx context.Context, path string, cookies Cookies) (*Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	c := &Conn{Conn: conn, cookies: cookies, nextID: 1, in: make(chan message, 128), ended: make(chan struct{}), changed: make(chan struct{}, 1)}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	err = c.greet()
	if !stop() {
		err = context.Cause(ctx)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	go c.read(bufio.NewReaderSize(conn, 1<<16))
	return c, nil
}

// greet exchanges the first messages, by which both sides choose a version.
func (c *Conn) greet() error {
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	// A hello with the bitmap of supported versions.
	const bitmap = 1
	if err := c.writeMessage(typeHello, 0, []byte{0, bitmap, 0, 8, 0, 0, 0, 1 << version}); err != nil {
		return err
	}
	m, peer, err := readMessage(c)
	if err != nil {
		return fmt.Errorf("read hello: %w", err)
	}
	if m.kind != typeHello || !supports(m.body, peer) {
		return errors.New("the bridge does not accept OpenFlow 1.5: add OpenFlow15 to the column protocols of the bridge")
	}
	return c.SetDeadline(time.Time{})
}

// supports reports whether a hello with this body and this version in its header supports
// OpenFlow 1.5.
func supports(body []byte, peer byte) bool {
	const bitmap = 1
	for len(body) >= 8 {
		if size := int(binary.BigEndian.Uint16(body[2:])); binary.BigEndian.Uint16(body) != bitmap && size >= 4 && size <= len(body) {
			body = body[min((size+7)/8*8, len(body)):]
			continue
		}
		return binary.BigEndian.Uint32(body[4:])&(1<<version) != 0
	}
	return peer >= version
}

// readMessage reads a message. It also returns the version in its header.
func readMessage(r io.Reader) (m message, peer byte, err error) {
	var header [headerSize]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return m, 0, err
	}
	size := int(binary.BigEndian.Uint16(header[2:]))
	if size < headerSize {
		return m, 0, errTruncated
	}
	m = message{kind: header[1], id: binary.BigEndian.Uint32(header[4:]), body: make([]byte, size-headerSize)}
	_, err = io.ReadFull(r, m.body)
	return m, header[0], err
}

// read reads messages until the connection is lost.
func (c *Conn) read(r io.Reader) {
	for {
		m, _, err := readMessage(r)
		if err == nil && m.kind == typeEchoRequest {
			err = c.writeMessage(typeEchoReply, m.id, m.body)
		}
		if err != nil {
			c.err = fmt.Errorf("connection to the switch lost: %w", err)
			close(c.ended)
			c.Close()
			return
		}
		if m.kind == typeMultipartReply && m.id == 0 { // not an answer
			c.noteChanges(m.body)
			continue
		}
		switch m.kind {
		case typeError, typeMultipartReply, typeBarrierReply, typeBundleControl:
			select {
			case c.in <- m:
				continue
			default:
			}
			select {
			case c.in <- m:
			case <-time.After(patience): // no request waits for the message
			}
		}
	}
}

// noteChanges reads a message that the switch sends because flows have changed.
func (c *Conn) noteChanges(b []byte) {
	const (
		header, fixed = 8, 24 // the sizes of the header of the message, and of an entry
		abbreviated   = 4     // this connection has changed flows
		paused        = 5     // the switch pauses its reports of changes; 6 means that it resumes them
	)
	for b = b[min(header, len(b)):]; len(b) >= 4; {
		kind := binary.BigEndian.Uint16(b[2:])
		entry, rest, err := takeEntry(b, 4)
		if err != nil {
			return
		}
		b = rest
		if kind >= paused || kind < abbreviated && len(entry) >= fixed && c.cookies.contain(binary.BigEndian.Uint64(entry[16:])) {
			select {
			case c.changed <- struct{}{}:
			default:
			}
		}
	}
}

// Lost returns a channel that is closed when the connection is lost.
func (c *Conn) Lost() <-chan struct{} { return c.ended }

// Changed returns a channel. It gets a value after another connection has changed flows
// in the tables of [Conn.Watch].
func (c *Conn) Changed() <-chan struct{} { return c.changed }

func appendMessage(b []byte, kind byte, id uint32, body []byte) []byte {
	b = append(b, version, kind)
	b = binary.BigEndian.AppendUint16(b, uint16(headerSize+len(body)))
	b = binary.BigEndian.AppendUint32(b, id)
	return append(b, body...)
}

func (c *Conn) writeMessage(kind byte, id uint32, body []byte) error {
	return c.writeAll(appendMessage(nil, kind, id, body))
}

func (c *Conn) writeAll(b []byte) error {
	c.write.Lock()
	defer c.write.Unlock()
	for len(b) > 0 {
		if err := c.SetWriteDeadline(time.Now().Add(patience)); err != nil {
			return err
		}
		n, err := c.Write(b[:min(len(b), 1<<20)])
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// request sends messages and passes the answers to the function handle, until handle
// returns true. It ignores answers to earlier requests. If ctx ends or the switch hangs,
// request closes the connection, because the result is unknown.
func (c *Conn) request(ctx context.Context, first uint32, messages []byte, handle func(message) (done bool, err error)) (err error) {
	defer func() {
		if err != nil {
			c.Close()
			c.drain()
		}
	}()
	written := make(chan error, 1)
	go func() { written <- c.writeAll(messages) }()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for {
		select {
		case m := <-c.in:
			if m.id >= first {
				if done, err := handle(m); done || err != nil {
					return err
				}
			}
		case err := <-written:
			if err != nil {
				return fmt.Errorf("write to the switch: %w", err)
			}
			written = nil
		case <-c.ended:
			return c.err
		case <-timer.C:
			return fmt.Errorf("the switch has not answered for %s", patience)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		timer.Reset(patience)
	}
}

// drain ignores answers until the connection is lost.
func (c *Conn) drain() {
	for {
		select {
		case <-c.in:
		case <-c.ended:
			return
		}
	}
}

// ids returns the first of n unused message IDs. The switch has answered all earlier
// messages, so IDs may begin again. ID 0 is for messages that are not answers.
func (c *Conn) ids(n int) (first uint32) {
	if uint64(c.nextID)+uint64(n) > math.MaxUint32 {
		c.nextID = 1
	}
	first = c.nextID
	c.nextID += uint32(n)
	return first
}

// The kinds of multipart messages.
const (
	listFlows   = 1
	countGroups = 6
	listGroups  = 7
	watchFlows  = 16
)

// list sends requests of one kind. It calls parse for each part of each answer, with the
// index of the request.
func (c *Conn) list(ctx context.Context, kind byte, requests [][]byte, parse func(i int, b []byte) error) error {
	if len(requests) == 0 {
		return nil
	}
	first := c.ids(len(requests))
	var messages []byte
	for i, body := range requests {
		messages = appendMessage(messages, typeMultipartRequest, first+uint32(i), append([]byte{0, kind, 0, 0, 0, 0, 0, 0}, body...))
	}
	waiting := len(requests)
	return c.request(ctx, first, messages, func(m message) (done bool, err error) {
		i := int(m.id - first)
		switch {
		case m.kind == typeError && kind == countGroups && i < len(requests):
			waiting-- // there are no counters, which is no reason to lose the connection
			return waiting == 0, nil
		case m.kind == typeError:
			return true, decodeError(m.body)
		}
		if m.kind != typeMultipartReply || len(m.body) < 8 || i >= len(requests) {
			return true, fmt.Errorf("unexpected answer of type %d", m.kind)
		}
		const more = 1
		if m.body[3]&more == 0 {
			waiting--
		}
		return waiting == 0, parse(i, m.body[8:])
	})
}

// Flows lists the flows of a table, or of [AllTables].
func (c *Conn) Flows(ctx context.Context, table uint8) (flows []Flow, err error) {
	body := []byte{table, 0, 0, 0}
	for _, v := range []uint32{anyPort, anyGroup, 0} {
		body = binary.BigEndian.AppendUint32(body, v)
	}
	body = binary.BigEndian.AppendUint64(body, c.cookies.Value)
	body = binary.BigEndian.AppendUint64(body, c.cookies.Mask)
	body = appendMatch(body, "")
	err = c.list(ctx, listFlows, [][]byte{body}, func(_ int, b []byte) error {
		flows, err = parseFlows(flows, b)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list flows: %w", err)
	}
	return flows, nil
}

// Groups returns the groups with the given IDs that exist. It does not list all groups:
// Open vSwitch ends if it has to list a group of more than 64 KB, and groups of other
// programs may have any size.
func (c *Conn) Groups(ctx context.Context, ids []uint32) (groups []Group, err error) {
	err = c.list(ctx, listGroups, groupRequests(ids), func(i int, b []byte) error {
		if len(b) == 0 {
			return nil
		}
		g, err := parseGroup(b)
		if err != nil || g.ID != ids[i] {
			g = Group{ID: ids[i], Foreign: true}
		}
		groups = append(groups, g)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list groups: %w", err)
	}
	return groups, nil
}

func groupRequests(ids []uint32) [][]byte {
	requests := make([][]byte, len(ids))
	for i, id := range ids {
		requests[i] = binary.BigEndian.AppendUint64(nil, uint64(id)<<32)
	}
	return requests
}

// GroupCounts returns the number of packets that each bucket has got since its group was
// created or changed, in the order of the buckets. The numbers of a group that does not
// exist are nil.
func (c *Conn) GroupCounts(ctx context.Context, ids []uint32) ([][]uint64, error) {
	counts := make([][]uint64, len(ids))
	err := c.list(ctx, countGroups, groupRequests(ids), func(i int, b []byte) error {
		if len(b) > 0 {
			counts[i] = parseGroupCounts(ids[i], b)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read counters of groups: %w", err)
	}
	return counts, nil
}

// Watch makes [Conn.Changed] report changes of flows in tables. Open vSwitch supports this
// since version 3.0. Older versions answer with an [Error].
func (c *Conn) Watch(ctx context.Context, tables []uint8) error {
	const added, removed, modified = 1 << 1, 1 << 2, 1 << 3
	requests := make([][]byte, len(tables))
	for i, table := range tables {
		body := binary.BigEndian.AppendUint32(nil, uint32(table)) // the ID of the monitor
		body = binary.BigEndian.AppendUint32(body, anyPort)
		body = binary.BigEndian.AppendUint32(body, anyGroup)
		body = append(body, 0, added|removed|modified, table, 0)
		requests[i] = appendMatch(body, "")
	}
	if err := c.list(ctx, watchFlows, requests, func(int, []byte) error { return nil }); err != nil {
		return fmt.Errorf("watch flows: %w", err)
	}
	return nil
}

// decodeError returns the error in the body of an error message.
func decodeError(b []byte) error {
	if len(b) < 4 {
		return errTruncated
	}
	return Error{binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:])}
}

// Refused is the error of [Conn.Commit] if the switch refuses a message. Then the switch
// has executed no message of the bundle.
type Refused struct{ Cause error }

func (e *Refused) Error() string { return "the switch refused a change: " + e.Cause.Error() }

func (e *Refused) Unwrap() error { return e.Cause }

// Commit sends messages as one bundle. The switch executes them in order. Each packet is
// processed either in the state before the bundle or in the state after it. If the switch
// refuses a message, the result is a *Refused.
func (c *Conn) Commit(ctx context.Context, messages []Message) error {
	const openBundle, commit, discard, atomicAndOrdered = 0, 4, 6, 1 | 2
	n := uint32(len(messages))
	id := c.ids(len(messages) + 3) // the ID of the bundle and of its first message
	control := func(b []byte, message uint32, kind byte) []byte {
		body := binary.BigEndian.AppendUint32(nil, id)
		return appendMessage(b, typeBundleControl, message, append(body, 0, kind, 0, atomicAndOrdered))
	}
	size := 64
	for _, m := range messages {
		size += len(m.body) + 2*headerSize + 8
	}
	b := control(make([]byte, 0, size), id, openBundle)
	for i, m := range messages {
		inner := id + 1 + uint32(i)
		b = append(b, version, typeBundleAdd)
		b = binary.BigEndian.AppendUint16(b, uint16(2*headerSize+8+len(m.body)))
		b = binary.BigEndian.AppendUint32(b, inner)
		b = binary.BigEndian.AppendUint32(b, id)
		b = append(b, 0, 0, 0, atomicAndOrdered)
		b = appendMessage(b, m.kind, inner, m.body)
	}
	// Wait for the answer to a barrier before the commit. Otherwise, if the switch refuses
	// to add a message, the commit would execute the other messages.
	barrier, end := id+1+n, id+2+n
	refused := &Refused{}
	keepError := func(m message) {
		// The error of a message comes first. The error of the commit says less.
		if refused.Cause == nil {
			refused.Cause = decodeError(m.body)
		}
	}
	err := c.request(ctx, id, appendMessage(b, typeBarrierRequest, barrier, nil), func(m message) (done bool, err error) {
		if m.kind == typeError {
			keepError(m)
		}
		return m.id == barrier, nil
	})
	if err != nil {
		return err
	}
	kind := byte(commit)
	if refused.Cause != nil {
		kind = discard
	}
	err = c.request(ctx, id, control(nil, end, kind), func(m message) (done bool, err error) {
		if m.kind == typeError {
			keepError(m)
		}
		return m.id == end, nil
	})
	switch {
	case err != nil:
		return err
	case refused.Cause != nil:
		return refused
	default:
		return nil
	}
}

// Send sends messages and waits until the switch has processed them. Its result has the
// errors of all messages.
func (c *Conn) Send(ctx context.Context, messages ...Message) error {
	first := c.ids(len(messages) + 1)
	var b []byte
	for i, m := range messages {
		b = appendMessage(b, m.kind, first+uint32(i), m.body)
	}
	last := first + uint32(len(messages))
	b = appendMessage(b, typeBarrierRequest, last, nil)
	var errs []error
	err := c.request(ctx, first, b, func(m message) (done bool, err error) {
		if m.kind == typeError {
			errs = append(errs, decodeError(m.body))
		}
		return m.kind == typeBarrierReply && m.id == last, nil
	})
	return errors.Join(append(errs, err)...)
}
