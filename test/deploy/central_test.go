// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/test/gotool"
)

// TestServerRelayAndNodeWorkTogether runs the three programs of the folder central with
// their arguments. Only addresses, ports, paths and the server's source differ. The node
// becomes ready when it has programmed the services that it got through the relay.
func TestServerRelayAndNodeWorkTogether(t *testing.T) {
	kpng := gotool.BuildOwn(t, "./cmd/kpng")
	args := map[string][]string{}
	for _, set := range daemonSets(t, "central") {
		args[set.Name] = set.Spec.Template.Spec.Containers[0].Args
	}
	tls := t.TempDir()
	certificates(t, tls)
	here := newNode(t)
	run := func(name string, extra []string, replace ...string) {
		t.Helper()
		replacer := strings.NewReplacer(append(replace, "/tls/", filepath.Join(tls, name)+"/", "0.0.0.0", "127.0.0.1")...)
		line := []string{kpng}
		for _, arg := range args[name] {
			line = append(line, replacer.Replace(arg))
		}
		here.start(t, append(line, extra...)...)
	}
	i := slices.Index(args["kpng-server"], "kube")
	args["kpng-server"] = slices.Replace(args["kpng-server"], i, i+1, "file", "--manifests=../../examples/demo.yaml")
	run("kpng-server", nil)
	// The relay gets other ports, because it runs beside the server here.
	run("kpng-relay", []string{"--api-tls-server-name=kpng-server.example"},
		"kpng-server.example:12090", "127.0.0.1:12090", ":1209", ":1309")
	run("kpng-nodes", []string{"--node-name=vm-002", "--api-tls-server-name=kpng-relay.example"},
		"kpng-relay.example:12090", "127.0.0.1:13090")
	here.await(t, "http://127.0.0.1:12091/readyz")
	here.await(t, "http://127.0.0.1:13091/readyz")
	here.await(t, "http://127.0.0.1:10256/readyz")
	if rules := here.Run(t, "nft", "list", "table", "inet", "kpng"); !strings.Contains(rules, "10.96.0.80") {
		t.Errorf("the node has not programmed the cluster IP of the service web:\n%s", rules)
	}
}

// certificates writes the content of the secrets that the folder central needs, each into
// a directory with the name of its DaemonSet.
func certificates(t *testing.T, dir string) {
	t.Helper()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	newKey := func() *ecdsa.PrivateKey {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		check(err)
		return key
	}
	write := func(file, kind string, content []byte) {
		check(os.MkdirAll(filepath.Dir(file), 0o755))
		check(os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: content}), 0o600))
	}
	authorityKey := newKey()
	authority := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"},
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	root, err := x509.CreateCertificate(rand.Reader, authority, authority, &authorityKey.PublicKey, authorityKey)
	check(err)
	for i, c := range []struct {
		name, host string
		usage      []x509.ExtKeyUsage
	}{
		{"kpng-server", "kpng-server.example", []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}},
		{"kpng-relay", "kpng-relay.example", []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}},
		{"kpng-nodes", "", []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}},
	} {
		key := newKey()
		template := &x509.Certificate{SerialNumber: big.NewInt(int64(i + 2)), Subject: pkix.Name{CommonName: c.name},
			NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: c.usage}
		if c.host != "" {
			template.DNSNames = []string{c.host}
		}
		certificate, err := x509.CreateCertificate(rand.Reader, template, authority, &key.PublicKey, authorityKey)
		check(err)
		encoded, err := x509.MarshalPKCS8PrivateKey(key)
		check(err)
		write(filepath.Join(dir, c.name, "ca.crt"), "CERTIFICATE", root)
		write(filepath.Join(dir, c.name, "tls.crt"), "CERTIFICATE", certificate)
		write(filepath.Join(dir, c.name, "tls.key"), "PRIVATE KEY", encoded)
	}
}
