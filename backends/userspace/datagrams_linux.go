// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"net"

	"golang.org/x/net/ipv4"
)

// datagrams reads and writes datagrams of a socket of either family, several per system
// call. Only one goroutine may read at a time.
type datagrams struct {
	c *ipv4.PacketConn
	// expected is the number of datagrams that the next system call may read. It follows the
	// number of arriving datagrams, because preparing unused buffers is expensive.
	expected int
}

func newDatagrams(c *net.UDPConn) datagrams { return datagrams{ipv4.NewPacketConn(c), 1} }

// read waits for a datagram and reads all available ones.
func (d *datagrams) read(messages []ipv4.Message) (int, error) {
	n, err := d.c.ReadBatch(messages[:d.expected], 0)
	switch {
	case n == d.expected:
		d.expected = min(2*n, len(messages))
	case d.expected > 1 && n <= d.expected/4:
		d.expected /= 2
	}
	return n, err
}

// write writes all messages. It stops at the first error.
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
