// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/test/internal/apiserver"
	"github.com/kpng-project/kpng/test/internal/gotool"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
)

// The flag allows the hostProcess container for Windows.
var shared = apiserver.Shared{Options: apiserver.Options{Flags: []string{"--allow-privileged"}}}

func TestMain(m *testing.M) { os.Exit(shared.Run(m)) }

// overlays lists the directories that users apply, with the capabilities of each
// DaemonSet in them.
var overlays = map[string]map[string][]corev1.Capability{
	"nftables":          {"kpng-nftables": {"NET_ADMIN", "NET_RAW"}},
	"iptables":          {"kpng-iptables": {"NET_ADMIN", "NET_RAW"}},
	"ipvs":              {"kpng-ipvs": {"NET_ADMIN", "NET_RAW"}},
	"ebpf":              {"kpng-ebpf": {"BPF", "NET_ADMIN", "NET_RAW", "PERFMON"}},
	"beside-kube-proxy": {"kpng-beside-kube-proxy": {"NET_ADMIN", "NET_RAW"}},
	"central":           {"kpng-server": nil, "kpng-relay": nil, "kpng-nodes": {"NET_ADMIN", "NET_RAW"}},
}

// migrateDirs returns the directories that users apply for a migration from kube-proxy.
func migrateDirs(t *testing.T) []string {
	t.Helper()
	dirs, err := fs.Glob(os.DirFS(deployDir), "migrate/kpng*")
	if err != nil {
		t.Fatal(err)
	}
	return dirs
}

// objects renders a directory.
func objects(t *testing.T, dir string) []*unstructured.Unstructured {
	t.Helper()
	text, err := Render(deployDir + "/" + dir)
	if err != nil {
		t.Fatal(err)
	}
	return decode(t, text)
}

// decode returns the objects of a manifest.
func decode(t *testing.T, text []byte) []*unstructured.Unstructured {
	t.Helper()
	var all []*unstructured.Unstructured
	for documents := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096); ; {
		object := &unstructured.Unstructured{}
		if err := documents.Decode(object); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatalf("%v in\n%s", err, text)
		}
		if len(object.Object) > 0 {
			all = append(all, object)
		}
	}
}

// daemonSets renders a directory and returns the DaemonSets in it.
func daemonSets(t *testing.T, dir string) []*appsv1.DaemonSet {
	t.Helper()
	var found []*appsv1.DaemonSet
	for _, object := range objects(t, dir) {
		if object.GetKind() != "DaemonSet" {
			continue
		}
		set := &appsv1.DaemonSet{}
		if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(object.Object, set, true); err != nil {
			t.Fatal(err)
		}
		found = append(found, set)
	}
	return found
}

func TestAPIServerAcceptsManifests(t *testing.T) {
	client, err := dynamic.NewForConfig(shared.Get(t).Config())
	if err != nil {
		t.Fatal(err)
	}
	resources := map[string]schema.GroupVersionResource{
		"ServiceAccount":     {Version: "v1", Resource: "serviceaccounts"},
		"ClusterRole":        {Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "clusterroles"},
		"ClusterRoleBinding": {Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "clusterrolebindings"},
		"ConfigMap":          {Version: "v1", Resource: "configmaps"},
		"DaemonSet":          {Group: "apps", Version: "v1", Resource: "daemonsets"},
	}
	dirs := slices.AppendSeq(append(migrateDirs(t), "windows"), maps.Keys(overlays))
	all := map[string][]*unstructured.Unstructured{}
	for _, dir := range dirs {
		all[dir] = objects(t, dir)
	}
	for name, values := range chartValues {
		rendered, err := renderChart(t, "kpng", parseYAML(t, values))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		all["the chart "+name] = rendered
	}
	for dir, objects := range all {
		for _, object := range objects {
			if strings.HasPrefix(object.GetAPIVersion(), "monitoring.coreos.com/") {
				continue // the API server does not know these kinds
			}
			resource, ok := resources[object.GetKind()]
			if !ok {
				t.Errorf("%s has a %s", dir, object.GetKind())
				continue
			}
			body, err := object.MarshalJSON()
			if err != nil {
				t.Fatal(err)
			}
			_, err = client.Resource(resource).Namespace(object.GetNamespace()).Patch(t.Context(), object.GetName(), types.ApplyPatchType, body,
				metav1.PatchOptions{FieldManager: "test", FieldValidation: metav1.FieldValidationStrict, DryRun: []string{metav1.DryRunAll}})
			if err != nil {
				t.Errorf("%s: apply %s %s: %v", dir, object.GetKind(), object.GetName(), err)
			}
		}
	}
}

