// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"net"

	"golang.org/x/net/ipv4"
)

// The struct datagrams reads and writes datagrams of a socket, several per system call.
// The socket may be of either IP family. Only one goroutine may read at a time.
type datagrams struct {
	c *ipv4.PacketConn
	// readLimit is the maximum number of datagrams that the next system call reads. It
	// depends on how many datagrams arrived recently, because it is expensive to prepare
	// unused buffers.
	readLimit int
}

func newDatagrams(c *net.UDPConn) datagrams { return datagrams{ipv4.NewPacketConn(c), 1} }

// The method read waits for datagrams, reads them, and returns their number.
func (d *datagrams) read(messages []ipv4.Message) (int, error) {
	n, err := d.c.ReadBatch(messages[:d.readLimit], 0)
	switch {
	case n == d.readLimit:
		d.readLimit = min(2*n, len(messages))
	case d.readLimit > 1 && n <= d.readLimit/4:
		d.readLimit /= 2
	}
	return n, err
}

// The method write writes all messages, unless an error occurs.
func (d *datagrams) write(messages []ipv4.Message) error {
	for len(messages) > 0 {
		n, err := d.c.WriteBatch(messages, 0)
		if err != nil {
			return err
		}
		messages = messages[n:]
	}
	return nil
}
