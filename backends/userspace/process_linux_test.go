// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"golang.org/x/sys/unix"
)

// TestBackendProcess is not a test. It is the main function of a process with a backend.
// Tests run this process in a network namespace, and then stop or kill it.
func TestBackendProcess(t *testing.T) {
	if os.Getenv("KPNG_BACKEND_PROCESS") == "" {
		return
	}
	b, err := newBackend(settings{Options: Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}}, addresses: localRoutes{protocol: 107}})
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	var server netip.AddrPort
	if at := os.Getenv("KPNG_BACKEND_SERVER"); at != "" {
		server = netip.MustParseAddrPort(at)
	} else {
		server = namedServer(t, "a")
	}
	protocol := api.TCP
	if os.Getenv("KPNG_BACKEND_UDP") != "" {
		protocol, server = api.UDP, udpServer(t, "a")
	}
	var views []*api.View
	for _, addr := range strings.Fields(os.Getenv("KPNG_BACKEND_PROCESS")) {
		s := serviceAt("web-"+addr, addr, 80, protocol)
		if netip.MustParseAddr(addr).Is4() {
			s.addEndpoints(server)
		}
		views = append(views, s.view())
	}
	if err := b.Sync(t.Context(), fullOf(views...)); err != nil {
		t.Fatal(err)
	}
	fmt.Println("serving")
	io.Copy(io.Discard, os.Stdin)
	if err := b.Stop(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// backendProcess runs TestBackendProcess in n, with services at addrs. It returns when
// these services are programmed.
func backendProcess(t *testing.T, n *netnstest.Namespace, addrs ...string) (cmd *exec.Cmd, stdin io.Closer) {
	t.Helper()
	return backendProcessAs(t, n, os.Stderr, "exec \"$@\"", addrs...)
}

// backendProcessAs is like backendProcess, but it uses a shell command to start the
// process, and writes the log of the process to stderr.
func backendProcessAs(t *testing.T, n *netnstest.Namespace, stderr io.Writer, shell string, addrs ...string) (cmd *exec.Cmd, stdin io.Closer) {
	t.Helper()
	cmd = exec.Command("sh", "-c", shell, "sh", os.Args[0], "-test.run=^TestBackendProcess$")
	cmd.Env = append(os.Environ(), "KPNG_BACKEND_PROCESS="+strings.Join(addrs, " "))
	cmd.Stderr = stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "serving\n" {
		t.Fatalf("the process printed %q, error %v", line, err)
	}
	return cmd, stdin
}

// lockedBuffer is a buffer for concurrent writes and reads.
type lockedBuffer struct {
	mu     sync.Mutex
	buffer bytes.Buffer // not embedded, because io.Copy would call the method ReadFrom of bytes.Buffer without the lock
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.String()
}

// TestConnectionsWaitForFileDescriptors runs a backend with only 64 descriptors.
func TestConnectionsWaitForFileDescriptors(t *testing.T) {
	n := netnstest.New(t)
	log := &lockedBuffer{}
	// The server runs in this process and the backend in another one, so that the server
	// does not use descriptors of the backend.
	if err := n.Do(func() error {
		t.Setenv("KPNG_BACKEND_SERVER", namedServer(t, "a").String())
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	backendProcessAs(t, n, log, `ulimit -n 64 && exec "$@"`, "10.96.0.1")
	var clients []net.Conn
	dial := func() net.Conn {
		t.Helper()
		var c net.Conn
		if err := n.Do(func() (err error) {
			c, err = net.DialTimeout("tcp", "10.96.0.1:80", patience)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(2 * patience))
		return c
	}
	for range 60 {
		clients = append(clients, dial())
	}
	eventually(t, "the log reports a lack of descriptors", func() bool {
		return strings.Contains(log.String(), "Out of file descriptors")
	})
	last := dial()
	defer last.Close()
	for _, c := range clients {
		c.Close()
	}
	fmt.Fprintln(last, "hello")
	if line, err := bufio.NewReader(last).ReadString('\n'); line != "a hello\n" {
		t.Errorf("after other connections ended, the waiting one got the answer %q, error %v", line, err)
	}
}

// TestUDPClientsMakeRoomWhenPortsRunOut runs a backend on a host with 64 local ports.
func TestUDPClientsMakeRoomWhenPortsRunOut(t *testing.T) {
	n := netnstest.New(t)
	n.Set(t, "ipv4/ip_local_port_range=40000 40063")
	t.Setenv("KPNG_BACKEND_UDP", "yes")
	backendProcess(t, n, "10.96.0.1")
	for i := range 200 {
		var c *net.UDPConn
		if err := n.Do(func() (err error) {
			from := &net.UDPAddr{IP: net.IPv4(127, 1, 0, byte(i)), Port: 1000}
			c, err = net.DialUDP("udp", from, &net.UDPAddr{IP: net.IPv4(10, 96, 0, 1), Port: 80})
			return err
		}); err != nil {
			t.Fatal(err)
		}
		udpAsk(t, c)
		c.Close()
	}
}

func TestVanishedClientsAreDetected(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(namedServer(t, "a")).view())
	dial(t, "127.0.0.2", port).ask()
	at := socketAddr{api.TCP, netip.MustParseAddrPort(fmt.Sprintf("127.0.0.2:%d", port))}
	l := w.listenerAt(at).(*tcpListener)
	l.mu.Lock()
	defer l.mu.Unlock()
	for r := range l.relays {
		for name, c := range map[string]*net.TCPConn{"client": r.client, "endpoint": r.endpoint} {
			raw, err := c.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			for option, want := range map[int]int{unix.TCP_KEEPIDLE: 60, unix.TCP_KEEPINTVL: 15, unix.TCP_KEEPCNT: 4} {
				if err := onDescriptor(raw, func(fd int) error {
					on, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE)
					if err != nil || on != 1 {
						return fmt.Errorf("keep-alive %d, error %v", on, err)
					}
					got, err := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, option)
					if err != nil || got != want {
						return fmt.Errorf("keep-alive option %d is %d, want %d, error %v", option, got, want, err)
					}
					return nil
				}); err != nil {
					t.Errorf("connection to the %s: %v", name, err)
				}
			}
		}
	}
}
