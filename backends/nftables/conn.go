// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// conn talks to nf_tables over netlink. It is for one goroutine at a time.
type conn struct {
	nl    *netlink.Conn // nil if the next request needs a new one
	netNS int
	table string
	seq   uint32
	buf   []byte
	// exchange sends a batch and waits for what the kernel says of it: once, which
	// is transactOnce, but in tests of what may go wrong.
	exchange func(batch []byte) error
	// transacted is told how each exchange ended.
	transacted func(error)
}

const (
	// socketBuffer bounds a transaction, which has to fit into one message to the
	// kernel: 64 MiB are a million elements.
	socketBuffer = 64 << 20
	// ackTimeout is how long the kernel may take to answer. It works while the
	// request is sent, so that only a lost answer takes any time.
	ackTimeout = 30 * time.Second
)

// errUnknownOutcome says that a transaction was sent, and no answer came.
var errUnknownOutcome = errors.New("no answer to a transaction")

// dial opens a connection in the network namespace of the file descriptor netNS, or
// in that of the calling thread if it is 0.
func dial(netNS int, table string) (*conn, error) {
	c := &conn{netNS: netNS, table: table, buf: make([]byte, 256<<10), transacted: func(error) {}}
	c.exchange = c.transactOnce
	return c, c.open()
}

func (c *conn) open() error {
	nl, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: c.netNS})
	if err != nil {
		return fmt.Errorf("opening a netlink socket: %w", err)
	}
	err = errors.Join(
		nl.SetWriteBuffer(socketBuffer),
		nl.SetReadBuffer(8<<20),
		nl.SetOption(netlink.CapAcknowledge, true),      // errors need not repeat what was asked,
		nl.SetOption(netlink.ExtendedAcknowledge, true), // but say what part of it they are about
	)
	if err != nil {
		nl.Close()
		return fmt.Errorf("setting up a netlink socket: %w", err)
	}
	c.nl = nl
	return nil
}

func (c *conn) close() error {
	if c.nl == nil {
		return nil
	}
	nl := c.nl
	c.nl = nil
	return nl.Close()
}

func (c *conn) wire() *wire { return &wire{table: c.table} }

// number gives the messages in b sequence numbers, and returns the first and
// the last of them and where the last but one begins.
func (c *conn) number(b []byte) (first, last uint32) {
	first = c.seq + 1
	for len(b) > 0 {
		c.seq++
		binary.NativeEndian.PutUint32(b[8:], c.seq)
		b = b[binary.NativeEndian.Uint32(b):]
	}
	return first, c.seq
}

// transact brings a batch into effect: all of it, or nothing if it returns an
// error other than errUnknownOutcome. What fails for want of memory, or because others
// change tables just now, is tried again. fill writes the batch's messages.
func (c *conn) transact(ctx context.Context, fill func(*wire)) error {
	w := c.wire()
	w.beginBatch()
	empty := len(w.b)
	if fill(w); len(w.b) == empty {
		return nil
	}
	w.endBatch()
	for attempt := 0; ; attempt++ {
		err := c.exchange(w.b)
		c.transacted(err)
		if !isTransient(err) || attempt == 5 {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w (%w)", err, context.Cause(ctx))
		case <-time.After(time.Millisecond << attempt):
		}
	}
}

// isTransient reports whether a transaction that failed with err may succeed if
// it is tried again as it is.
func isTransient(err error) bool {
	if errors.Is(err, errUnknownOutcome) {
		return false // it may have been done, and may not be done twice
	}
	return errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ENOMEM)
}

