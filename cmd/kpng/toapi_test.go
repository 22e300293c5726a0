// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// identity is a certificate with its key.
type identity struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// newIdentity returns a certificate signed by the argument authority. If authority is
// nil, it returns the certificate of a new certificate authority.
func newIdentity(t *testing.T, authority *identity, name string, organizations ...string) *identity {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()),
		Subject:      pkix.Name{CommonName: name, Organization: organizations},
		NotBefore:    time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		DNSNames:    []string{"localhost"},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	signer := &identity{template, key}
	if authority == nil {
		template.IsCA, template.BasicConstraintsValid, template.KeyUsage = true, true, x509.KeyUsageCertSign
	} else {
		signer = authority
	}
	der, err := x509.CreateCertificate(rand.Reader, template, signer.cert, key.Public(), signer.key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &identity{cert, key}
}

// flags writes the identity to files and returns flags that name the files.
func (i *identity) flags(t *testing.T, prefix string, authority *identity) []string {
	t.Helper()
	key, err := x509.MarshalPKCS8PrivateKey(i.key)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	var flags []string
	for name, block := range map[string]*pem.Block{
		"ca":   {Type: "CERTIFICATE", Bytes: authority.cert.Raw},
		"cert": {Type: "CERTIFICATE", Bytes: i.cert.Raw},
		"key":  {Type: "PRIVATE KEY", Bytes: key},
	} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
		flags = append(flags, "--"+prefix+"tls-"+name+"-file="+path)
	}
	return flags
}

func TestCertificatesLimitAccess(t *testing.T) {
	ca := newIdentity(t, nil, "authority")
	node := newIdentity(t, ca, "system:node:vm-002").flags(t, "api-", ca)
	reader := newIdentity(t, ca, "relay", "kpng:readers").flags(t, "api-", ca)
	stranger := newIdentity(t, newIdentity(t, nil, "another"), "system:node:vm-002").flags(t, "api-", ca)

	address := newSocket(t)
	server := append([]string{"file", "-i", demo, "to-api", "--listen", address, "--node-certificates", "--cluster-readers=kpng:readers"},
		newIdentity(t, ca, "server").flags(t, "", ca)...)
	start(t, server...)
	toJSON := func(node string) []string { return []string{"to-local", "json", "--once", "--node-name", node} }
	eventually(t, "the server answers", func() bool {
		_, err := execute(t.Context(), append(append([]string{"api", "--api", address}, node...), toJSON("vm-002")...)...)
		return err == nil
	})
	for _, test := range []struct {
		name   string
		flags  []string
		target []string
		want   string // substring of the error; empty if no error is expected
	}{
		{"a node may read its own view", node, toJSON("vm-002"), ""},
		{"a node may not read another node's view", node, toJSON("vm-003"), "vm-003"},
		{"a node may not read the cluster's state", node, []string{"to-file", "-"}, "may not read"},
		{"a cluster reader may read the cluster's state", reader, []string{"to-file", "-"}, ""},
		{"a certificate of another authority is refused", stranger, toJSON("vm-002"), "server " + address},
		{"a client without certificate is refused", nil, toJSON("vm-002"), "server " + address},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := execute(t.Context(), append(append([]string{"api", "--api", address}, test.flags...), test.target...)...)
			if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want one with %q", err, test.want)
			}
		})
	}
}

