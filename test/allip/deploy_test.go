// SPDX-License-Identifier: Apache-2.0

package allip

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/test/deploy"
	"github.com/kpng-project/kpng/test/internal/apiserver"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// account is the namespace of the service accounts in the manifests.
const account = "kube-system"

func TestManifestsAreValidAndGrantOnlyNeededPermissions(t *testing.T) {
	for name, manifest := range map[string]string{
		"all-ip":         "../../examples/all-ip/deploy/all-ip.yaml",
		"kpng-callout":   "../../examples/kpng-callout/deploy/kpng-callout.yaml",
		"kpng-nftables":  "../../cmd/kpng/deploy/nftables",
		"kpng-iptables":  "../../cmd/kpng/deploy/iptables",
		"kpng-ipvs":      "../../cmd/kpng/deploy/ipvs",
		"kpng-ebpf":      "../../cmd/kpng/deploy/ebpf",
		"kpng-cni":       "../../examples/cni/deploy/cni.yaml",
		"winuserspace":   "../../examples/winuserspace/deploy/winuserspace.yaml",
		"winkernelspace": "../../examples/winkernelspace/deploy/winkernelspace.yaml",
	} {
		t.Run(name, func(t *testing.T) {
			server := shared.Get(t)
			if got, want := apply(t, server, manifest), []string{"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "DaemonSet"}; !slices.Equal(got, want) {
				t.Errorf("the manifest has %q, want %q", got, want)
			}
			config := actAs(t, server, name)
			nobody := actAs(t, server, newAccount(t, server))

			granted := waitRules(t, config)
			want := append(rulesOf(t, nobody),
				authorizationv1.ResourceRule{Verbs: []string{"list", "watch"}, APIGroups: []string{""}, Resources: []string{"services", "nodes"}},
				authorizationv1.ResourceRule{Verbs: []string{"list", "watch"}, APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}},
			)
			if diff := cmp.Diff(sorted(want), sorted(granted)); diff != "" {
				t.Errorf("permissions (-want +got):\n%s", diff)
			}

			c := newCluster(t, server)
			c.create("example", c.name)
			c.lead("example", "pod1")
			out := sh(t, build(t, "kpng-json"), "--kubeconfig", apiserver.Kubeconfig(t, config), "--once",
				"--service-proxy-name", c.name, "--node-name", c.name, "--all-ports")
			if !bytes.Contains([]byte(out), []byte(podIPs["pod1"][1])) {
				t.Errorf("with these permissions kpng-json prints %q", out)
			}
		})
	}
}

// apply applies a manifest, or a directory with a kustomization, like kubectl with strict
// validation. It returns the kinds of the objects. At the end of the test, the objects are
// deleted.
func apply(t testing.TB, server *apiserver.Server, manifest string) (kinds []string) {
	t.Helper()
	read := os.ReadFile
	if filepath.Ext(manifest) == "" {
		read = deploy.Render
	}
	text, err := read(manifest)
	if err != nil {
		t.Fatal(err)
	}
	client, err := dynamic.NewForConfig(server.Config())
	if err != nil {
		t.Fatal(err)
	}
	for documents := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096); ; {
		object := &unstructured.Unstructured{}
		if err := documents.Decode(object); errors.Is(err, io.EOF) {
			return kinds
		} else if err != nil {
			t.Fatalf("%s: %v", manifest, err)
		}
		kinds = append(kinds, object.GetKind())
		resource, ok := map[string]schema.GroupVersionResource{
			"ServiceAccount":     {Version: "v1", Resource: "serviceaccounts"},
			"ClusterRole":        {Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "clusterroles"},
			"ClusterRoleBinding": {Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "clusterrolebindings"},
			"DaemonSet":          {Group: "apps", Version: "v1", Resource: "daemonsets"},
		}[object.GetKind()]
		if !ok {
			t.Fatalf("%s has a %s", manifest, object.GetKind())
		}
		objects := client.Resource(resource).Namespace(object.GetNamespace())
		body, err := object.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		_, err = objects.Patch(t.Context(), object.GetName(), types.ApplyPatchType, body,
			metav1.PatchOptions{FieldManager: "test", FieldValidation: metav1.FieldValidationStrict})
		if err != nil {
			t.Fatalf("apply %s %s of %s: %v", object.GetKind(), object.GetName(), manifest, err)
		}
		t.Cleanup(func() {
			if err := objects.Delete(context.WithoutCancel(t.Context()), object.GetName(), metav1.DeleteOptions{}); err != nil {
				t.Error(err)
			}
		})
	}
}

// actAs returns a client configuration with a token of a service account.
func actAs(t testing.TB, server *apiserver.Server, name string) *rest.Config {
	t.Helper()
	token, err := server.Client().CoreV1().ServiceAccounts(account).CreateToken(t.Context(), name, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	config := rest.AnonymousClientConfig(server.Config())
	config.BearerToken = token.Status.Token
	return config
}

// newAccount creates a service account without permissions.
func newAccount(t testing.TB, server *apiserver.Server) string {
	t.Helper()
	accounts := server.Client().CoreV1().ServiceAccounts(account)
	made, err := accounts.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "nobody"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := accounts.Delete(context.WithoutCancel(t.Context()), made.Name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	return made.Name
}

// rulesOf returns the permissions of a client.
func rulesOf(t testing.TB, config *rest.Config) []authorizationv1.ResourceRule {
	t.Helper()
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	review := &authorizationv1.SelfSubjectRulesReview{Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: account}}
	answer, err := client.AuthorizationV1().SelfSubjectRulesReviews().Create(t.Context(), review, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if answer.Status.Incomplete {
		t.Fatalf("the list of permissions is incomplete: %s", answer.Status.EvaluationError)
	}
	return answer.Status.ResourceRules
}

// waitRules waits until the client may read EndpointSlices, and returns all permissions
// of the client. The authorizer of the API server sees changes of roles and bindings with
// a delay.
func waitRules(t testing.TB, config *rest.Config) []authorizationv1.ResourceRule {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		rules := rulesOf(t, config)
		if slices.ContainsFunc(rules, func(r authorizationv1.ResourceRule) bool { return slices.Contains(r.Resources, "endpointslices") }) {
			return rules
		}
		if time.Now().After(deadline) {
			t.Fatalf("the client still has only the permissions %v", rules)
		}
	}
}

func sorted(rules []authorizationv1.ResourceRule) []string {
	var lines []string
	for i := range rules {
		lines = append(lines, rules[i].String())
	}
	slices.Sort(lines)
	return slices.Compact(lines)
}
