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
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
)

// TestRelease makes the files of a release of the current commit twice, with different
// settings of the machine, and examines them.
func TestRelease(t *testing.T) {
	key := filepath.Join(t.TempDir(), "key")
	command(t, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
	goenv := filepath.Join(t.TempDir(), "env")
	settings := "GOFLAGS=-buildvcs=false -tags=other\nGOAMD64=v3\nGOARM64=v8.1\nCGO_ENABLED=1\n"
	for _, name := range []string{"GOPROXY", "GOSUMDB"} { // the test needs these
		settings += name + "=" + goEnv(t, name) + "\n"
	}
	if err := os.WriteFile(goenv, []byte(settings), 0o644); err != nil {
		t.Fatal(err)
	}
	// The step "cross-compilation" of hack/test has compiled the packages for these
	// platforms. The check of updates depends on what others publish.
	env := []string{"PLATFORMS=linux/arm64 windows/amd64", "SIGNING_KEY=" + key, "SKIP=updates"}
	first := release(t, "022", append(env, "GOVULNDB="+vulnerabilities(t, "example.com/other", "F")))
	second := release(t, "077", append(env, "SKIP=updates vulnerabilities", "GOENV="+goenv, "GOAMD64=v2", "GOEXPERIMENT=jsonv2", "TZ=Asia/Tokyo", "LC_ALL=C.UTF-8"))
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

	var names []string
	files, err := os.ReadDir(first)
	if err != nil {
		t.Fatal(err)
	}
	version := ""
	for _, file := range files {
		if v, ok := strings.CutSuffix(file.Name(), "-image.digest"); ok {
			version = strings.TrimPrefix(v, "kpng-")
		}
		names = append(names, file.Name())
	}
	want := []string{
		"SHA256SUMS", "SHA256SUMS.sig", "kpng-" + version + ".intoto.jsonl", "kpng-" + version + "-image.digest", "kpng-" + version + "-image.tar.gz",
		"kpng-" + version + "-linux-arm64.cdx.json", "kpng-" + version + "-linux-arm64.tar.gz",
		"kpng-" + version + "-windows-amd64.cdx.json", "kpng-" + version + "-windows-amd64.tar.gz",
		"kpng-chart-" + strings.TrimPrefix(version, "v") + ".tgz",
	}
	slices.Sort(want)
	if diff := cmp.Diff(want, names); diff != "" {
		t.Fatalf("files (-want +got):\n%s", diff)
	}

	prefix := "kpng-" + version
	archive := unpack(t, filepath.Join(first, prefix+"-linux-arm64.tar.gz"))
	program := archive[prefix+"-linux-arm64/kpng"]
	if unpack(t, filepath.Join(first, prefix+"-windows-amd64.tar.gz"))[prefix+"-windows-amd64/kpng.exe"] == nil {
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

	t.Run("bill of materials", func(t *testing.T) {
		type component struct {
			Ref           string `json:"bom-ref"`
			Name, Version string
			Hashes        []struct{ Alg, Content string }
			Licenses      []struct{ License struct{ ID string } }
		}
		var bom struct {
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
		if err := json.Unmarshal([]byte(read(t, first, prefix+"-linux-arm64.cdx.json")), &bom); err != nil {
			t.Fatal(err)
		}
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
		text := string(archive[prefix+"-linux-arm64/THIRD-PARTY-LICENSES"])
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
		if archive[prefix+"-linux-arm64/LICENSE"] == nil {
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
					ResolvedDependencies []struct{ Digest map[string]string }
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
		if len(from) != 1 || from[0].Digest["gitCommit"] != strings.TrimSpace(string(commit)) {
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

	t.Run("image", func(t *testing.T) {
		layout := unpack(t, filepath.Join(first, prefix+"-image.tar.gz"))
		type descriptor struct {
			MediaType, Digest string
			Size              int
			Platform          map[string]string
		}
		blob := func(d descriptor) []byte {
			content := layout["blobs/"+strings.Replace(d.Digest, ":", "/", 1)]
			if sum := sha256.Sum256(content); "sha256:"+hex.EncodeToString(sum[:]) != d.Digest || len(content) != d.Size {
				t.Fatalf("the layout does not have %+v", d)
			}
			return content
		}
		var top, index struct{ Manifests []descriptor }
		var manifest struct {
			Config descriptor
			Layers []descriptor
		}
		var config struct {
			Architecture, OS string
			Config           struct{ Entrypoint []string }
			RootFS           struct {
				DiffIDs []string `json:"diff_ids"`
			}
		}
		decode := func(text []byte, to any) {
			if err := json.Unmarshal(text, to); err != nil {
				t.Fatal(err)
			}
		}
		decode(layout["index.json"], &top)
		if got := strings.TrimSpace(read(t, first, prefix+"-image.digest")); got != top.Manifests[0].Digest {
			t.Errorf("the digest of the image is %s, want %s", got, top.Manifests[0].Digest)
		}
		decode(blob(top.Manifests[0]), &index)
		if len(index.Manifests) != 1 || index.Manifests[0].Platform["architecture"] != "arm64" || index.Manifests[0].Platform["os"] != "linux" {
			t.Fatalf("the image has %+v", index.Manifests)
		}
		decode(blob(index.Manifests[0]), &manifest)
		decode(blob(manifest.Config), &config)
		if config.Architecture != "arm64" || config.OS != "linux" || !slices.Equal(config.Config.Entrypoint, []string{"/kpng"}) {
			t.Errorf("configuration %+v", config)
		}
		layer := gunzip(t, blob(manifest.Layers[0]))
		if sum := sha256.Sum256(layer); config.RootFS.DiffIDs[0] != "sha256:"+hex.EncodeToString(sum[:]) {
			t.Errorf("the layer is not that of the configuration")
		}
		content := untar(t, layer)
		if !bytes.Equal(content["kpng"], program) {
			t.Error("the image and the archive have different programs")
		}
		if !bytes.Equal(content["licenses/THIRD-PARTY-LICENSES"], archive[prefix+"-linux-arm64/THIRD-PARTY-LICENSES"]) || content["licenses/LICENSE"] == nil {
			t.Error("the image has no licences")
		}
		if n := bytes.Count(content["etc/ssl/certs/ca-certificates.crt"], []byte("BEGIN CERTIFICATE")); n < 50 {
			t.Errorf("the image has %d certificates of authorities", n)
		}
	})

	t.Run("chart", func(t *testing.T) {
		chart, err := loader.Load(filepath.Join(first, "kpng-chart-"+strings.TrimPrefix(version, "v")+".tgz"))
		if err != nil {
			t.Fatal(err)
		}
		if chart.Metadata.AppVersion != version {
			t.Errorf("appVersion %s, want %s", chart.Metadata.AppVersion, version)
		}
		if len(chart.Files) != 2 {
			t.Errorf("the chart has %d files, want the alerts and the dashboard", len(chart.Files))
		}
	})
}

// TestReleaseStopsOnVulnerabilities tests hack/release with a database that has a
// vulnerability of a function that kpng calls, and without a database.
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

// pinnedModules returns the versions of modules that a release has.
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
