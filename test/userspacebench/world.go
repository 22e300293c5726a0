// SPDX-License-Identifier: Apache-2.0

//go:build linux

package userspacebench

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kpng-project/kpng/test/cgroup"
)

// Where things are. The frontend is a cluster IP.
const (
	serverAddr   = "10.2.0.2"
	frontendAddr = "10.96.0.80"
)

// The server's ports, which are the frontend's too.
const (
	httpPort = 8080 // a short answer to each connection
	bulkPort = 8081 // as many bytes as the client takes
	echoPort = 8082 // over TCP and UDP, what the client says
)

// world is three network namespaces in a row: client, proxy, server.
type world struct {
	testing.TB
	client, proxy, server string
}

func newWorld(t testing.TB) *world {
	t.Helper()
	prefix := fmt.Sprintf("kpngub%d-", os.Getpid())
	w := &world{t, prefix + "client", prefix + "proxy", prefix + "server"}
	for _, ns := range []string{w.client, w.proxy, w.server} {
		w.run("ip", "netns", "add", ns)
		t.Cleanup(func() { exec.Command("ip", "netns", "del", ns).Run() })
		w.in(ns, "ip", "link", "set", "lo", "up")
		// A client's ports come again within the minute that a closed connection is remembered.
		w.in(ns, "sysctl", "-qw", "net.ipv4.ip_local_port_range=1024 65535", "net.ipv4.tcp_tw_reuse=1", "net.ipv4.ip_forward=1")
	}
	for _, link := range []struct{ ns, net string }{{w.client, "10.1.0"}, {w.server, "10.2.0"}} {
		w.in(w.proxy, "ip", "link", "add", "to-"+link.net, "type", "veth", "peer", "name", "eth0", "netns", link.ns)
		w.in(w.proxy, "ip", "addr", "add", link.net+".1/24", "dev", "to-"+link.net)
		w.in(w.proxy, "ip", "link", "set", "to-"+link.net, "up")
		w.in(link.ns, "ip", "addr", "add", link.net+".2/24", "dev", "eth0")
		w.in(link.ns, "ip", "link", "set", "eth0", "up")
		w.in(link.ns, "ip", "route", "add", "default", "via", link.net+".1")
	}
	// kube-proxy looks for the interface of the default route.
	w.in(w.proxy, "ip", "route", "add", "default", "via", serverAddr)
	return w
}

// run runs a command to its end.
func (w *world) run(name string, args ...string) {
	w.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		w.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
}

// in runs a command to its end in a namespace.
func (w *world) in(ns string, args ...string) {
	w.Helper()
	w.run("ip", append([]string{"netns", "exec", ns}, args...)...)
}

// process is one in a namespace, with what it starts.
type process struct {
	*exec.Cmd
	log *bytes.Buffer
}

// start starts a command in a namespace, in a group if that is not nil. It ends with
// stop.
func (w *world) start(ns string, group *cgroup.Group, args ...string) *process {
	w.Helper()
	args = append([]string{"ip", "netns", "exec", ns}, args...)
	if group != nil {
		args = group.Command(args...)
	}
	p := &process{exec.Command(args[0], args[1:]...), &bytes.Buffer{}}
	p.Stdout, p.Stderr = p.log, p.log
	p.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := p.Start(); err != nil {
		w.Fatal(err)
	}
	return p
}

// stop ends a process and all that it started.
func (p *process) stop() {
	syscall.Kill(-p.Process.Pid, syscall.SIGTERM)
	ended := make(chan struct{})
	go func() {
		p.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(5 * time.Second):
		syscall.Kill(-p.Process.Pid, syscall.SIGKILL)
		<-ended
	}
}

// load runs a role of this program in the client's namespace and returns what it
// measured. While it does so meanwhile is called, once the client says that it
// is ready, if it is not nil.
func (w *world) load(l load, meanwhile func()) result {
	w.Helper()
	arg, _ := json.Marshal(l)
	cmd := exec.Command("ip", "netns", "exec", w.client, os.Args[0])
	cmd.Env = append(os.Environ(), "KPNG_BENCH_CLIENT="+string(arg))
	cmd.Stderr = os.Stderr
	stdin, _ := cmd.StdinPipe()
	stdout, _ := cmd.StdoutPipe()
	if err := cmd.Start(); err != nil {
		w.Fatal(err)
	}
	decoder := json.NewDecoder(stdout)
	var r result
	err := decoder.Decode(&r)
	if err == nil && meanwhile != nil {
		meanwhile()
	}
	stdin.Close()
	if err := cmd.Wait(); err != nil {
		w.Fatalf("load %s: %v", arg, err)
	}
	if err != nil {
		w.Fatalf("load %s: %v", arg, err)
	}
	return r
}

// waitServed waits until a proxy answers.
func (w *world) waitServed(p *process, target string, port int) {
	w.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		cmd := exec.Command("ip", "netns", "exec", w.client, "sh", "-c", fmt.Sprintf("exec 3<>/dev/tcp/%s/%d", target, port))
		cmd.Args[4] = "bash"
		if cmd.Run() == nil {
			return
		}
		if time.Now().After(deadline) {
			w.Fatalf("the proxy does not serve; its log:\n%s", p.log)
		}
	}
}
