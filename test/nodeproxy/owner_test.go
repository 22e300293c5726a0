// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestOneOwnerOfDataplane runs two processes of each backend on one node. While the first process
// runs, the second process refuses to start or, with --wait, waits. Clean-up refuses as well. When
// the first process is killed, the waiting process takes over.
func TestOneOwnerOfDataplane(t *testing.T) {
	backends := []string{"nftables", "iptables", "userspace"}
	if kernelHasIPVS() {
		backends = append(backends, "ipvs")
	}
	for _, backend := range backends {
		t.Run(backend, func(t *testing.T) {
			w := &network{t: t, kpng: buildKpng(t), node: newNamespace(t)}
			file := filepath.Join(t.TempDir(), "services.yaml")
			w.check(os.WriteFile(file, []byte(manifests), 0o600))
			args := func(flags ...string) []string {
				return slices.Concat([]string{"file", "-i", file, "to-local", backend, "--node-name", nodeName, "--healthz-bind-address"}, flags)
			}
			first := w.start(healthz, args(healthz)...)
			for _, other := range [][]string{args("127.0.0.1:10257", "--once"), {"cleanup", backend}} {
				command := w.node.Command(append(least, append([]string{w.kpng}, other...)...)...)
				out, err := exec.Command(command[0], command[1:]...).CombinedOutput()
				if want := "owned by process "; err == nil || !strings.Contains(string(out), want) || !strings.Contains(string(out), "to-local "+backend) {
					t.Errorf("kpng %s returned %v, want an error with %q and the command of the owner:\n%s", strings.Join(other, " "), err, want, out)
				}
			}
			// The same address for health checks is free only after the end of the first process.
			// Until then, the first process answers there, so start does not wait for the second
			// process.
			second := w.start(healthz, args(healthz, "--wait")...)
			log := w.log
			await(t, "the second process waits", true, func() bool { return strings.Contains(log.String(), "Waiting for the end of another process") })
			if err := first(os.Kill); err == nil {
				t.Error("the first process was not killed")
			}
			await(t, "the second process takes over", "200 ", func() string {
				status, body := w.get(w.node, "http://"+healthz+"/readyz")
				if status == 200 {
					body = ""
				}
				return fmt.Sprint(status, " ", body)
			})
			if err := second(os.Interrupt); err != nil {
				t.Errorf("the second process returned %v", err)
			}
			w.cleanUp(backend)
		})
	}
}

// TestInstancesRunBesideEachOther runs two instances of a backend on one node.
func TestInstancesRunBesideEachOther(t *testing.T) {
	w := &network{t: t, kpng: buildKpng(t), node: newNamespace(t)}
	file := filepath.Join(t.TempDir(), "services.yaml")
	w.check(os.WriteFile(file, []byte(manifests), 0o600))
	for i, instance := range []string{"", "beside"} {
		address := fmt.Sprintf("127.0.0.1:%d", 10256+i)
		w.start(address, "file", "-i", file, "to-local", "nftables", "--node-name", nodeName, "--healthz-bind-address", address, "--instance", instance)
	}
}
