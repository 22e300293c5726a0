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
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/test/internal/gotool"
	corev1 "k8s.io/api/core/v1"
)

// TestServerRelayAndNodeWorkTogether runs the three programs of the folder central with
// their arguments. Only addresses, ports, paths and the server's source differ. The node
// becomes ready when it has programmed the services that it got through the relay. Then
// clients with other certificates try to read without permission.
func TestServerRelayAndNodeWorkTogether(t *testing.T) {
	kpng := gotool.BuildOwn(t, "./cmd/kpng")
	args := map[string][]string{}
	for _, set := range daemonSets(t, "central") {
		args[set.Name] = set.Spec.Template.Spec.Containers[0].Args
	}
	files := t.TempDir()
	certificates(t, files)
	here := newNode(t)
	command := func(name string, args []string, replace ...string) []string {
		replacer := strings.NewReplacer(append(replace, "/tls/", filepath.Join(files, name)+"/", "/clients/", filepath.Join(files, "cluster")+"/",
			"/authority/", filepath.Join(files, "own")+"/", "/var/lib/kubelet/pki/", filepath.Join(files, "kubelet-vm-002")+"/", "0.0.0.0", "127.0.0.1")...)
		line := []string{kpng}
		for _, arg := range args {
			line = append(line, replacer.Replace(arg))
		}
		return line
	}
	run := func(name string, extra []string, replace ...string) {
		t.Helper()
		here.start(t, append(command(name, args[name], replace...), extra...)...)
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

	source := args["kpng-nodes"][:slices.Index(args["kpng-nodes"], "to-local")]
	view := func(node string) []string { return []string{"to-local", "json", "--once", "--node-name=" + node} }
	const relay, server = "127.0.0.1:13090", "127.0.0.1:12090"
	for _, test := range []struct {
		name, identity, address string
		target                  []string
		want                    string // in the error; empty if no error is expected
	}{
		{"a node reads its own view", "kubelet-vm-002", relay, view("vm-002"), ""},
		{"a node reads another node's view", "kubelet-vm-003", relay, view("vm-002"), `CN=system:node:vm-003 may not watch node "vm-002"`},
		{"a node reads the state of the cluster", "kubelet-vm-002", relay, []string{"to-file", "-"}, "unknown service"},
		{"a node reads from a server", "kubelet-vm-002", server, view("vm-002"), "code = Unavailable"},
		{"a relay reads a node's view", "kpng-relay", server, view("vm-002"), `may not watch node "vm-002"`},
		{"another client with the own authority reads the state of the cluster", "stranger", server, []string{"to-file", "-"}, "may not read"},
	} {
		host := "kpng-relay.example"
		if test.address == server {
			host = "kpng-server.example"
		}
		line := command("kpng-nodes", slices.Concat(source, test.target, []string{"--api-tls-server-name=" + host}),
			"kpng-relay.example:12090", test.address, "/var/lib/kubelet/pki/", filepath.Join(files, test.identity)+"/")
		var out []byte
		err := here.Do(func() (err error) {
			out, err = exec.CommandContext(t.Context(), line[0], line[1:]...).CombinedOutput()
			return err
		})
		if (err == nil) != (test.want == "") || !strings.Contains(string(out), test.want) {
			t.Errorf("%s: %v, want an error with %q:\n%s", test.name, err, test.want, out)
		}
	}
}

// TestFilesInArgumentsOfCentralAreMounted checks that each file that an argument names is in
// a read-only volume. A folder of the node has the same path in the container, because links
// in it may be absolute.
func TestFilesInArgumentsOfCentralAreMounted(t *testing.T) {
	for _, set := range daemonSets(t, "central") {
		pod := set.Spec.Template.Spec
		mounts := map[string]corev1.VolumeMount{} // by path
		for _, m := range pod.Containers[0].VolumeMounts {
			mounts[m.MountPath] = m
			for _, v := range pod.Volumes {
				if v.Name == m.Name && v.HostPath != nil && v.HostPath.Path != m.MountPath {
					t.Errorf("%s mounts %s of the node at %s", set.Name, v.HostPath.Path, m.MountPath)
				}
			}
		}
		used := map[string]bool{}
		for _, arg := range pod.Containers[0].Args {
			if _, file, ok := strings.Cut(arg, "=/"); ok {
				dir := filepath.Dir("/" + file)
				used[dir] = true
				if !mounts[dir].ReadOnly {
					t.Errorf("%s: %s is not in a read-only volume", set.Name, arg)
				}
			}
		}
		if len(used) != len(mounts) {
			t.Errorf("%s mounts %d volumes and uses %d", set.Name, len(mounts), len(used))
		}
	}
}

// authority signs certificates.
type authority struct {
	*x509.Certificate
	key *ecdsa.PrivateKey
}

// certificates writes the files of the volumes that the folder central needs. Each volume
// has its own directory. The authority "own" signs the certificates of servers and relays.
// The authority "cluster" signs the certificates of kubelets.
func certificates(t *testing.T, dir string) {
	t.Helper()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	write := func(file string, blocks ...*pem.Block) {
		t.Helper()
		var text []byte
		for _, b := range blocks {
			text = append(text, pem.EncodeToMemory(b)...)
		}
		file = filepath.Join(dir, file)
		check(os.MkdirAll(filepath.Dir(file), 0o755))
		check(os.WriteFile(file, text, 0o600))
	}
	serial := int64(0)
	// issue returns a certificate and its key. If signer is nil, issue makes a new
	// authority.
	issue := func(signer *authority, template *x509.Certificate) (*authority, []*pem.Block) {
		t.Helper()
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		check(err)
		serial++
		template.SerialNumber, template.NotAfter = big.NewInt(serial), time.Now().Add(time.Hour)
		if signer == nil {
			template.IsCA, template.BasicConstraintsValid, template.KeyUsage = true, true, x509.KeyUsageCertSign
			signer = &authority{template, key}
		}
		certificate, err := x509.CreateCertificate(rand.Reader, template, signer.Certificate, &key.PublicKey, signer.key)
		check(err)
		encoded, err := x509.MarshalPKCS8PrivateKey(key)
		check(err)
		return &authority{template, key}, []*pem.Block{{Type: "CERTIFICATE", Bytes: certificate}, {Type: "PRIVATE KEY", Bytes: encoded}}
	}
	server, client := x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth
	own, ownFiles := issue(nil, &x509.Certificate{Subject: pkix.Name{CommonName: "own"}})
	cluster, clusterFiles := issue(nil, &x509.Certificate{Subject: pkix.Name{CommonName: "cluster"}})
	write("own/ca.crt", ownFiles[0])
	write("cluster/ca.crt", clusterFiles[0])
	for name, template := range map[string]*x509.Certificate{
		"kpng-server": {DNSNames: []string{"kpng-server.example"}, ExtKeyUsage: []x509.ExtKeyUsage{server}},
		"kpng-relay":  {DNSNames: []string{"kpng-relay.example"}, ExtKeyUsage: []x509.ExtKeyUsage{server, client}},
		"stranger":    {ExtKeyUsage: []x509.ExtKeyUsage{client}},
	} {
		template.Subject.CommonName = name
		_, pair := issue(own, template)
		write(name+"/ca.crt", ownFiles[0])
		write(name+"/tls.crt", pair[0])
		write(name+"/tls.key", pair[1])
		write(name+"/kubelet-client-current.pem", pair...)
	}
	// The kubelet keeps its certificate and key in one file, and a link to it.
	for _, node := range []string{"vm-002", "vm-003"} {
		_, pair := issue(cluster, &x509.Certificate{Subject: pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}},
			ExtKeyUsage: []x509.ExtKeyUsage{client}})
		write("kubelet-"+node+"/kubelet-client-1.pem", pair...)
		check(os.Symlink(filepath.Join(dir, "kubelet-"+node, "kubelet-client-1.pem"), filepath.Join(dir, "kubelet-"+node, "kubelet-client-current.pem")))
	}
}