func TestInconsistentFlagsAreErrors(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	t.Setenv("HOME", t.TempDir())
	file := []string{"file", "-i", demo}
	toAPI := func(flags ...string) []string { return append(append(file[:3:3], "to-api"), flags...) }
	for _, test := range []struct {
		name string
		args []string
		want []string
	}{
		{"no source", nil, []string{"kpng needs a command", "kube"}},
		{"objects that no command lists", []string{"get", "pods", "-i", "F"}, []string{`kpng get has no command "pods"; use one of frontends, nodes, services; see kpng get --help`}},
		{"a misspelt command", []string{"explian", "web"}, []string{`kpng has no command "explian" (did you mean explain?)`}},
		{"a misspelt flag", []string{"get", "nodes", "--manifest=F"}, []string{"kpng get nodes has no flag --manifest (did you mean --manifests?); see kpng get nodes --help"}},
		{"two services", []string{"get", "services", "-i", demo, "a", "b"}, []string{`takes at most one argument, [[NAMESPACE/]NAME], but got 2: ["a" "b"]`}},
		{"a format that no list has", []string{"get", "nodes", "-i", demo, "-o", "xml"}, []string{`--output "xml" is not wide, json, yaml or name`}},
		{"two sources", []string{"get", "nodes", "-i", demo, "--kubeconfig=x"}, []string{"[kubeconfig manifests]"}},
		{"a port that does not exist", []string{"explain", "-i", demo, "10.96.0.1:99999"}, []string{"99999"}},
		{"a protocol that does not exist", []string{"explain", "-i", demo, "10.96.0.1:80/http"}, []string{"http"}},
		{"a dataplane that cannot be shown", []string{"explain", "-i", demo, "--node-name=vm-001", "--dataplane=json", "10.96.0.1:80"}, []string{`--dataplane "json"`}},
		{"an empty node name", []string{"explain", "-i", demo, "--node-name=", "web"}, []string{"--node-name is empty"}},
		{"a status in a wrong format", []string{"status", "-o", "html"}, []string{`--output "html"`}},
		{"a status of half a service", []string{"status", "default/"}, []string{"default/"}},
		{"a backend to clean up that does not exist", []string{"cleanup", "nftable"}, []string{`kpng cleanup has no command "nftable"`}},
		{"a duration without unit", append(file[:3:3], "to-local", "json", "--min-sync-interval=5"), []string{`--min-sync-interval "5": want a duration such as 30s or 5m`}},
		{"no folder", []string{"man"}, []string{"kpng man needs an argument: FOLDER; see kpng man --help"}},
		{"a verbosity that is not a number", toAPI("-v", "x"), []string{`-v "x": want a number`}},
		{"an argument that should be a flag", toAPI("tcp://127.0.0.1:1"), []string{`takes no arguments, but got "tcp://127.0.0.1:1"`}},
		{"an invalid source", []string{"etcd"}, []string{`"etcd"`, "kube"}},
		{"no target", file, []string{"kpng file needs a command", "to-api"}},
		{"an invalid target", append(file[:3:3], "to-cloud"), []string{`"to-cloud"`, "to-local"}},
		{"no backend", append(file[:3:3], "to-local"), []string{"to-local needs a command", "json"}},
		{"an invalid backend", append(file[:3:3], "to-local", "smoke"), []string{`"smoke"`, "json"}},
		{"no manifests", []string{"file", "to-api"}, []string{"manifests"}},
		{"an empty path of manifests", []string{"file", "-i", "", "to-api"}, []string{"manifests", "empty"}},
		{"missing manifests", []string{"file", "-i", "/does/not/exist.yaml", "to-api", "--listen", "tcp://127.0.0.1:0"}, []string{"/does/not/exist.yaml"}},
		{"a missing kubeconfig", []string{"kube", "--kubeconfig=/does/not/exist", "to-api", "--listen", "tcp://127.0.0.1:0"}, []string{"/does/not/exist"}},
		{"no API server", []string{"kube", "to-file", "-"}, []string{"no API server known"}},
		{"an address of another machine in plaintext", toAPI("--listen", "tcp://0.0.0.0:0"), []string{"TLS"}},
		{"an empty server address", []string{"api", "--api=", "to-file", "-"}, []string{"--api", "empty"}},
		{"a server on another machine in plaintext", []string{"api", "--api", "tcp://192.0.2.1:1", "to-api", "--listen", "tcp://127.0.0.1:0"}, []string{"192.0.2.1", "TLS"}},
		{"an invalid address", toAPI("--listen", "somewhere"), []string{"--listen", `"somewhere"`}},
		{"no address", toAPI("--listen", ""), []string{"--listen", "empty"}},
		{"an invalid mode", toAPI("--socket-mode", "rw"), []string{"--socket-mode", `"rw"`}},
		{"a missing folder", toAPI("--listen", "unix:///does/not/exist/s"), []string{"/does/not/exist"}},
		{"an incomplete set of TLS files", toAPI("--tls-ca-file", "x"), []string{"--tls-key-file"}},
		{"missing certificates", toAPI("--listen=tcp://127.0.0.1:0", "--tls-ca-file=x", "--tls-cert-file=/does/not/exist", "--tls-key-file=x"), []string{"/does/not/exist"}},
		{"node certificates without TLS", toAPI("--node-certificates"), []string{"--node-certificates", "--tls-ca-file"}},
		{"readers without TLS", toAPI("--cluster-readers=x"), []string{"--cluster-readers", "--tls-ca-file"}},
		{"a limit of zero", toAPI("--max-connections=0"), []string{"--max-connections"}},
		{"a negative rate", toAPI("--stream-rate=-1"), []string{"--stream-rate"}},
		{"an invalid proxy name", append(file[:3:3], "--service-proxy-name=a b", "to-file", "-"), []string{"a b"}},
		{"a file of another kind", append(file[:3:3], "to-file", "state.txt"), []string{"state.txt", ".yaml"}},
		{"no file", append(file[:3:3], "to-file"), []string{"to-file needs an argument: FILE"}},
		{"a negative write interval", append(file[:3:3], "to-file", "x.yaml", "--min-write-interval=-1s"), []string{"--min-write-interval"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := execute(t.Context(), test.args...)
			if err == nil {
				t.Fatal("no error")
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not name %q", err, want)
				}
			}
		})
	}
}

