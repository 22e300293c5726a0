// SPDX-License-Identifier: Apache-2.0

// Package manager tests examples/controller-runtime with a real API server.
package manager

import (
	"bufio"
	"bytes"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kpng-project/kpng/test/internal/apiserver"
	"github.com/kpng-project/kpng/watcher"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

var versions = flag.String("versions", "", "test with these versions of controller-runtime, such as v0.22.5,v0.23.3, in place of that of go.mod")

const example = "../../examples/controller-runtime"

// build builds the example with a version of controller-runtime, or with the version in
// its go.mod if version is "".
func build(t *testing.T, version string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "program")
	goCommand := func(args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "go", args...)
		cmd.Dir = example
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	if version == "" {
		goCommand("build", "-o", program, ".")
		return program
	}
	// Leave out the modules that only newer versions of controller-runtime need. So
	// client-go is as old as this version allows.
	mod := filepath.Join(t.TempDir(), "go.mod")
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	text := "module github.com/kpng-project/kpng/examples/controller-runtime\n\ngo 1.26.0\n\nrequire (\n\tgithub.com/kpng-project/kpng v0.0.0\n\tsigs.k8s.io/controller-runtime " +
		version + "\n)\n\nreplace github.com/kpng-project/kpng => " + root + "\n"
	if err := os.WriteFile(mod, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	goCommand("mod", "tidy", "-modfile="+mod)
	goCommand("build", "-modfile="+mod, "-o", program, ".")
	return program
}

func TestProxyInManager(t *testing.T) {
	server := apiserver.Start(t, apiserver.Options{})
	client, ns := server.Client(), server.Namespace(t)
	kubeconfig := apiserver.Kubeconfig(t, server.Config())
	labels := map[string]string{watcher.LabelServiceProxyName: "example"}
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Labels: labels},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80}}},
	}
	if _, err := client.CoreV1().Services(ns).Create(t.Context(), service, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web", watcher.LabelServiceProxyName: "example"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(8080))}},
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.1.0.1"}}},
	}
	slice, err := client.DiscoveryV1().EndpointSlices(ns).Create(t.Context(), slice, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, version := range strings.Split(*versions, ",") {
		t.Run(version, func(t *testing.T) {
			program := build(t, version)
			leader := start(t, program, "--leader-election=kpng-example", "--leader-only", "--node-name=there", "--kubeconfig="+kubeconfig)
			leader.expect(ns+"/web ClusterIP", "10.1.0.1:8080")
			// The second manager is never the leader, but its proxy serves.
			for _, args := range [][]string{nil, {"--leader-election=kpng-example"}} {
				p := start(t, program, append(args, "--node-name=here", "--kubeconfig="+kubeconfig)...)
				p.expect(ns+"/web ClusterIP", "10.1.0.1:8080")
				slice.Endpoints[0].Addresses[0] = "10.1.0.2"
				if slice, err = client.DiscoveryV1().EndpointSlices(ns).Update(t.Context(), slice, metav1.UpdateOptions{}); err != nil {
					t.Fatal(err)
				}
				p.expect(ns+"/web ClusterIP", "10.1.0.2:8080")
				p.stop()
				if log := p.stderr.String(); !strings.Contains(log, "level=INFO") || !strings.Contains(log, "logger=kpng") {
					t.Errorf("stderr has no line of kpng in the form of slog:\n%s", log)
				}
				slice.Endpoints[0].Addresses[0] = "10.1.0.1"
				if slice, err = client.DiscoveryV1().EndpointSlices(ns).Update(t.Context(), slice, metav1.UpdateOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			leader.stop()
			out, err := exec.CommandContext(t.Context(), program, "--two-namespaces", "--node-name=here", "--kubeconfig="+kubeconfig).CombinedOutput()
			if err == nil || !strings.Contains(string(out), "a service proxy needs a cache of all namespaces") {
				t.Errorf("with a cache of two namespaces: %v\n%s", err, out)
			}
		})
	}
}

// process is the running example.
type process struct {
	t      *testing.T
	cmd    *exec.Cmd
	lines  chan string
	stderr bytes.Buffer
}

func start(t *testing.T, program string, args ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: exec.Command(program, args...), lines: make(chan string)}
	p.cmd.Stderr = &p.stderr
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.cmd.Process.Kill() })
	go func() {
		defer close(p.lines)
		for s := bufio.NewScanner(stdout); s.Scan(); {
			p.lines <- s.Text()
		}
	}()
	return p
}

// expect waits for a line with all parts. The test fails after a minute without a line.
func (p *process) expect(parts ...string) {
	p.t.Helper()
	for {
		select {
		case line, ok := <-p.lines:
			if !ok {
				p.t.Fatalf("the program ended: %v\n%s", p.cmd.Wait(), &p.stderr)
			}
			found := true
			for _, part := range parts {
				found = found && strings.Contains(line, part)
			}
			if found {
				return
			}
		case <-time.After(time.Minute):
			p.cmd.Process.Kill()
			p.t.Fatalf("no line with %q within a minute", parts)
		}
	}
}

// stop ends the program with SIGTERM. It must then exit with code 0.
func (p *process) stop() {
	p.t.Helper()
	kill := time.AfterFunc(time.Minute, func() { p.cmd.Process.Kill() })
	defer kill.Stop()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		p.t.Fatal(err)
	}
	for range p.lines {
	}
	if err := p.cmd.Wait(); err != nil {
		p.t.Errorf("after SIGTERM: %v\n%s", err, &p.stderr)
	}
}
