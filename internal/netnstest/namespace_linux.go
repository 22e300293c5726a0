// SPDX-License-Identifier: Apache-2.0

// Package netnstest makes network namespaces for tests. It needs root. The namespaces
// have no names, so the kernel removes them even if a test is killed.
package netnstest

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Namespace is a network namespace. It is safe for concurrent use.
type Namespace struct {
	// FD is the file descriptor of the namespace.
	FD int
	// Links configures interfaces, addresses and routes in the namespace.
	Links *netlink.Handle
	// Cgroup is the cgroup of the functions and processes that run in the namespace. If
	// Cgroup is nil, the functions and processes stay in the cgroup of the test process.
	Cgroup *Cgroup
}

// Make makes a namespace. Its only interface is a loopback interface, which is up.
func Make() (*Namespace, error) {
	n := &Namespace{FD: -1}
	if err := onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make network namespace (needs root): %w", err)
		}
		fd, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		n.FD = fd
		return err
	}); err != nil {
		return nil, err
	}
	links, err := netlink.NewHandleAt(netns.NsHandle(n.FD))
	if err != nil {
		unix.Close(n.FD)
		return nil, fmt.Errorf("open netlink in network namespace: %w", err)
	}
	n.Links = links
	// Disable duplicate address detection. It takes a second, and no other host can have
	// the same address.
	err = n.Sysctl("ipv6/conf/default/accept_dad=0", "ipv6/conf/all/accept_dad=0")
	if err == nil {
		err = links.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 1}}) // lo
	}
	if err != nil {
		n.Close()
		return nil, err
	}
	return n, nil
}

// New makes a namespace that exists until the test ends.
func New(t testing.TB) *Namespace {
	t.Helper()
	NeedRoot(t)
	n, err := Make()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Close)
	return n
}

// Close releases the namespace. The kernel removes the namespace when no socket and no
// process uses it.
func (n *Namespace) Close() {
	n.Links.Close()
	unix.Close(n.FD)
}

// Do calls f on a thread that is in the namespace. Sockets and processes of f stay in the
// namespace. The function f must not start goroutines, because they would run outside the
// namespace.
func (n *Namespace) Do(f func() error) error {
	return onThread(func() error { return n.enter(f) })
}

// Start starts a process in the namespace. The kernel kills the started process if the
// test process ends first. The channel receives the result of cmd.Wait.
func (n *Namespace) Start(cmd *exec.Cmd) (<-chan error, error) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &unix.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = unix.SIGKILL
	started, ended := make(chan error, 1), make(chan error, 1)
	go func() {
		// The kernel sends Pdeathsig when the thread that started the process ends, so
		// the thread waits for the process.
		err := onThread(func() error {
			err := n.enter(cmd.Start)
			started <- err
			if err != nil {
				return nil
			}
			return cmd.Wait()
		})
		ended <- err
	}()
	return ended, <-started
}

// Command returns a command line that runs a program in the namespace. Use it for code
// that starts programs itself.
func (n *Namespace) Command(args ...string) []string {
	return append([]string{"nsenter", fmt.Sprintf("--net=/proc/%d/fd/%d", os.Getpid(), n.FD), "--"}, args...)
}

// Program returns the path of a program. It searches PATH, and then the folders of Linux
// programs, so that tests can run with an empty PATH. If Program finds nothing, it returns
// name.
func Program(name string) string {
	for _, path := range []string{name, "/usr/sbin/" + name, "/usr/bin/" + name, "/sbin/" + name, "/bin/" + name} {
		if found, err := exec.LookPath(path); err == nil {
			return found
		}
	}
	return name
}

// Run runs a program in the namespace for at most a minute and returns its output.
func (n *Namespace) Run(t testing.TB, args ...string) string {
	t.Helper()
	return n.RunWith(t, "", args...)
}

// RunWith is like Run, but also writes stdin to the program's standard input.
func (n *Namespace) RunWith(t testing.TB, stdin string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, Program(args[0]), args[1:]...)
	cmd.Stdin = strings.NewReader(stdin)
	var out []byte
	if err := n.Do(func() (err error) { out, err = cmd.CombinedOutput(); return err }); err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

func (n *Namespace) enter(f func() error) error {
	if err := unix.Setns(n.FD, unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace: %w", err)
	}
	if n.Cgroup != nil {
		return n.Cgroup.do(f)
	}
	return f()
}

// onThread calls f on a separate thread, and then moves the thread back to its original
// network namespace.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			done <- fmt.Errorf("open the thread's namespace: %w", err)
			return
		}
		defer home.Close()
		err = f()
		// If Setns fails, the goroutine ends without unlocking the thread, so the thread ends,
		// too.
		if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// Sysctl sets kernel settings. Each setting is a path below /proc/sys/net and a value,
