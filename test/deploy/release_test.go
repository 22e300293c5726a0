// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

var arch = flag.String("arch", "arm64", "the architecture for Linux that TestRelease makes; containers run if it is that of this machine")

// TestRelease makes the files of a release of the current commit twice, with different
// settings of the machine, and examines them.
func TestRelease(t *testing.T) {
	key := filepath.Join(t.TempDir(), "key")
	command(t, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
	goenv := filepath.Join(t.TempDir(), "env")
	settings := "GOFLAGS=-buildvcs=false -tags=other\nGOAMD64=v3\nGOARM64=v8.1\nCGO_ENABLED=1\n"
	for _, name := range []string{"GOPROXY", "GOSUMDB", "GOCACHE", "GOMODCACHE"} { // the test needs these
		settings += name + "=" + goEnv(t, name) + "\n"
	}
	if err := os.WriteFile(goenv, []byte(settings), 0o644); err != nil {
		t.Fatal(err)
	}
	// The check of updates depends on releases of other projects.
	env := []string{"PLATFORMS=linux/" + *arch + " windows/amd64", "SIGNING_KEY=" + key, "SKIP=updates"}
	first := release(t, "022", append(env, "GOVULNDB="+vulnerabilities(t, "example.com/other", "F")))
	second := release(t, "077", append(env, "SKIP=updates vulnerabilities", "GOENV="+goenv, "GOAMD64=v2", "GOEXPERIMENT=jsonv2", "TZ=Asia/Tokyo", "LC_ALL=C.UTF-8", "HOME="+t.TempDir()))
	if sums := read(t, first, "SHA256SUMS"); sums != read(t, second, "SHA256SUMS") {
		t.Errorf("two builds differ:\n%s\n%s", sums, read(t, second, "SHA256SUMS"))
	}
	check := exec.Command("sha256sum", "--check", "--strict", "SHA256SUMS")
	check.Dir = first
	if out, err := check.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}

	t.Run("signature", func(t *testing.T) {
		public, err := os.ReadFile(key + ".pub")
		if err != nil {
			t.Fatal(err)
		}
		signers := filepath.Join(t.TempDir(), "signers")
		if err := os.WriteFile(signers, append([]byte("maintainer "), public...), 0o644); err != nil {
			t.Fatal(err)
		}
		verify := func(text string) error {
			cmd := exec.Command("ssh-keygen", "-Y", "verify", "-f", signers, "-I", "maintainer", "-n", "kpng-release",
				"-s", filepath.Join(first, "SHA256SUMS.sig"))
			cmd.Stdin = strings.NewReader(text)
			return cmd.Run()
		}
		sums := read(t, first, "SHA256SUMS")
		if err := verify(sums); err != nil {
			t.Errorf("verify the signature: %v", err)
		}
		if err := verify(sums + "\n"); err == nil {
			t.Error("the signature is valid for a changed file")
		}
	})

	programs, err := filepath.Glob(filepath.Join(first, "kpng-*-windows-amd64.tar.gz"))
	if err != nil || len(programs) != 1 {
		t.Fatalf("archives for Windows: %v (%v)", programs, err)
	}
	prefix, _ := strings.CutSuffix(filepath.Base(programs[0]), "-windows-amd64.tar.gz")
	version := strings.TrimPrefix(prefix, "kpng-")
	linux, iptables := prefix+"-linux-"+*arch, "kpng-iptables-"+version+"-linux-"+*arch
	want := []string{
		"SHA256SUMS", "SHA256SUMS.sig", prefix + ".intoto.jsonl", "kpng-chart-" + strings.TrimPrefix(version, "v") + ".tgz",
		linux + ".cdx.json", linux + ".tar.gz", iptables + ".cdx.json",
		prefix + "-windows-amd64.cdx.json", prefix + "-windows-amd64.tar.gz",
	}
	for _, image := range []string{"kpng", "kpng-iptables", "kpng-windows"} {
		want = append(want, image+"-"+version+"-image.tar", image+"-"+version+"-image.digest")
	}
	slices.Sort(want)
	var names []string
	files, err := os.ReadDir(first)
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		names = append(names, file.Name())
	}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Fatalf("files (-want +got):\n%s", diff)
	}

	archive := unpack(t, filepath.Join(first, linux+".tar.gz"))
	program := archive[linux+"/kpng"]
	windows := unpack(t, filepath.Join(first, prefix+"-windows-amd64.tar.gz"))
	if windows[prefix+"-windows-amd64/kpng.exe"] == nil {
		t.Error("no kpng.exe in the archive for Windows")
	}

	info, err := buildinfo.Read(bytes.NewReader(program))
	if err != nil {
		t.Fatal(err)
	}
	if info.Main.Version != version {
		t.Errorf("the program has version %s, and the files %s", info.Main.Version, version)
	}
	linked, pinned := map[string]string{"stdlib": strings.TrimPrefix(info.GoVersion, "go")}, pinnedModules(t)
	for _, m := range info.Deps {
		linked[m.Path] = m.Version
		if pinned[m.Path] != m.Version {
			t.Errorf("the program has %s %s, and hack/release.mod requires %s", m.Path, m.Version, pinned[m.Path])
		}
	}

	var linkedPackages []string // Debian packages in the image kpng-iptables
	t.Run("bill of materials", func(t *testing.T) {
		type component struct {
			Ref           string `json:"bom-ref"`
			Name, Version string
			Hashes        []struct{ Alg, Content string }
			Licenses      []struct{ License struct{ ID, Name string } }
			Properties    []struct{ Name, Value string }
		}
		type bill struct {
			SerialNumber string
			Metadata     struct {
				Timestamp string
				Supplier  struct{ Name string }
				Component component
			}
			Components   []component
			Dependencies []struct {
				Ref       string
				DependsOn []string
			}
		}
		readBill := func(name string) (b bill) {
			if err := json.Unmarshal([]byte(read(t, first, name+".cdx.json")), &b); err != nil {
				t.Fatal(err)
			}
			return b
		}
		bom, withPackages := readBill(linux), readBill(iptables)
		sum := sha256.Sum256(program)
		if got := bom.Metadata.Component.Hashes; len(got) != 1 || got[0].Content != hex.EncodeToString(sum[:]) {
			t.Errorf("hashes of the program: %v", got)
		}
		if _, err := time.Parse(time.RFC3339, bom.Metadata.Timestamp); err != nil || bom.Metadata.Supplier.Name == "" || bom.SerialNumber == "" {
			t.Errorf("metadata %+v (%v)", bom.Metadata, err)
		}
		got, refs := map[string]string{}, map[string]bool{}
		for _, c := range append(bom.Components, bom.Metadata.Component) {
			refs[c.Ref] = true
			if len(c.Licenses) == 0 || c.Name != "stdlib" && len(c.Hashes) != 1 {
				t.Errorf("%s has licences %v and hashes %v", c.Name, c.Licenses, c.Hashes)
			}
		}
		for _, c := range bom.Components {
			got[c.Name] = c.Version
			if c.Name != "stdlib" && (len(c.Properties) != 1 || !strings.HasPrefix(c.Properties[0].Value, "h1:")) {
				t.Errorf("properties of %s: %v", c.Name, c.Properties)
			}
		}
		for _, c := range withPackages.Components[len(bom.Components):] {
			if !strings.HasPrefix(c.Ref, "pkg:deb/debian/"+c.Name+"@") || len(c.Hashes) != 1 || len(c.Licenses) == 0 {
				t.Errorf("package %+v", c)
			}
			linkedPackages = append(linkedPackages, c.Name)
		}
		if withPackages.SerialNumber == bom.SerialNumber || !slices.Contains(linkedPackages, "libxtables12") || len(withPackages.Dependencies[0].DependsOn) != len(bom.Dependencies[0].DependsOn)+len(linkedPackages) {
			t.Errorf("bill %s with packages %v, direct dependencies %v", withPackages.SerialNumber, linkedPackages, withPackages.Dependencies[0].DependsOn)
		}
		if diff := cmp.Diff(linked, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		used := map[string]bool{bom.Metadata.Component.Ref: true}
		for _, d := range bom.Dependencies {
			for _, ref := range d.DependsOn {
				used[ref] = true
			}
		}
		if diff := cmp.Diff(refs, used); diff != "" || len(bom.Dependencies) != len(refs) {
			t.Errorf("components and dependencies (-want +got):\n%s", diff)
		}
	})

	t.Run("licences", func(t *testing.T) {
		text := string(archive[linux+"/THIRD-PARTY-LICENSES"])
		for module, version := range linked {
			if !strings.Contains(text, "\n"+module+" "+version+"\n") {
				t.Errorf("no licence of %s %s", module, version)
			}
		}
		for _, part := range []string{"The Go Authors", "Mozilla Public License", "SoundCloud Ltd."} {
			if !strings.Contains(text, part) {
				t.Errorf("the licences do not contain %q", part)
			}
		}
		if archive[linux+"/LICENSE"] == nil {
			t.Error("the archive has no licence of kpng")
		}
	})

	t.Run("provenance", func(t *testing.T) {
		var statement struct {
			Subject []struct {
				Name   string
				Digest map[string]string
			}
			Predicate struct {
				BuildDefinition struct {
					ResolvedDependencies []struct {
						Name   string
						Digest map[string]string
					}
				}
			}
		}
		if err := json.Unmarshal([]byte(read(t, first, prefix+".intoto.jsonl")), &statement); err != nil {
			t.Fatal(err)
		}
		commit, err := exec.CommandContext(t.Context(), "git", "rev-parse", "HEAD").Output()
		if err != nil {
			t.Fatal(err)
		}
		from := statement.Predicate.BuildDefinition.ResolvedDependencies
		if len(from) != 1+len(linkedPackages) || from[0].Digest["gitCommit"] != strings.TrimSpace(string(commit)) {
			t.Errorf("made from %v", from)
		}
		sums := read(t, first, "SHA256SUMS")
		if len(statement.Subject) != strings.Count(sums, "\n")-1 { // without itself
			t.Errorf("%d subjects", len(statement.Subject))
		}
		for _, s := range statement.Subject {
			if !strings.Contains(sums, s.Digest["sha256"]+"  "+s.Name+"\n") {
				t.Errorf("SHA256SUMS has no %+v", s)
			}
		}
	})

	images := map[string]string{} // digests
	for _, name := range []string{"kpng", "kpng-iptables", "kpng-windows"} {
		file := filepath.Join(first, name+"-"+version+"-image.tar")
		images[name] = strings.TrimSpace(read(t, first, name+"-"+version+"-image.digest"))
		t.Run("image "+name, func(t *testing.T) {
			// skopeo uploads the manifest that it reads.
			raw, err := exec.CommandContext(t.Context(), "skopeo", "inspect", "--raw", "oci-archive:"+file).Output()
			if err != nil {
				t.Fatal(err)
			}
			if sum := sha256.Sum256(raw); "sha256:"+hex.EncodeToString(sum[:]) != images[name] {
				t.Errorf("skopeo reads an image with the digest %x, and the file has %s", sum, images[name])
			}
			got := imageFiles(t, file)
			if name == "kpng-windows" {
				if !bytes.Equal(got["Files/kpng/kpng.exe"], windows[prefix+"-windows-amd64/kpng.exe"]) || got["Files/licenses/THIRD-PARTY-LICENSES"] == nil {
					t.Error("the image has not the files of the archive")
				}
				for _, hive := range []string{"DEFAULT", "SAM", "SECURITY", "SOFTWARE", "SYSTEM"} {
					if !bytes.HasPrefix(got["Files/Windows/System32/config/"+hive], []byte("regf")) {
						t.Errorf("no registry %s", hive)
					}
				}
				return
			}
			if !bytes.Equal(got["kpng"], program) {
				t.Error("the image and the archive have different programs")
			}
			if !bytes.Equal(got["licenses/THIRD-PARTY-LICENSES"], archive[linux+"/THIRD-PARTY-LICENSES"]) || got["licenses/LICENSE"] == nil {
				t.Error("the image has no licences")
			}
			if n := bytes.Count(got["etc/ssl/certs/ca-certificates.crt"], []byte("BEGIN CERTIFICATE")); n < 50 {
				t.Errorf("the image has %d certificates of authorities", n)
			}
			for _, name := range linkedPackages {
				if has := got["usr/share/doc/"+name+"/copyright"] != nil; has != (got["usr/sbin/ipset"] != nil) {
					t.Errorf("copyright of %s: %v", name, has)
				}
			}
		})
	}

	t.Run("documented commands", func(t *testing.T) {
		_, section, _ := strings.Cut(read(t, "../../docs/operate", "install.md"), "\n## Verify a release\n")
		section, _, _ = strings.Cut(section, "\n## ")
		script := "set -euo pipefail\n"
		for line := range strings.Lines(section) {
			if strings.HasPrefix(line, "    ") {
				script += line
			}
		}
		signers := filepath.Join(t.TempDir(), "signers")
		if err := os.WriteFile(signers, []byte("maintainer "+read(t, filepath.Dir(key), "key.pub")), 0o644); err != nil {
			t.Fatal(err)
		}
		script = strings.NewReplacer("VERSION", version, "linux-amd64", "linux-"+*arch, "SIGNERS", signers, "NAME", "maintainer").Replace(script)
		cmd := exec.CommandContext(t.Context(), "bash", "-c", script)
		cmd.Dir = first
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		sum := sha256.Sum256(program)
		for text, n := range map[string]int{
			strings.TrimPrefix(images["kpng"], "sha256:"): 3, // file, skopeo, chart
			hex.EncodeToString(sum[:]):                    2, // program, bill of materials
		} {
			if got := strings.Count(string(out), text); got != n {
				t.Errorf("the commands print %s %d times, want %d:\n%s", text, got, n, out)
			}
		}
	})

	t.Run("containerd", func(t *testing.T) { testContainerd(t, first, version, images) })

	t.Run("chart", func(t *testing.T) {
		file := filepath.Join(first, "kpng-chart-"+strings.TrimPrefix(version, "v")+".tgz")
		chart, err := loader.Load(file)
		if err != nil {
			t.Fatal(err)
		}
		if chart.Metadata.AppVersion != version {
			t.Errorf("appVersion %s, want %s", chart.Metadata.AppVersion, version)
		}
		for values, want := range map[string]string{
			"backend: nftables":                          "kpng:" + version + "@" + images["kpng"],
			"backend: ipvs":                              "kpng:" + version + "@" + images["kpng"],
			"backend: ebpf":                              "kpng:" + version + "@" + images["kpng"],
			"backend: iptables":                          "kpng-iptables:" + version + "@" + images["kpng-iptables"],
			"backend: kernelspace":                       "kpng-windows:" + version + "@" + images["kpng-windows"],
			"image: {repository: registry.example/kpng}": "registry.example/kpng:" + version + "@" + images["kpng"],
			"image: {tag: own}":                          "kpng:own",
			"image: {tag: own, digest: \"sha256:" + strings.Repeat("0", 64) + "\"}": "kpng@sha256:" + strings.Repeat("0", 64),
			"kernelSettings: true": "kpng:" + version + "@" + images["kpng"],
		} {
			objects, err := renderChartFile(t, file, "example", parseYAML(t, "apiServer: {host: api.example}\n"+values))
			if err != nil {
				t.Fatal(err)
			}
			set := byName(objects)["DaemonSet example"].(map[string]any)
			for _, kind := range []string{"containers", "initContainers"} {
				containers, _, _ := unstructured.NestedSlice(set, "spec", "template", "spec", kind)
				for _, c := range containers {
					if got := c.(map[string]any)["image"]; got != want {
						t.Errorf("%s: image %v, want %s", values, got, want)
					}
				}
			}
		}
	})
}

