// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/test/netns"
)

// namespace is a network namespace, by its name. It goes with its test.
type namespace string

func newNamespace(t testing.TB, name string) namespace {
	t.Helper()
	n := namespace(fmt.Sprintf("kpng-%d-%s", os.Getpid(), name))
	sh(t, "ip", "netns", "add", string(n))
	t.Cleanup(func() { sh(t, "ip", "netns", "del", string(n)) })
	n.ip(t, "link set lo up")
	return n
}

// sh runs a program and returns what it prints.
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

func (n namespace) ip(t testing.TB, command string) {
	t.Helper()
	sh(t, append([]string{"ip", "-n", string(n)}, strings.Fields(command)...)...)
}

// exec is the beginning of a command line that runs a program in the namespace.
func (n namespace) exec(args ...string) []string {
	return append([]string{"ip", "netns", "exec", string(n)}, args...)
}

// in calls f in the namespace. Sockets that f makes stay in it.
func (n namespace) in(f func() error) error { return netns.Named(string(n))(f) }

// join makes a link from an interface of a node to eth0 of another namespace.
func join(t testing.TB, node namespace, name, nodeAddr string, other namespace, addrs ...string) {
	t.Helper()
	sh(t, "ip", "link", "add", name, "netns", string(node), "type", "veth", "peer", "name", "eth0", "netns", string(other))
	node.ip(t, "link set "+name+" up")
	node.ip(t, "addr add "+nodeAddr+" dev "+name)
	other.ip(t, "link set eth0 up")
	for _, a := range addrs {
		other.ip(t, "addr add "+a+" dev eth0")
	}
	other.ip(t, "route add default via "+strings.Split(nodeAddr, "/")[0])
}

// client is a UDP client that keeps its port.
func (n namespace) client(t testing.TB, to string) net.Conn {
	t.Helper()
	var c net.Conn
	if err := n.in(func() (err error) { c, err = net.Dial("udp", to); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// ask returns who answers, empty if nobody does.
func ask(c net.Conn) string {
	c.SetDeadline(time.Now().Add(200 * time.Millisecond))
	if _, err := c.Write([]byte("?")); err != nil {
		return ""
	}
	buffer := make([]byte, 100)
	read, _ := c.Read(buffer)
	return string(buffer[:read])
}

// await polls until got returns want.
func await[T comparable](t testing.TB, what string, want T, got func() T) {
	t.Helper()
	last := got()
	for deadline := time.Now().Add(20 * time.Second); last != want && time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		last = got()
	}
	if last != want {
		t.Fatalf("%s: %v, want %v", what, last, want)
	}
}
