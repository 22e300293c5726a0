// SPDX-License-Identifier: Apache-2.0

// Package command tests the program kpng with a real API server.
package command

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/test/internal/apiserver"
	"github.com/kpng-project/kpng/test/internal/gotool"
	"github.com/kpng-project/kpng/watcher"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// patience is the maximum time to wait for an expected event. On an idle machine the
// event happens within moments.
const patience = time.Minute

// program is a program that the test has built.
type program struct {
	t    *testing.T
	path string
}

func build(t *testing.T, pkg string) program {
	t.Helper()
	return program{t, gotool.BuildOwn(t, pkg)}
}

// try runs the program and returns its stdout. An error includes its stderr.
func (p program) try(args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(p.t.Context(), p.path, args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", errors.Join(err, errors.New(stderr.String()))
	}
	return stdout.String(), nil
}

// run runs the program and returns its output. If the program fails, the test fails.
func (p program) run(args ...string) string {
	p.t.Helper()
	out, err := p.try(args...)
	if err != nil {
		p.t.Fatalf("%s %s: %v", filepath.Base(p.path), strings.Join(args, " "), err)
	}
	return out
}

// start starts the program, and sends SIGTERM to the program when the test ends. After
// SIGTERM, the program must exit with code 0.
func (p program) start(args ...string) {
	p.t.Helper()
	var stderr bytes.Buffer
	cmd := exec.Command(p.path, args...)
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() {
		kill := time.AfterFunc(patience, func() { cmd.Process.Kill() })
		defer kill.Stop()
		if err := errors.Join(cmd.Process.Signal(syscall.SIGTERM), cmd.Wait()); err != nil || p.t.Failed() {
			p.t.Errorf("%s %s: %v\n%s", filepath.Base(p.path), strings.Join(args, " "), err, &stderr)
		}
	})
}

// eventually calls the function condition until its result ok is true. The test fails after
// as much time as patience says.
func eventually(t *testing.T, what string, condition func() (ok bool, state any)) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		ok, state := condition()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s: %v", patience, what, state)
		}
	}
}

func TestAllSourcesAndTargetsAgree(t *testing.T) {
	kpng, kpngJSON := build(t, "./cmd/kpng"), build(t, "./examples/kpng-json")
	server := apiserver.Start(t, apiserver.Options{})
	client, ns := server.Client(), server.Namespace(t)
	for _, name := range []string{"here", "there"} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelTopologyZone: "zone-of-" + name}}}
		if _, err := client.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	// Without a proxy name, kpng would also select the API server's own service.
	const proxyName = "--service-proxy-name=command"
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Labels: map[string]string{watcher.LabelServiceProxyName: "command"}},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, Selector: map[string]string{"app": "web"}, ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal,
			IPFamilyPolicy: new(corev1.IPFamilyPolicyRequireDualStack), ExternalIPs: []string{"192.0.2.1"},
			Ports: []corev1.ServicePort{{Name: "http", Port: 80}, {Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP}},
		},
	}
	if _, err := client.CoreV1().Services(ns).Create(t.Context(), service, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web", watcher.LabelServiceProxyName: "command"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(8080))}},
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.1.0.1"}, NodeName: new("here")}, {Addresses: []string{"10.1.0.2"}, NodeName: new("there")}},
	}
	slice, err := client.DiscoveryV1().EndpointSlices(ns).Create(t.Context(), slice, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}

	// The user has exactly the permissions that docs/operate/install.md lists.
	kubeconfig := apiserver.Kubeconfig(t, server.User(t,
		rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"services", "nodes"}, Verbs: []string{"list", "watch"}},
		rbacv1.PolicyRule{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}, Verbs: []string{"list", "watch"}},
	))
	dir, err := os.MkdirTemp("", "kpng-") // the path of t.TempDir would be too long for unix sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	api, relay := "unix://"+filepath.Join(dir, "api"), "unix://"+filepath.Join(dir, "relay")
	written := filepath.Join(t.TempDir(), "state.yaml")
	kpng.start("kube", "--kubeconfig", kubeconfig, proxyName, "to-api", "--listen", api)
	kpng.start("api", "--api", api, "to-api", "--listen", relay)
	kpng.start("kube", "--kubeconfig", kubeconfig, proxyName, "to-file", written, "--min-write-interval=10ms")

	once := []string{"--once", "--node-name=here"}
	same := func(what string) {
		t.Helper()
		want := kpngJSON.run(append(once, "--kubeconfig", kubeconfig, proxyName)...)
		if !strings.Contains(want, what) {
			t.Fatalf("%s is not in\n%s", what, want)
		}
		for name, source := range map[string]func() (string, error){
			"served":  func() (string, error) { return kpngJSON.try(append(once, "--api", api)...) },
			"relayed": func() (string, error) { return kpngJSON.try(append(once, "--api", relay)...) },
			"written": func() (string, error) { return kpngJSON.try(append(once, "--manifests", written, proxyName)...) },
		} {
			eventually(t, what+" is "+name, func() (bool, any) {
				got, err := source()
				return got == want, errors.Join(err, errors.New(cmp.Diff(want, got)))
			})
		}
		about := ns + "/web"
		explained := kpng.run("explain", "--kubeconfig", kubeconfig, proxyName, "--node-name=here", about)
		for _, source := range [][]string{{"--api", relay}, {"-i", written, proxyName}} {
			got := kpng.run(append([]string{"explain", "--node-name=here", about}, source...)...)
			if diff := cmp.Diff(explained, got); diff != "" {
				t.Errorf("explanation with %s (-with kubeconfig +with this):\n%s", source, diff)
			}
		}
	}
	same("10.1.0.2")
	slice.Endpoints[1].Addresses[0] = "10.1.0.3"
	if _, err := client.DiscoveryV1().EndpointSlices(ns).Update(t.Context(), slice, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	same("10.1.0.3")
}