// imageFiles returns the files of an image with one platform. The argument file is an
// uncompressed archive of an OCI layout.
func imageFiles(t *testing.T, file string) map[string][]byte {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	layout := untar(t, content)
	type descriptor struct {
		MediaType, Digest string
		Size              int
	}
	blob := func(d descriptor) []byte {
		content := layout["blobs/"+strings.Replace(d.Digest, ":", "/", 1)]
		if sum := sha256.Sum256(content); "sha256:"+hex.EncodeToString(sum[:]) != d.Digest || len(content) != d.Size {
			t.Fatalf("the layout does not have %+v", d)
		}
		return content
	}
	var image struct {
		Manifests []descriptor
		Config    descriptor
		Layers    []descriptor
	}
	for text := layout["index.json"]; image.Layers == nil; text = blob(image.Manifests[0]) {
		if err := json.Unmarshal(text, &image); err != nil {
			t.Fatal(err)
		}
		if image.Layers == nil && len(image.Manifests) != 1 {
			t.Fatalf("%d manifests", len(image.Manifests))
		}
	}
	var config struct {
		RootFS struct {
			DiffIDs []string `json:"diff_ids"`
		}
	}
	if err := json.Unmarshal(blob(image.Config), &config); err != nil {
		t.Fatal(err)
	}
	files := map[string][]byte{}
	for i, d := range image.Layers {
		layer := gunzip(t, blob(d))
		if sum := sha256.Sum256(layer); config.RootFS.DiffIDs[i] != "sha256:"+hex.EncodeToString(sum[:]) {
			t.Errorf("layer %d is not that of the configuration", i)
		}
		for name, content := range untar(t, layer) {
			files[name] = content
		}
	}
	return files
}

