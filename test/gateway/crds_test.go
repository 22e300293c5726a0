// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/yaml"
)

const (
	group = "gateway.networking.k8s.io"
	// The module with the CRDs is no dependency of this module. As a dependency, it would
	// require newer versions of other modules.
	module    = "sigs.k8s.io/gateway-api@v1.6.1"
	moduleSum = "h1:mock6phZbI6rvZerwrVNk7hVNymQgHo+6sJ81Ia7ftY="
)

func resource(name string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: group, Version: "v1", Resource: name}
}

// crds creates the CRDs of the Gateway API, and waits until the API server serves them.
func (w *world) crds() {
	w.t.Helper()
	out, err := exec.CommandContext(w.t.Context(), "go", "mod", "download", "-json", module).Output()
	if err != nil {
		w.t.Fatalf("download %s: %v\n%s", module, err, out)
	}
	var downloaded struct{ Dir, Sum string }
	w.check(json.Unmarshal(out, &downloaded))
	if downloaded.Sum != moduleSum {
		w.t.Fatalf("%s has the sum %s, want %s", module, downloaded.Sum, moduleSum)
	}
	crds := w.client.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"})
	for _, name := range []string{"gatewayclasses", "gateways", "tcproutes", "udproutes", "referencegrants"} {
		text, err := os.ReadFile(filepath.Join(downloaded.Dir, "config/crd/standard", group+"_"+name+".yaml"))
		w.check(err)
		var o unstructured.Unstructured
		w.check(yaml.Unmarshal(text, &o.Object))
		_, err = crds.Create(w.t.Context(), &o, metav1.CreateOptions{})
		w.check(err)
		w.await(func() string {
			_, err := w.client.Resource(resource(name)).List(w.t.Context(), metav1.ListOptions{})
			if err != nil {
				time.Sleep(100 * time.Millisecond)
				return err.Error()
			}
			return ""
		})
	}
}
