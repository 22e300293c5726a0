// SPDX-License-Identifier: Apache-2.0

package kubeproxy

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// ConfigFile writes the configuration in a ConfigMap of kube-proxy to a file. The name of
// the ConfigMap is kubeadm or kind. Only the path of the kubeconfig is replaced. The
// caller must be a test in a subfolder of the folder test.
func ConfigFile(t testing.TB, name, kubeconfig string) (file string) {
	t.Helper()
	text, err := os.ReadFile("../../cmd/kpng/testdata/kube-proxy/" + name + ".yaml")
	if err != nil {
		t.Fatal(err)
	}
	var configMap corev1.ConfigMap
	if err := yaml.UnmarshalStrict(text, &configMap); err != nil {
		t.Fatal(err)
	}
	config := strings.ReplaceAll(configMap.Data["config.conf"], "/var/lib/kube-proxy/kubeconfig.conf", kubeconfig)
	file = filepath.Join(t.TempDir(), "config.conf")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}