// testContainerd imports the images of a release into a containerd of its own, as on a node
// without a network. If the images are for this machine, it runs them.
func testContainerd(t *testing.T, release, version string, images map[string]string) {
	dir, err := os.MkdirTemp("", "containerd") // short, because the path of a socket is limited
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "socket")
	config := fmt.Sprintf("version = 2\nroot = %q\nstate = %q\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n[grpc]\naddress = %q\n",
		filepath.Join(dir, "root"), filepath.Join(dir, "state"), socket)
	if err := os.WriteFile(filepath.Join(dir, "config.toml"), []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	daemon := exec.Command("containerd", "--config", filepath.Join(dir, "config.toml"))
	var log bytes.Buffer
	daemon.Stdout, daemon.Stderr = &log, &log
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { daemon.Wait(); close(ended) }()
	t.Cleanup(func() {
		daemon.Process.Signal(os.Interrupt)
		<-ended
		if t.Failed() {
			t.Log(log.String())
		}
	})
	ctr := func(args ...string) (string, error) {
		out, err := exec.Command("ctr", append([]string{"--address", socket, "--namespace", "k8s.io"}, args...)...).CombinedOutput()
		return string(out), err
	}
	for {
		if _, err := ctr("version"); err == nil {
			break
		}
		select {
		case <-ended:
			t.Fatal("containerd ended")
		case <-time.After(100 * time.Millisecond):
		}
	}

	want := map[string]bool{}
	for name, digest := range images {
		platform := "linux/" + *arch
		if name == "kpng-windows" {
			platform = "windows/amd64"
		}
		args := []string{"images", "import", "--digests", "--base-name", "registry.example/" + name, "--platform", platform}
		if platform != "linux/"+runtime.GOARCH {
			args = append(args, "--no-unpack")
		}
		if out, err := ctr(append(args, filepath.Join(release, name+"-"+version+"-image.tar"))...); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		want["docker.io/library/"+name+":"+version] = true
		want["registry.example/"+name+"@"+digest] = true
	}
	list, err := ctr("images", "ls", "-q")
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]bool{}
	for _, name := range strings.Fields(list) {
		got[name] = true
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("images (-want +got):\n%s", diff)
	}
	if *arch != runtime.GOARCH {
		return
	}

	const service = `
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec: {clusterIP: 192.0.2.1, clusterIPs: [192.0.2.1], ports: [{port: 80}]}
`
	if err := os.WriteFile(filepath.Join(dir, "service.yaml"), []byte(service), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "lock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for id, args := range map[string][]string{
		"nftables": {"kpng", "nftables"},
		"nft":      {"kpng-iptables", "iptables", "--iptables-flavour=nft"},
		"legacy":   {"kpng-iptables", "iptables", "--iptables-flavour=legacy"},
	} {
		// As in the DaemonSet, but in a network namespace of its own.
		run := []string{
			"run", "--rm", "--read-only", "--cap-add", "CAP_NET_ADMIN", "--cap-add", "CAP_NET_RAW",
			"--mount", "type=bind,src=" + dir + "/service.yaml,dst=/service.yaml,options=rbind:ro",
			"--mount", "type=bind,src=" + dir + "/lock,dst=/run/xtables.lock,options=rbind:rw",
			"docker.io/library/" + args[0] + ":" + version, id,
			"/kpng", "file", "-i", "/service.yaml", "--node-name=node", "to-local", args[1], "--once",
		}
		if out, err := ctr(append(run, args[2:]...)...); err != nil || !strings.Contains(out, "Delivered all services") {
			t.Errorf("%s: %v\n%s", id, err, out)
		}
	}
}

