// SPDX-License-Identifier: Apache-2.0

//go:build linux

package world

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
)

// Ping sends an echo request and waits for the answer.
func (h *Host) Ping(ctx context.Context, to netip.Addr) error {
	network, request, reply := "ip4:icmp", byte(8), byte(0)
	if to.Is6() {
		network, request, reply = "ip6:ipv6-icmp", 128, 129
	}
	id := uint16(os.Getpid()) ^ uint16(h.lastPort.Add(1))
	message := []byte{request, 0, 0, 0, 0, 0, 0, 1}
	binary.BigEndian.PutUint16(message[4:], id)
	if to.Is4() { // the kernel computes the checksum for IPv6
		binary.BigEndian.PutUint16(message[2:], checksum(message))
	}
	var c net.Conn
	if err := h.Do(func() (err error) {
		c, err = (&net.Dialer{}).DialContext(ctx, network, to.String())
		return err
	}); err != nil {
		return fmt.Errorf("ping %s: %w", to, err)
	}
	defer c.Close()
	deadline, _ := ctx.Deadline()
	if err := c.SetDeadline(deadline); err != nil {
		return err
	}
	if _, err := c.Write(message); err != nil {
		return fmt.Errorf("ping %s: %w", to, err)
	}
	for buffer := make([]byte, 1500); ; {
		n, err := c.Read(buffer)
		if err != nil {
			return fmt.Errorf("ping %s: %w", to, err)
		}
		answer := buffer[:n]
		if n > 0 && answer[0]>>4 == 4 && to.Is4() { // the IPv4 answer includes the IP header
			answer = answer[int(answer[0]&15)*4:]
		}
		if len(answer) >= 8 && answer[0] == reply && binary.BigEndian.Uint16(answer[4:]) == id {
			return nil
		}
	}
}

// checksum returns the Internet checksum (RFC 1071). The length of b must be even.
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
