// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

const (
	// timeout is how long the kernel may take for one look at the table.
	timeout = 30 * time.Second
	// batch is how many deletions are sent at once.
	batch = 64
)

// end deletes the flows to any of places, all of one family, that are stale. It
// says how many it has looked at and deleted.
func end(ctx context.Context, netNS int, family api.Family, places []place, stale func(flow) bool) (seen, ended int, err error) {
	reader, err := dial(ctx, netNS)
	if err != nil {
		return 0, 0, err
	}
	defer reader.close()
	writer, err := dial(ctx, netNS)
	if err != nil {
		return 0, 0, err
	}
	defer writer.close()

	var gone [][]byte
	flush := func() error {
		n, err := writer.delete(gone)
		ended += n
		gone = gone[:0]
		return err
	}
	request := netlink.Message{
		Header: netlink.Header{Type: ctGet, Flags: netlink.Request | netlink.Dump},
		Data:   listing(family, places),
	}
	if _, err := reader.Send(request); err != nil {
		return 0, 0, fmt.Errorf("asking for connections: %w", err)
	}
	for m, err := range reader.ReceiveIter() {
		if err != nil {
			return seen, ended, fmt.Errorf("reading connections: %w", err)
		}
		if m.Header.Flags&netlink.DumpInterrupted != 0 {
			return seen, ended, errors.New("reading connections: the table changed its size meanwhile")
		}
		seen++
		if f, ok := parseFlow(m.Data); !ok || !stale(f) {
			continue
		}
		if gone = append(gone, deletion(m.Data)); len(gone) < batch {
			continue
		}
		if err := flush(); err != nil {
			return seen, ended, err
		}
	}
	return seen, ended, flush()
}

// conn is a netlink connection that ends with a context.
type conn struct {
	*netlink.Conn
	stop func() bool
}

func dial(ctx context.Context, netNS int) (*conn, error) {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: netNS})
	if err != nil {
		return nil, fmt.Errorf("connecting to netfilter: %w", err)
	}
	if err := c.SetDeadline(time.Now().Add(timeout)); err != nil {
		c.Close()
		return nil, fmt.Errorf("connecting to netfilter: %w", err)
	}
	return &conn{c, context.AfterFunc(ctx, func() { c.Close() })}, nil
}

func (c *conn) close() {
	if c.stop() {
		c.Close()
	}
}

// delete deletes entries and returns how many there were. One that is not there
// any more is fine.
func (c *conn) delete(entries [][]byte) (deleted int, err error) {
	if len(entries) == 0 {
		return 0, nil
	}
	messages := make([]netlink.Message, len(entries))
	for i, e := range entries {
		messages[i] = netlink.Message{Header: netlink.Header{Type: ctDelete, Flags: netlink.Request | netlink.Acknowledge}, Data: e}
	}
	if _, err := c.SendMessages(messages); err != nil {
		return 0, fmt.Errorf("deleting connections: %w", err)
	}
	for range messages {
		switch _, err := c.Receive(); {
		case err == nil:
			deleted++
		case !errors.Is(err, unix.ENOENT):
			return deleted, fmt.Errorf("deleting connections: %w", err)
		}
	}
	return deleted, nil
}
