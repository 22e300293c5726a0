// SPDX-License-Identifier: Apache-2.0

package netnstest

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Place calls a function in a network namespace, like Namespace.Do.
type Place = func(f func() error) error

// Listen listens on TCP in a namespace until the test ends. It calls handle for each
// connection, and then closes the connection.
func Listen(t testing.TB, in Place, address string, handle func(net.Conn)) {
	t.Helper()
	var l net.Listener
	if err := in(func() (err error) { l, err = net.Listen("tcp", address); return err }); err != nil {
		t.Fatal(err)
	}
	Accept(t, l, handle)
}

// Accept calls handle for each connection, and then closes the connection, until the test
// ends.
func Accept(t testing.TB, l net.Listener, handle func(net.Conn)) {
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				handle(c)
			}()
		}
	}()
}

// Relay listens at an address in a namespace, and forwards connections to a server in the
// namespace of the test process.
func Relay(t testing.TB, in Place, address, network, server string) {
	t.Helper()
	Listen(t, in, address, func(c net.Conn) {
		s, err := net.Dial(network, server)
		if err != nil {
			return
		}
		defer s.Close()
		go func() {
			defer s.Close()
			io.Copy(s, c)
		}()
		io.Copy(c, s)
	})
}

// Answer replies to UDP packets at an address in a namespace until the test ends. Each
// reply contains the text in name.
func Answer(t testing.TB, in Place, address, name string) {
	t.Helper()
	var c net.PacketConn
	if err := in(func() (err error) { c, err = net.ListenPacket("udp", address); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	go func() {
		buffer := make([]byte, 1<<16)
		for {
			_, from, err := c.ReadFrom(buffer)
			if err != nil {
				return
			}
			c.WriteTo([]byte(name), from)
		}
	}()
}

// Send sends UDP packets from one socket in a place to an address. A packet may be lost
// if an earlier packet was refused.
func Send(t testing.TB, in Place, address string, packets int) {
	t.Helper()
	err := in(func() error {
		c, err := net.Dial("udp", address)
		if err != nil {
			return err
		}
		defer c.Close()
		for range packets {
			c.Write([]byte("a"))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TimeConnect opens a TCP connection to an IPv4 address, in the network namespace of the
// calling thread. It returns the duration of the connection attempt.
func TimeConnect(to unix.Sockaddr) (time.Duration, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	// Close with a reset, so that the closed connection occupies no local port.
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		return 0, err
	}
	begin := time.Now()
	for {
		err := unix.Connect(fd, to)
		if errors.Is(err, unix.EINTR) {
			continue // a signal of Go's scheduler interrupted the call
		}
		if errors.Is(err, unix.EISCONN) {
			err = nil
		}
		return time.Since(begin), err
	}
}
