// SPDX-License-Identifier: Apache-2.0

// Package ovstest runs Open vSwitch in tests.
package ovstest

import (
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
)

var datapath = flag.String("datapath", "netdev", "the `type` of the datapath of Open vSwitch: netdev is in user space, system in the kernel")

// Bridge is the name of the bridge of a Switch.
const Bridge = "br-kpng"

// Switch is a separate instance of ovsdb-server and ovs-vswitchd in a network namespace.
type Switch struct {
	// Dir is the directory of the sockets of both programs.
	Dir string
	// Daemon is the ovs-vswitchd. It is nil after Kill.
	Daemon *os.Process

	// start starts a process in the network namespace.
	start func(*exec.Cmd) (<-chan error, error)
	ended <-chan error
}

// New starts a switch with a bridge. The switch ends with the test. The function start,
// such as [netnstest.Namespace.Start], starts a process in a network namespace.
func New(t testing.TB, start func(*exec.Cmd) (<-chan error, error)) *Switch {
	t.Helper()
	dir, err := os.MkdirTemp("", "ovs") // the paths of sockets must be short
	if err != nil {
		t.Fatal(err)
	}
	s := &Switch{Dir: dir, start: start}
	database := filepath.Join(dir, "conf.db")
	s.Run(t, "ovsdb-tool", "create", database, "/usr/share/openvswitch/vswitch.ovsschema")
	server := s.command("ovsdb-server", database, "--remote=punix:"+s.Database(), "--pidfile="+filepath.Join(dir, "db.pid"))
	serverEnded, err := start(server)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Kill()
		server.Process.Kill()
		<-serverEnded
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	Await(t, "the database server", func() bool {
		c, err := net.Dial("unix", s.Database()) // the server may not listen yet although the socket exists
		if err != nil {
			return false
		}
		return c.Close() == nil
	})
	s.Vsctl(t, "--no-wait", "init")
	s.Vsctl(t, "--no-wait", "add-br", Bridge, "--", "set", "bridge", Bridge, "datapath_type="+*datapath, "fail_mode=secure")
	s.StartDaemon(t)
	return s
}

// Database returns the path of the database server's socket.
func (s *Switch) Database() string { return filepath.Join(s.Dir, "db.sock") }

// management returns the path of the bridge's management socket.
func (s *Switch) management() string { return filepath.Join(s.Dir, Bridge+".mgmt") }

func (s *Switch) command(args ...string) *exec.Cmd {
	cmd := exec.Command(netnstest.Program(args[0]), args[1:]...)
	cmd.Env = append(os.Environ(), "OVS_RUNDIR="+s.Dir, "OVS_LOGDIR="+s.Dir, "OVS_DBDIR="+s.Dir)
	return cmd
}

// StartDaemon starts ovs-vswitchd and waits until it has configured the bridge.
func (s *Switch) StartDaemon(t testing.TB) {
	t.Helper()
	cmd := s.command("ovs-vswitchd", "unix:"+s.Database(), "--pidfile", "-vconsole:off", "--log-file")
	ended, err := s.start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	s.Daemon, s.ended = cmd.Process, ended
	Await(t, "the bridge", func() bool { _, err := os.Stat(s.management()); return err == nil })
	s.Vsctl(t, "get", "bridge", Bridge, "datapath_id")
}

// Kill kills ovs-vswitchd, if it runs.
func (s *Switch) Kill() {
	if s.Daemon == nil {
		return
	}
	s.Daemon.Kill()
	<-s.ended
	s.Daemon = nil
	os.Remove(s.management())
}

// Run runs a program of Open vSwitch and returns its output.
func (s *Switch) Run(t testing.TB, args ...string) string {
	t.Helper()
	return s.runWith(t, "", args...)
}

func (s *Switch) runWith(t testing.TB, stdin string, args ...string) string {
	t.Helper()
	cmd := s.command(args...)
	cmd.Stdin = strings.NewReader(stdin)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	ended, err := s.start(cmd)
	if err == nil {
		err = <-ended
	}
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out.String())
	}
	return out.String()
}

// Vsctl runs ovs-vsctl. It waits until a change of the configuration has taken effect.
func (s *Switch) Vsctl(t testing.TB, args ...string) string {
	t.Helper()
	return s.Run(t, append([]string{"ovs-vsctl", "--db=unix:" + s.Database()}, args...)...)
}

// Ofctl runs ovs-ofctl with a command and arguments after the name of the bridge.
func (s *Switch) Ofctl(t testing.TB, command string, args ...string) string {
	t.Helper()
	return s.OfctlWith(t, "", command, args...)
}

// OfctlWith is like Ofctl, but also passes a standard input.
func (s *Switch) OfctlWith(t testing.TB, stdin, command string, args ...string) string {
	t.Helper()
	return s.runWith(t, stdin, append([]string{"ovs-ofctl", "-OOpenFlow15", command, "unix:" + s.management()}, args...)...)
}

// Flows returns all flows of the bridge without statistics.
func (s *Switch) Flows(t testing.TB) string {
	t.Helper()
	return s.Run(t, "ovs-ofctl", "-OOpenFlow15", "--no-stats", "--no-names", "--sort", "dump-flows", "unix:"+s.management())
}

var bucketID = regexp.MustCompile(`bucket_id:[0-9]+,`)

// Listing returns all flows and groups of the bridge without statistics and IDs of buckets,
// in a definite order.
func (s *Switch) Listing(t testing.TB) string {
	t.Helper()
	lines := strings.Split(s.Flows(t), "\n")
	slices.Sort(lines) // the order of flows with the same priority may change
	groups := strings.Split(bucketID.ReplaceAllString(s.Ofctl(t, "dump-groups"), ""), "\n")
	for i, group := range groups {
		buckets := strings.Split(group, ",bucket=")
		slices.Sort(buckets[1:]) // their order has no effect
		groups[i] = strings.Join(buckets, ",bucket=")
	}
	slices.Sort(groups)
	return strings.Join(append(lines, groups...), "\n")
}

// Await waits until ok returns true.
func Await(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal(fmt.Errorf("%s: not after a minute", what))
		}
	}
}