// TestReleaseStopsOnVulnerabilities tests hack/release without a database, and with a
// database that lists a vulnerable function. kpng calls this function.
func TestReleaseStopsOnVulnerabilities(t *testing.T) {
	for name, test := range map[string]struct{ database, want string }{
		"vulnerability": {vulnerabilities(t, "k8s.io/klog/v2", "FromContext"), "GO-2026-0001"},
		"no database":   {"file:///nonexistent", "to make a release without it: SKIP=vulnerabilities"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), "../../hack/release", t.TempDir())
			cmd.Env = append(os.Environ(), "PLATFORMS=linux/arm64", "GOVULNDB="+test.database)
			if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), test.want) {
				t.Errorf("%v, without %q:\n%s", err, test.want, out)
			}
		})
	}
}

// vulnerabilities returns the URL of a vulnerability database with one vulnerability, in a
// function of a module.
func vulnerabilities(t *testing.T, module, function string) string {
	t.Helper()
	dir := t.TempDir()
	const id = `"id":"GO-2026-0001","modified":"2026-01-01T00:00:00Z"`
	for name, text := range map[string]string{
		"index/db.json":      `{"modified":"2026-01-01T00:00:00Z"}`,
		"index/vulns.json":   `[{` + id + `}]`,
		"index/modules.json": `[{"path":"` + module + `","vulns":[{` + id + `}]}]`,
		"ID/GO-2026-0001.json": `{"schema_version":"1.3.1",` + id + `,"summary":"a test",
			"database_specific":{"url":"https://example.com"},"affected":[{
			"package":{"name":"` + module + `","ecosystem":"Go"},
			"ranges":[{"type":"SEMVER","events":[{"introduced":"0"}]}],
			"ecosystem_specific":{"imports":[{"path":"` + module + `","symbols":["` + function + `"]}]}}]}`,
	} {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return "file://" + dir
}

// release runs hack/release and returns the directory with the release.
func release(t *testing.T, umask string, env []string) string {
	t.Helper()
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "sh", "-c", `umask "$1" && exec ../../hack/release "$2"`, "sh", umask, dir)
	cmd.Env = append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("hack/release: %v\n%s", err, out)
	}
	return dir
}