// for example ipv4/ip_forward=1.
func (n *Namespace) Sysctl(settings ...string) error {
	return n.Do(func() error {
		for _, setting := range settings {
			path, value, _ := strings.Cut(setting, "=")
			if err := os.WriteFile("/proc/sys/net/"+path, []byte(value), 0); err != nil {
				return fmt.Errorf("set %s: %w", setting, err)
			}
		}
		return nil
	})
}

// Set calls Sysctl and fails the test after an error.
func (n *Namespace) Set(t testing.TB, settings ...string) {
	t.Helper()
	if err := n.Sysctl(settings...); err != nil {
		t.Fatal(err)
	}
}

// Up sets the named interface up.
func (n *Namespace) Up(t testing.TB, name string) {
	t.Helper()
	if err := n.Links.LinkSetUp(n.link(t, name)); err != nil {
		t.Fatalf("interface %s: %v", name, err)
	}
}

// Join connects two namespaces by a pair of interfaces. The argument name is the name of
// the interface in n, and the argument peer is the name of the interface in o. Both
// interfaces are up.
func (n *Namespace) Join(t testing.TB, name string, o *Namespace, peer string) {
	t.Helper()
	if err := n.Links.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: peer, PeerNamespace: netlink.NsFd(o.FD),
	}); err != nil {
		t.Fatalf("link from %s to %s: %v", name, peer, err)
	}
	n.Up(t, name)
	o.Up(t, peer)
}

// Stub adds an interface that is not connected to another namespace.
func (n *Namespace) Stub(t testing.TB, name string) {
	t.Helper()
	n.Join(t, name, n, name+"-end")
}

// Add adds an address to an interface, for example 10.0.0.1/24 or 10.0.0.1. The address
// is usable immediately.
func (n *Namespace) Add(t testing.TB, name, addr string) {
	t.Helper()
	a := parseAddr(t, addr)
	a.Flags = unix.IFA_F_NODAD // skip the kernel's check for duplicate addresses
	if err := n.Links.AddrAdd(n.link(t, name), a); err != nil {
		t.Fatalf("address %s of %s: %v", addr, name, err)
	}
}

// Remove removes an address from an interface.
func (n *Namespace) Remove(t testing.TB, name, addr string) {
	t.Helper()
	if err := n.Links.AddrDel(n.link(t, name), parseAddr(t, addr)); err != nil {
		t.Fatalf("address %s of %s: %v", addr, name, err)
	}
}

// Route adds a route over an interface. The destination may be "default". The gateway may
// be empty.
func (n *Namespace) Route(t testing.TB, destination, gateway, name string) {
	t.Helper()
	route := &netlink.Route{LinkIndex: n.link(t, name).Attrs().Index}
	if gateway == "" {
		route.Scope = netlink.SCOPE_LINK
	} else {
		route.Gw = parseAddr(t, gateway).IP
	}
	if destination != "default" {
		route.Dst = parseAddr(t, destination).IPNet
	}
	if err := n.Links.RouteReplace(route); err != nil {
		t.Fatalf("route to %s by %s: %v", destination, name, err)
	}
}

func (n *Namespace) link(t testing.TB, name string) netlink.Link {
	t.Helper()
	link, err := n.Links.LinkByName(name)
	if err != nil {
		t.Fatalf("interface %s: %v", name, err)
	}
	return link
}

func parseAddr(t testing.TB, s string) *netlink.Addr {
	t.Helper()
	if ip, err := netip.ParseAddr(s); err == nil {
		s = netip.PrefixFrom(ip, ip.BitLen()).String()
	}
	addr, err := netlink.ParseAddr(s)
	if err != nil {
		t.Fatal(err)
	}
	return addr
}

// Shadow replaces a program, for the test and the processes that the test starts. The
// replacement records each call, and runs the program in the namespace. The returned function
// returns the arguments of the calls that were recorded since it was last called. While the file
// with the name in fail exists, the replacement fails and does nothing.
func (n *Namespace) Shadow(t testing.TB, program string) (calls func() []string, fail string) {
	t.Helper()
	dir := t.TempDir()
	log, fail := filepath.Join(dir, "log"), filepath.Join(dir, "fail")
	script := fmt.Sprintf("#!/bin/sh\nprintf '%%s\\0' \"$*\" >>%s\n[ ! -e %s ] || exit 1\nexec %s \"$@\"\n",
		log, fail, strings.Join(n.Command(Program(program)), " "))
	if err := os.WriteFile(filepath.Join(dir, program), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	return func() []string {
		text, err := os.ReadFile(log)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		os.Remove(log)
		return strings.FieldsFunc(string(text), func(r rune) bool { return r == 0 })
	}, fail
}