// freeAddress returns an unused loopback address.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// get returns the status code and the body of an answer, or 0 if no server answers.
func get(t *testing.T, url string) (int, string) {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Get(url)
	if err != nil {
		return 0, ""
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer.StatusCode, string(body)
}

func TestServerHealthAndMetrics(t *testing.T) {
	socket, status := newSocket(t), freeAddress(t)
	// No server listens on the socket yet, so the relay is not ready.
	start(t, "api", "--api", socket, "to-api", "--listen", "tcp://"+freeAddress(t), "--healthz-bind-address", status, "--metrics-bind-address", status)
	eventually(t, "the server is alive", func() bool { code, _ := get(t, "http://"+status+"/livez"); return code == 200 })
	for _, path := range []string{"/healthz", "/readyz"} {
		if code, body := get(t, "http://"+status+path); code != 503 {
			t.Errorf("%s without a source: status %d, want 503: %s", path, code, body)
		}
	}
	start(t, "file", "-i", demo, "to-api", "--listen", socket)
	eventually(t, "the server is ready", func() bool { code, _ := get(t, "http://"+status+"/readyz"); return code == 200 })
	if _, body := get(t, "http://"+status+"/metrics"); !strings.Contains(body, "\nkpng_server_streams 0\n") {
		t.Errorf("no metrics of the server in\n%s", body)
	} else if !strings.Contains(body, "\nkpng_build_info{") || !strings.Contains(body, "\n# TYPE kpng_source_synced") {
		t.Errorf("no metrics of the process in\n%s", body)
	}
	for path, want := range map[string]string{
		"/statusz": "\nUp: ",
		"/flagz":   "\napi=[" + socket + "]\n",
		"/configz": `"metrics-bind-address":"` + status + `"`,
	} {
		if code, body := get(t, "http://"+status+path); code != 200 || !strings.Contains(body, want) {
			t.Errorf("%s: status %d, want %q in\n%s", path, code, want, body)
		}
	}
}