func (c *conn) transactOnce(b []byte) error {
	first, last := c.number(b)
	// One message has to be acknowledged: the last before the end of the batch. Failures
	// are told of any message, and, if the commit as a whole fails, of the first.
	begin, at := 0, 0
	for next := 0; next < len(b); next += int(binary.NativeEndian.Uint32(b[next:])) {
		begin, at = at, next
	}
	flags := binary.NativeEndian.Uint16(b[begin+6:])
	binary.NativeEndian.PutUint16(b[begin+6:], flags|unix.NLM_F_ACK)
	if err := c.send(b); err != nil {
		return err
	}

	var refused *failure
	acknowledged := false
	for !acknowledged {
		err := c.receive(func(h header, payload []byte) (done bool) {
			if h.seq < first || h.seq > last || h.msgType != unix.NLMSG_ERROR {
				return false
			}
			errno := unix.Errno(-int32(binary.NativeEndian.Uint32(payload)))
			if errno != 0 && refused == nil {
				refused = newFailure(b, h.seq, errno, h.flags, payload)
			}
			acknowledged = acknowledged || h.seq == last-1 || h.seq == first
			return false
		})
		if err != nil && refused == nil {
			return fmt.Errorf("%w: %w", errUnknownOutcome, err)
		}
		if err != nil {
			break
		}
	}
	if refused != nil {
		return refused
	}
	return nil
}