func TestPodsHaveOnlyNeededPrivileges(t *testing.T) {
	for dir, want := range overlays {
		got := map[string][]corev1.Capability{}
		for _, set := range daemonSets(t, dir) {
			pod := set.Spec.Template.Spec
			if len(pod.Containers) != 1 {
				t.Fatalf("%s has %d containers", set.Name, len(pod.Containers))
			}
			// The fields in want must be set, and all others must not be set.
			c := pod.Containers[0].SecurityContext.DeepCopy()
			got[set.Name] = c.Capabilities.Add
			c.Capabilities.Add = nil
			want := &corev1.SecurityContext{
				AllowPrivilegeEscalation: new(bool),
				ReadOnlyRootFilesystem:   new(true),
				Capabilities:             &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
				SeccompProfile:           &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
				RunAsUser:                new(int64(0)),
			}
			if got[set.Name] == nil {
				want.RunAsUser, want.RunAsGroup, want.RunAsNonRoot = new(int64(65532)), new(int64(65532)), new(true)
			}
			if diff := cmp.Diff(want, c); diff != "" {
				t.Errorf("security context of %s (-want +got):\n%s", set.Name, diff)
			}
			if pod.SecurityContext != nil || pod.HostPID || pod.HostIPC {
				t.Errorf("%s has more privileges than its container needs", set.Name)
			}
			if token := pod.AutomountServiceAccountToken == nil; token != (pod.ServiceAccountName != "") {
				t.Errorf("%s: service account %q, but token mounted: %v", set.Name, pod.ServiceAccountName, token)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("capabilities in %s (-want +got):\n%s", dir, diff)
		}
	}
}

// TestKpngAcceptsArgumentsOfManifests runs kpng with the arguments of each container and
// --help. kpng then reports unknown commands and flags, but does nothing.
func TestKpngAcceptsArgumentsOfManifests(t *testing.T) {
	kpng := gotool.BuildOwn(t, "./cmd/kpng")
	for _, dir := range slices.AppendSeq(migrateDirs(t), maps.Keys(overlays)) {
		for _, set := range daemonSets(t, dir) {
			pod := set.Spec.Template.Spec
			for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
				out, err := exec.CommandContext(t.Context(), kpng, append(slices.Clone(c.Args), "--help")...).CombinedOutput()
				if err != nil {
					t.Errorf("%s: kpng %q: %v\n%s", set.Name, c.Args, err, out)
				}
			}
		}
	}
}

// TestKustomizationInDocs renders the examples in docs/operate with the files of this checkout.
func TestKustomizationInDocs(t *testing.T) {
	for name, wanted := range map[string][]string{
		"install.md":  {"image: registry.example/kpng:v0.1.0\n", "value: 192.0.2.1\n", "name: kpng-nftables\n", "- --cluster-cidr=10.244.0.0/16\n", "fieldPath: spec.nodeName\n"},
		"security.md": {"path: /etc/kpng\n", "mountPath: /var/lib/kubelet/pki\n", "            path: ca.crt\n          name: kpng-authority\n"},
	} {
		page, err := os.ReadFile("../../docs/operate/" + name)
		if err != nil {
			t.Fatal(err)
		}
		examples := regexp.MustCompile("(?s)```yaml\n(resources:.*?)```").FindAllSubmatch(page, -1)
		if len(examples) != 1 {
			t.Fatalf("%s has %d examples, want 1", name, len(examples))
		}
		rendered := renderExample(t, examples[0][1])
		for _, want := range wanted {
			if !bytes.Contains(rendered, []byte(want)) {
				t.Errorf("the manifest of the example in %s has no %q:\n%s", name, want, rendered)
			}
		}
	}
}

// renderExample renders a kustomization with the files of this checkout.
func renderExample(t *testing.T, example []byte) []byte {
	t.Helper()
	dir := t.TempDir()
	there, err := filepath.Abs(deployDir)
	if err == nil {
		there, err = filepath.Rel(dir, there)
	}
	if err != nil {
		t.Fatal(err)
	}
	text := regexp.MustCompile(`https://github.com/kpng-project/kpng//cmd/kpng/deploy(/\w+)\?ref=\S+`).ReplaceAll(example, []byte(there+"$1"))
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), text, 0o644); err != nil {
		t.Fatal(err)
	}
	rendered, err := Render(dir)
	if err != nil {
		t.Fatal(err)
	}
	return rendered
}
