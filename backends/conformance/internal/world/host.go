// SPDX-License-Identifier: Apache-2.0

//go:build linux

package world

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kpng-project/kpng/api"
)

// Host is a network namespace with what runs in it. It is safe for concurrent use.
type Host struct {
	Name string
	// Addrs are the addresses that others know it by.
	Addrs api.IPSet

	namespace *os.File
	// lastPort is the source port of the last UDP socket, see udpPort.
	lastPort atomic.Uint32
	servers  []interface{ Close() error }
}

// Addr returns the host's first address of a family.
func (h *Host) Addr(f api.Family) netip.Addr { return h.Addrs.Family(f)[0] }

// newHost makes a namespace in which only the loopback interface is up.
func newHost(name string) (*Host, error) {
	h := &Host{Name: name}
	err := onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("making network namespace %s: %w", name, err)
		}
		var err error
		h.namespace, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	if err != nil {
		return nil, err
	}
	return h, h.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return fmt.Errorf("finding the loopback interface of %s: %w", name, err)
		}
		if err := netlink.LinkSetUp(lo); err != nil {
			return fmt.Errorf("setting up the loopback interface of %s: %w", name, err)
		}
		// Nobody else is there to have the same address, and looking takes a second.
		return set("ipv6/conf/default/accept_dad=0", "ipv6/conf/all/accept_dad=0")
	})
}

// Do calls f with its thread in the namespace: sockets that f makes and processes
// that it starts are in it, and stay there. f must not leave its goroutine.
func (h *Host) Do(f func() error) error {
	return onThread(func() error { return h.enter(f) })
}

// Start starts a process in the namespace, to be killed should this process end
// before. The channel has the error of its end.
func (h *Host) Start(cmd *exec.Cmd) (<-chan error, error) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	started, ended := make(chan error, 1), make(chan error, 1)
	go func() {
		// That signal comes when the thread ends that started the process: it waits.
		err := onThread(func() error {
			err := h.enter(cmd.Start)
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

func (h *Host) enter(f func() error) error {
	if err := unix.Setns(int(h.namespace.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("entering network namespace %s: %w", h.Name, err)
	}
	return f()
}

// onThread calls f on a thread of its own, and brings that thread back to the
// namespace it came from.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			done <- fmt.Errorf("finding the thread's own namespace: %w", err)
			return
		}
		defer home.Close()
		err = f()
		// A thread that is not unlocked ends with its goroutine.
		if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

func (h *Host) close() {
	for _, s := range h.servers {
		s.Close()
	}
	h.namespace.Close()
}

// set writes settings of the kernel, each a path below /proc/sys/net and a value,
// for the namespace of the calling thread.
func set(settings ...string) error {
	for _, setting := range settings {
		path, value, _ := strings.Cut(setting, "=")
		if err := os.WriteFile("/proc/sys/net/"+path, []byte(value), 0); err != nil {
			return fmt.Errorf("setting %s: %w", setting, err)
		}
	}
	return nil
}