// send sends b, over a new socket if need be.
func (c *conn) send(b []byte) error {
	if c.nl == nil {
		if err := c.open(); err != nil {
			return err
		}
	}
	raw, err := c.nl.SyscallConn()
	if err != nil {
		return err
	}
	var sendErr error
	err = raw.Write(func(fd uintptr) bool {
		sendErr = unix.Sendto(int(fd), b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		return !errors.Is(sendErr, unix.EAGAIN)
	})
	if err := errors.Join(err, sendErr); err != nil {
		return os.NewSyscallError("sendto", err)
	}
	return nil
}

type header struct {
	msgType, flags uint16
	seq            uint32
}

// receive reads what the kernel sent at once, at least one message, and calls f
// with each.
func (c *conn) receive(f func(h header, payload []byte) (done bool)) error {
	raw, err := c.nl.SyscallConn()
	if err != nil {
		return err
	}
	if err := c.nl.SetReadDeadline(time.Now().Add(ackTimeout)); err != nil {
		return err
	}
	var n int
	var recvErr error
	err = raw.Read(func(fd uintptr) bool {
		n, _, recvErr = unix.Recvfrom(int(fd), c.buf, 0)
		return !errors.Is(recvErr, unix.EAGAIN) && !errors.Is(recvErr, unix.EINTR)
	})
	if err := errors.Join(err, recvErr); err != nil {
		return os.NewSyscallError("recvfrom", err)
	}
	for b := c.buf[:n]; len(b) >= unix.NLMSG_HDRLEN; {
		size := int(binary.NativeEndian.Uint32(b))
		if size < unix.NLMSG_HDRLEN || size > len(b) {
			return errors.New("a netlink message is cut off")
		}
		h := header{
			msgType: binary.NativeEndian.Uint16(b[4:]),
			flags:   binary.NativeEndian.Uint16(b[6:]),
			seq:     binary.NativeEndian.Uint32(b[8:]),
		}
		if f(h, b[unix.NLMSG_HDRLEN:size]) {
			return nil
		}
		b = b[min((size+3)&^3, len(b)):]
	}
	return nil
}

// errInterrupted says that somebody changed tables while one was read.
var errInterrupted = errors.New("tables changed while they were read")

// query sends one request, made with fill, and calls f with the payload of each
// answer behind its nfnetlink header. A request with flag NLM_F_DUMP has many.
func (c *conn) query(ctx context.Context, msg, flags uint16, fill func(*wire), f func(payload []byte)) error {
	w := c.wire()
	at := w.begin(nftMsg(int(msg)), flags|unix.NLM_F_ACK, unix.NFPROTO_INET, 0)
	fill(w)
	w.end(at)
	_, seq := c.number(w.b)
	if err := c.send(w.b); err != nil {
		return err
	}
	interrupted, done := false, false
	for !done {
		var failed error
		err := c.receive(func(h header, payload []byte) bool {
			if h.seq != seq {
				return false
			}
			interrupted = interrupted || h.flags&unix.NLM_F_DUMP_INTR != 0
			switch h.msgType {
			case unix.NLMSG_ERROR, unix.NLMSG_DONE:
				done = true
				if len(payload) >= 4 {
					if errno := unix.Errno(-int32(binary.NativeEndian.Uint32(payload))); errno != 0 {
						failed = &failure{errno: errno}
					}
				}
			default:
				f(payload[4:])
			}
			return done
		})
		if err := errors.Join(err, failed); err != nil {
			return err
		}
		if ctx.Err() != nil && !done {
			// A socket can only begin another dump when one has ended.
			c.close()
			return context.Cause(ctx)
		}
	}
	if interrupted {
		return errInterrupted
	}
	return nil
}

// list is query for all objects of a kind. If others change tables meanwhile it
// begins again, with restart, that many times.
func (c *conn) list(ctx context.Context, msg uint16, again int, restart func(), fill func(*wire), f func(payload []byte)) error {
	for attempt := 0; ; attempt++ {
		restart()
		err := c.query(ctx, msg, unix.NLM_F_DUMP, fill, f)
		if !errors.Is(err, errInterrupted) || attempt == again {
			return err
		}
	}
}

// dump calls f with each element of the map m. If others change tables
// meanwhile it begins again, with restart.
func (c *conn) dump(ctx context.Context, m mapID, restart func(), f func(element, foreign)) error {
	chains := map[string]string{}
	err := c.list(ctx, unix.NFT_MSG_GETSETELEM, 3, restart, func(w *wire) {
		w.string(unix.NFTA_SET_ELEM_LIST_TABLE, c.table)
		w.string(unix.NFTA_SET_ELEM_LIST_SET, m.name())
	}, func(payload []byte) { decodeElements(m, payload, chains, f) })
	// Where other tables change all the time no dump is ever undisturbed. That does not
	// make this one wrong: nobody but us should change this table.
	if err != nil && !errors.Is(err, errInterrupted) {
		return fmt.Errorf("reading %s: %w", m.name(), err)
	}
	return nil
}

// get returns what the element id has in the kernel, ok false if it is not there.
func (c *conn) get(ctx context.Context, id elementID) (e element, ok bool, err error) {
	err = c.query(ctx, unix.NFT_MSG_GETSETELEM, 0, func(w *wire) {
		w.string(unix.NFTA_SET_ELEM_LIST_TABLE, c.table)
		w.string(unix.NFTA_SET_ELEM_LIST_SET, id.m.name())
		list := w.nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		w.element(&element{elementID: id}, false)
		w.endNest(list)
	}, func(payload []byte) {
		decodeElements(id.m, payload, map[string]string{}, func(got element, not foreign) {
			// Asked for a range, the kernel also answers with one that contains it.
			if not == nil && got.elementID == id {
				e, ok = got, true
			}
		})
	})
	if errors.Is(err, unix.ENOENT) {
		return e, false, nil
	}
	if err != nil {
		return e, false, fmt.Errorf("reading %s: %w", id, err)
	}
	return e, ok, nil
}

// objectsAgain is how often chains, sets or rules are listed again.
const objectsAgain = 10

// chains returns the table's chains, and of each that has one where it is hooked, as
// the kernel encodes it.
func (c *conn) chains(ctx context.Context) (map[string][]byte, error) {
	var chains map[string][]byte
	err := c.list(ctx, unix.NFT_MSG_GETCHAIN, objectsAgain, func() { chains = map[string][]byte{} }, func(w *wire) {
		w.string(unix.NFTA_CHAIN_TABLE, c.table)
	}, func(payload []byte) {
		var table, name string
		var hook []byte
		attributes(payload, func(attr uint16, v []byte) {
			switch attr {
			case unix.NFTA_CHAIN_TABLE:
				table = cString(v)
			case unix.NFTA_CHAIN_NAME:
				name = cString(v)
			case unix.NFTA_CHAIN_HOOK, unix.NFTA_CHAIN_TYPE, unix.NFTA_CHAIN_POLICY:
				hook = append(hook, v...)
			}
		})
		if table == c.table {
			chains[name] = hook
		}
	})
	if err != nil {
		return nil, fmt.Errorf("listing the chains of table %s: %w", c.table, err)
	}
	return chains, nil
}

// sets returns the names of the table's maps and sets.
func (c *conn) sets(ctx context.Context) ([]string, error) {
	var names []string
	err := c.list(ctx, unix.NFT_MSG_GETSET, objectsAgain, func() { names = nil }, func(w *wire) {
		w.string(unix.NFTA_SET_TABLE, c.table)
	}, func(payload []byte) {
		attributes(payload, func(attr uint16, v []byte) {
			if attr == unix.NFTA_SET_NAME {
				names = append(names, cString(v))
			}
		})
	})
	if err != nil {
		return nil, fmt.Errorf("listing the sets of table %s: %w", c.table, err)
	}
	return names, nil
}

// rules calls f with the chain of each rule of the table, in order, and with the
// rule as the kernel encodes it.
func (c *conn) rules(ctx context.Context, restart func(), f func(chain string, expressions []byte)) error {
	err := c.list(ctx, unix.NFT_MSG_GETRULE, objectsAgain, restart, func(w *wire) {
		w.string(unix.NFTA_RULE_TABLE, c.table)
	}, func(payload []byte) {
		var chain string
		attributes(payload, func(attr uint16, v []byte) {
			switch attr {
			case unix.NFTA_RULE_CHAIN:
				chain = cString(v)
			case unix.NFTA_RULE_EXPRESSIONS:
				f(chain, v)
			}
		})
	})
	if err != nil {
		return fmt.Errorf("listing the rules of table %s: %w", c.table, err)
	}
	return nil
}

// exists reports whether the table is there, and whether it is awake: somebody may have
// switched it off.
func (c *conn) exists(ctx context.Context) (there, awake bool, err error) {
	var flags uint32
	err = c.query(ctx, unix.NFT_MSG_GETTABLE, 0, func(w *wire) {
		w.string(unix.NFTA_TABLE_NAME, c.table)
	}, func(payload []byte) {
		attributes(payload, func(attr uint16, v []byte) {
			if attr == unix.NFTA_TABLE_FLAGS && len(v) == 4 {
				flags = binary.BigEndian.Uint32(v)
			}
		})
	})
	if errors.Is(err, unix.ENOENT) {
		return false, false, nil
	}
	if err != nil {
		return false, false, fmt.Errorf("looking for table %s: %w", c.table, err)
	}
	return true, flags&unix.NFT_TABLE_F_DORMANT == 0, nil
}

// generation returns a number that is another one after any change of any table.
func (c *conn) generation(ctx context.Context) (id uint32, err error) {
	err = c.query(ctx, unix.NFT_MSG_GETGEN, 0, func(*wire) {}, func(payload []byte) {
		attributes(payload, func(attr uint16, v []byte) {
			if attr == unix.NFTA_GEN_ID && len(v) >= 4 {
				id = binary.BigEndian.Uint32(v)
			}
		})
	})
	if err != nil {
		return 0, fmt.Errorf("asking for the generation of tables: %w", err)
	}
	return id, nil
}

// deleteTable removes the table and all that is in it, if it is there.
func (c *conn) deleteTable(ctx context.Context) error {
	err := c.transact(ctx, func(w *wire) {
		at := w.begin(nftMsg(unix.NFT_MSG_DELTABLE), 0, unix.NFPROTO_INET, 0)
		w.string(unix.NFTA_TABLE_NAME, c.table)
		w.end(at)
	})
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("deleting table %s: %w", c.table, err)
	}
	return nil
}