// pinnedModules returns the versions of the modules in a release.
func pinnedModules(t *testing.T) map[string]string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-modfile=hack/release.mod", "-m", "-f", "{{.Path}} {{.Version}}", "all")
	cmd.Dir = "../.."
	text, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	versions := map[string]string{}
	for line := range strings.Lines(string(text)) {
		path, version, _ := strings.Cut(strings.TrimSpace(line), " ")
		versions[path] = version
	}
	return versions
}

func goEnv(t *testing.T, name string) string {
	t.Helper()
	value, err := exec.CommandContext(t.Context(), "go", "env", name).Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(value))
}

func command(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

func read(t *testing.T, dir, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// unpack returns the files in a compressed archive.
func unpack(t *testing.T, archive string) map[string][]byte {
	t.Helper()
	compressed, err := os.ReadFile(archive)
	if err != nil {
		t.Fatal(err)
	}
	return untar(t, gunzip(t, compressed))
}

func gunzip(t *testing.T, compressed []byte) []byte {
	t.Helper()
	r, err := gzip.NewReader(bytes.NewReader(compressed))
	if err != nil {
		t.Fatal(err)
	}
	content, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

func untar(t *testing.T, archive []byte) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	for r := tar.NewReader(bytes.NewReader(archive)); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err == nil && header.Typeflag == tar.TypeReg {
			files[header.Name], err = io.ReadAll(r)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}
