// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"context"
	"net"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
)

// namespace is a network namespace that exists until its test ends.
type namespace struct{ *netnstest.Namespace }

func newNamespace(t testing.TB) namespace { return namespace{netnstest.New(t)} }

func sh(t testing.TB, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v (this test needs root, and the packages iproute2, nftables and util-linux)\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// join adds two connected interfaces: one in node, with the given name, and eth0 in the
// other namespace.
func join(t testing.TB, node namespace, name, nodeAddr string, other namespace, addrs ...string) {
	t.Helper()
	node.Join(t, name, other.Namespace, "eth0")
	node.Add(t, name, nodeAddr)
	for _, a := range addrs {
		other.Add(t, "eth0", a)
	}
	other.Route(t, "default", strings.Split(nodeAddr, "/")[0], "eth0")
}

// client returns a UDP client, which always sends from the same port.
func (n namespace) client(t testing.TB, to string) net.Conn {
	t.Helper()
	var c net.Conn
	if err := n.Do(func() (err error) { c, err = net.Dial("udp", to); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// ask sends a datagram. It returns the answer, which is a pod's name. If no answer
// arrives, it returns "".
func ask(c net.Conn) string {
	c.SetDeadline(time.Now().Add(200 * time.Millisecond))
	if _, err := c.Write([]byte("?")); err != nil {
		return ""
	}
	buffer := make([]byte, 100)
	read, _ := c.Read(buffer)
	return string(buffer[:read])
}

// await calls got until it returns want. The limit is a number of calls, and not a duration: on
// a slow machine, such as an emulated one that loads kernel modules, calls need more time, too.
func await[T comparable](t testing.TB, what string, want T, got func() T) {
	t.Helper()
	last := got()
	for calls := 1; last != want && calls < 10_000; time.Sleep(5 * time.Millisecond) {
		last = got()
		calls++
	}
	if last != want {
		t.Fatalf("%s: %v, want %v", what, last, want)
	}
}
