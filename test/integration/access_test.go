// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"crypto/x509"
	"encoding/pem"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/test/internal/apiserver"
	"github.com/kpng-project/kpng/watcher"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

func TestMissingPermissionIsNamedAndGrantIsDetected(t *testing.T) {
	for _, test := range []struct {
		verb, resource, group string
	}{
		{"list", "services", ""},
		{"watch", "services", ""},
		{"list", "endpointslices", "discovery.k8s.io"},
		{"watch", "endpointslices", "discovery.k8s.io"},
		{"list", "nodes", ""},
		{"watch", "nodes", ""},
	} {
		t.Run(test.verb+" "+test.resource, func(t *testing.T) {
			t.Parallel()
			server := shared.Get(t)
			n := newTenant(t, server)
			web := newService("web", n.name, servicePort("", 80, 80))
			n.put(web, newSlice("web", web, slicePorts("", 80), newEndpoint("10.1.0.1", "")))
			config := server.User(t, without(test.verb, test.resource)...)
			args := []string{"--kubeconfig", apiserver.Kubeconfig(t, config), "--service-proxy-name", n.name, "--node-name", n.name,
				"--keep-labels", watcher.LabelServiceProxyName}
			missing := []string{test.verb + " " + test.resource, "missing permission", "the verbs list and watch",
				`resource "` + test.resource + `"`, `group "` + test.group + `"`}

			// Without the verb watch, --once may succeed, because it needs only lists.
			if test.verb == "list" {
				once := start(t, append(args, "--once")...)
				if code := once.exit(t); code != 1 {
					t.Errorf("exit status with --once is %d, want 1", code)
				}
				once.stderr.wait(t, append(missing, "kpng-json: ")...)
			}

			s := newScreen(n, n.name, nil)
			p := start(t, args...)
			s.out = p.stdout
			p.stderr.wait(t, quoted(missing)...)
			if printed := p.stdout.String(); test.verb == "list" && printed != "" {
				t.Errorf("printed before everything was read:\n%s", printed)
			}
			grant(t, server, config)
			s.expect("web IPv4 80", "  10.1.0.1 80")
			s.checkAll()
		})
	}
}

// quoted returns the words with a backslash before each quotation mark, as in log lines.
func quoted(words []string) []string {
	var out []string
	for _, w := range words {
		out = append(out, strings.ReplaceAll(w, `"`, `\"`))
	}
	return out
}

// without returns all permissions except one verb for a resource.
func without(verb, resource string) []rbacv1.PolicyRule {
	var rules []rbacv1.PolicyRule
	for _, rule := range permissions {
		for _, r := range rule.Resources {
			one := rule
			one.Resources = []string{r}
			if r == resource {
				one.Verbs = slices.DeleteFunc(slices.Clone(rule.Verbs), func(v string) bool { return v == verb })
			}
			rules = append(rules, one)
		}
	}
	return rules
}

// grant gives the user of config all permissions that a proxy needs.
func grant(t *testing.T, server *apiserver.Server, config *rest.Config) {
	t.Helper()
	roles := server.Client().RbacV1().ClusterRoles()
	role, err := roles.Get(t.Context(), userOf(t, config), metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	role.Rules = permissions
	if _, err := roles.Update(t.Context(), role, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// userOf returns the user name in config's client certificate.
func userOf(t *testing.T, config *rest.Config) string {
	t.Helper()
	block, _ := pem.Decode(config.CertData)
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return cert.Subject.CommonName
}

// foreignAuthority returns the certificate of an authority that did not sign the API
// server's certificate, in PEM format.
func foreignAuthority() []byte {
	stranger := httptest.NewTLSServer(nil)
	defer stranger.Close()
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: stranger.Certificate().Raw})
}

func TestUnusableServerIsNamed(t *testing.T) {
	t.Parallel()
	server := shared.Get(t)
	wrongToken := server.Config()
	wrongToken.CertData, wrongToken.KeyData = nil, nil
	wrongToken.BearerToken = "wrong"
	anonymous := server.Config()
	anonymous.CertData, anonymous.KeyData = nil, nil
	stranger := server.Config()
	stranger.CAData = foreignAuthority()
	nowhere := server.Config()
	nowhere.Host = "https://127.0.0.1:1"
	plain := server.Config()
	plain.Host = "http" + strings.TrimPrefix(plain.Host, "https")

	for _, test := range []struct {
		name   string
		config *rest.Config
		want   []string
	}{
		{"a token that the server rejects", wrongToken, []string{"credentials are missing or not accepted", server.Config().Host}},
		{"no credentials", anonymous, []string{"missing permission", `"system:anonymous"`, server.Config().Host}},
		{"an authority that did not sign the server's certificate", stranger, []string{"certificate", server.Config().Host}},
		{"no listener", nowhere, []string{"https://127.0.0.1:1", "connection refused"}},
		{"the wrong protocol", plain, []string{plain.Host, "rejected our request"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			args := []string{"--kubeconfig", apiserver.Kubeconfig(t, test.config), "--node-name", "node"}
			once := start(t, append(args, "--once")...)
			if code := once.exit(t); code != 1 {
				t.Errorf("exit status with --once is %d, want 1", code)
			}
			once.stderr.wait(t, append(test.want, "kpng-json: ")...)
			if printed := once.stdout.String(); printed != "" {
				t.Errorf("printed:\n%s", printed)
			}
			start(t, args...).stderr.wait(t, quoted(test.want)...)
		})
	}
}

func TestOncePrintsEverythingOnce(t *testing.T) {
	t.Parallel()
	server := shared.Get(t)
	n := newTenant(t, server)
	web := newService("web", n.name, servicePort("", 80, 80))
	byHand := newService("by-hand", n.name, servicePort("", 80, 80))
	byHand.Spec.Selector = nil
	n.put(web, newSlice("web", web, slicePorts("", 80), newEndpoint("10.1.0.1", "")),
		byHand, newSlice("by-hand", newService("by-hand", ""), slicePorts("", 80), newEndpoint("10.1.0.2", "")))
	p := start(t, "--kubeconfig", apiserver.Kubeconfig(t, server.Config()), "--service-proxy-name", n.name, "--node-name", n.name, "--once")
	if code := p.exit(t); code != 0 {
		t.Errorf("exit status %d, want 0", code)
	}
	all, _ := p.stdout.since(0)
	if len(all) != 2 || !hasAll(all[0], []string{"by-hand", "10.1.0.2"}) || !hasAll(all[1], []string{"web", "10.1.0.1"}) {
		t.Errorf("printed:\n%s", p.stdout)
	}
}
