// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package userspace

import (
	"net"

	"golang.org/x/net/ipv4"
)

// The struct datagrams reads and writes the datagrams of a socket.
type datagrams struct{ c *net.UDPConn }

func newDatagrams(c *net.UDPConn) datagrams { return datagrams{c} }

func (d *datagrams) read(messages []ipv4.Message) (int, error) {
	n, addr, err := d.c.ReadFromUDP(messages[0].Buffers[0])
	messages[0].N, messages[0].Addr = n, addr
	return 1, err
}

// The method write writes all messages, unless an error occurs.
func (d *datagrams) write(messages []ipv4.Message) error {
	for i := range messages {
		var err error
		if m := &messages[i]; m.Addr == nil {
			_, err = d.c.Write(m.Buffers[0])
		} else {
			_, err = d.c.WriteTo(m.Buffers[0], m.Addr)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
