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

	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/test/internal/cgroup"
)

// The addresses of the server and of the frontend, which is a cluster IP.
const (
	serverAddr   = "10.2.0.2"
	frontendAddr = "10.96.0.80"
)

// The ports, which are the same at the server and at the frontend.
const (
	httpPort = 8080 // sends one short answer per connection
	bulkPort = 8081 // sends bytes until the client stops reading
	echoPort = 8082 // sends all input back, over TCP and UDP
)

// world consists of three network namespaces. The client and the server reach each other
// through the namespace of the proxy.
type world struct {
	testing.TB
	client, proxy, server *netnstest.Namespace
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{t, netnstest.New(t), netnstest.New(t), netnstest.New(t)}
	for _, n := range []*netnstest.Namespace{w.client, w.proxy, w.server} {
		// Let clients reuse the ports of closed connections, which the kernel would otherwise
		// block for a minute.
		n.Set(t, "ipv4/ip_local_port_range=1024 65535", "ipv4/tcp_tw_reuse=1", "ipv4/ip_forward=1")
	}
	for net, n := range map[string]*netnstest.Namespace{"10.1.0": w.client, "10.2.0": w.server} {
		w.proxy.Join(t, "to-"+net, n, "eth0")
		w.proxy.Add(t, "to-"+net, net+".1/24")
		n.Add(t, "eth0", net+".2/24")
		n.Route(t, "default", net+".1", "eth0")
	}
	// kube-proxy needs a default route, because it uses the address of the route's
	// interface.
	w.proxy.Route(t, "default", serverAddr, "to-10.2.0")
	return w
}

func (w *world) run(name string, args ...string) {
	w.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		w.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
}

// process represents a process in a network namespace, together with its children.
type process struct {
	*exec.Cmd
	log *bytes.Buffer
}

// start starts a command in a namespace. If group is not nil, the command runs in this
// cgroup.
func (w *world) start(n *netnstest.Namespace, group *cgroup.Group, args ...string) *process {
	w.Helper()
	args = n.Command(args...)
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

// stop ends a process and its children.
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

// load runs a client with the load l and returns the result. If meanwhile is not nil,
// load calls it after the client has printed the result. The client ends after that call.
func (w *world) load(l load, meanwhile func()) result {
	w.Helper()
	arg, _ := json.Marshal(l)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "KPNG_BENCH_CLIENT="+string(arg))
	cmd.Stderr = os.Stderr
	stdin, _ := cmd.StdinPipe()
	stdout, _ := cmd.StdoutPipe()
	if err := w.client.Do(cmd.Start); err != nil {
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

// waitServed waits until target accepts connections on a port.
func (w *world) waitServed(p *process, target string, port int) {
	w.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		if w.client.Do(exec.Command("bash", "-c", fmt.Sprintf("exec 3<>/dev/tcp/%s/%d", target, port)).Run) == nil {
			return
		}
		if time.Now().After(deadline) {
			w.Fatalf("the proxy does not answer; its log:\n%s", p.log)
		}
	}
}
