// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kpng-project/kpng/test/internal/gotool"
	"github.com/kpng-project/kpng/watcher"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestCommandsOfTheBlog runs the unchanged commands of the blog post "Use KPNG to Write
// Specialized kube-proxiers", which is about the original kpng. kpng-json and kpng-callout
// must read from the kpng server, and not from the API server in $KUBECONFIG.
func TestCommandsOfTheBlog(t *testing.T) {
	w := newWorld(t)
	plain := w.service("plain", corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}) // only for kube-proxy
	both := corev1.IPFamilyPolicyRequireDualStack
	example, err := w.server.Client().CoreV1().Services(w.namespace).Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "kpng-example", Labels: map[string]string{watcher.LabelServiceProxyName: "kpng-example"}},
		Spec: corev1.ServiceSpec{ClusterIP: corev1.ClusterIPNone, IPFamilyPolicy: &both, ExternalIPs: []string{"10.0.0.55", "1000::55"},
			Selector: map[string]string{"app": "kpng-alpine"}, Ports: []corev1.ServicePort{{Port: 6000}}},
	}, metav1.CreateOptions{})
	w.check(err)
	slices := w.server.Client().DiscoveryV1().EndpointSlices(w.namespace)
	w.lead(example, pod1, nodeName)
	slice, err := slices.Get(t.Context(), example.Name, metav1.GetOptions{})
	w.check(err)
	maps.Copy(slice.Labels, example.Labels) // as the controller of slices does
	_, err = slices.Update(t.Context(), slice, metav1.UpdateOptions{})
	w.check(err)

	dir := t.TempDir()
	for _, pkg := range []string{"./cmd/kpng", "./examples/kpng-json", "./examples/kpng-callout"} {
		w.check(os.Symlink(gotool.BuildOwn(t, pkg), filepath.Join(dir, filepath.Base(pkg))))
	}
	// If its output is no terminal, jq would buffer the output until its input ends.
	jq, err := exec.LookPath("jq")
	w.check(err)
	w.check(os.WriteFile(filepath.Join(dir, "jq"), []byte("#!/bin/sh\nexec "+jq+" --unbuffered \"$@\"\n"), 0o755))
	shell := func(command string) (stdout, stderr *buffer) {
		args := w.node.Command("sh", "-c", command)
		cmd := exec.Command(args[0], args[1:]...)
		stdout, stderr = new(buffer), new(buffer)
		cmd.Stdout, cmd.Stderr = stdout, stderr
		cmd.Env = append(cmd.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "KUBECONFIG="+w.kubeconfig, "NODE_NAME="+nodeName)
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		w.check(cmd.Start())
		t.Cleanup(func() {
			if err := syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL); err != nil {
				t.Error(err)
			}
			var exit *exec.ExitError
			if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
				t.Error(err)
			}
			if t.Failed() {
				t.Logf("%s:\n%s%s", command, stdout, stderr)
			}
		})
		return stdout, stderr
	}
	_, log := shell("kpng kube --service-proxy-name=kpng-example to-api")
	await(t, "the first line of the log", "source", func() string { return firstSource(log, "API server") })
	for _, command := range []string{"kpng-json | jq", "CALLOUT=jq kpng-callout"} {
		out, log := shell(command)
		var printed struct {
			Service struct {
				Name string
				IPs  struct{ ExternalIPs struct{ V6 []string } }
			}
			Endpoints []struct{ Local bool }
		}
		await(t, "the output of "+command, "kpng-example 1000::55 local", func() string {
			if err := json.NewDecoder(strings.NewReader(out.String())).Decode(&printed); err != nil || len(printed.Endpoints) == 0 {
				return out.String()
			}
			s := printed.Service
			return s.Name + " " + strings.Join(s.IPs.ExternalIPs.V6, " ") + map[bool]string{true: " local"}[printed.Endpoints[0].Local]
		})
		if got := firstSource(log, "kpng server tcp://127.0.0.1:12090"); got != "source" {
			t.Errorf("%s does not log its source first: %s", command, got)
		}
	}

	// With a flag that selects services, kpng-json reads from the API server.
	args := w.node.Command(filepath.Join(dir, "kpng-json"), "--service-proxy-name=", "--once")
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), args[0], args[1:]...)
	cmd.Env = append(cmd.Environ(), "KUBECONFIG="+w.kubeconfig)
	if out, err := cmd.Output(); err != nil || !strings.Contains(string(out), plain.Name) || strings.Contains(string(out), "kpng-example") {
		t.Errorf("kpng-json --service-proxy-name= prints %s, error %v", out, err)
	}
}

// firstSource returns its argument source if the first line of a log has this source.
func firstSource(log *buffer, source string) string {
	line, _, complete := strings.Cut(log.String(), "\n")
	if complete && strings.Contains(line, `source="`+source) {
		return "source"
	}
	return line
}
