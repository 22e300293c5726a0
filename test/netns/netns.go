// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package netns serves tests that have network namespaces.
package netns

import (
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// Place calls a function in a network namespace. Sockets that it makes stay there.
type Place func(f func() error) error

// Named is the namespace that `ip netns` knows by a name.
func Named(name string) Place {
	return func(f func() error) error {
		done := make(chan error)
		go func() {
			runtime.LockOSThread() // for good: the thread ends with this goroutine
			done <- func() error {
				file, err := os.Open("/run/netns/" + name)
				if err != nil {
					return err
				}
				defer file.Close()
				if err := unix.Setns(int(file.Fd()), unix.CLONE_NEWNET); err != nil {
					return fmt.Errorf("entering namespace %s: %w", name, err)
				}
				return f()
			}()
		}()
		return <-done
	}
}

// Listen listens on TCP there until the test ends, and has handle handle
// connections, which it need not close.
func (p Place) Listen(t testing.TB, address string, handle func(net.Conn)) {
	t.Helper()
	var l net.Listener
	if err := p(func() (err error) { l, err = net.Listen("tcp", address); return err }); err != nil {
		t.Fatal(err)
	}
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

// Relay makes a server of the test's own namespace reachable at an address there.
func (p Place) Relay(t testing.TB, address, network, server string) {
	t.Helper()
	p.Listen(t, address, func(c net.Conn) {
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

// Answer answers each UDP packet that comes there with a name until the test ends.
func (p Place) Answer(t testing.TB, address, name string) {
	t.Helper()
	var c net.PacketConn
	if err := p(func() (err error) { c, err = net.ListenPacket("udp", address); return err }); err != nil {
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
