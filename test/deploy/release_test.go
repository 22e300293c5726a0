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

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
)

// TestRelease makes the files of a release of the current commit twice, and examines them.
func TestRelease(t *testing.T) {
	key := filepath.Join(t.TempDir(), "key")
	command(t, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
	// The step "cross-compilation" of hack/test has compiled the packages for these.
	platforms := []string{"PLATFORMS=linux/arm64 windows/amd64", "SIGNING_KEY=" + key}
	first, second := release(t, platforms), release(t, platforms)
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
		"SHA256SUMS", "SHA256SUMS.sig", "kpng-" + version + "-image.digest", "kpng-" + version + "-image.tar.gz",
		"kpng-" + version + "-linux-arm64.cdx.json", "kpng-" + version + "-linux-arm64.tar.gz",
		"kpng-" + version + "-windows-amd64.cdx.json", "kpng-" + version + "-windows-amd64.tar.gz",
		"kpng-chart-" + strings.TrimPrefix(version, "v") + ".tgz",
	}
	slices.Sort(want)
	if diff := cmp.Diff(want, names); diff != "" {
		t.Fatalf("files (-want +got):\n%s", diff)
	}

	prefix := "kpng-" + version
	program := unpack(t, filepath.Join(first, prefix+"-linux-arm64.tar.gz"))[prefix+"-linux-arm64/kpng"]
	if unpack(t, filepath.Join(first, prefix+"-windows-amd64.tar.gz"))[prefix+"-windows-amd64/kpng.exe"] == nil {
		t.Error("no kpng.exe in the archive for Windows")
	}

	t.Run("bill of materials", func(t *testing.T) {
		info, err := buildinfo.Read(bytes.NewReader(program))
		if err != nil {
			t.Fatal(err)
		}
		var bom struct {
			Components []struct{ Name, Version string }
		}
		if err := json.Unmarshal([]byte(read(t, first, prefix+"-linux-arm64.cdx.json")), &bom); err != nil {
			t.Fatal(err)
		}
		want, got := map[string]string{"stdlib": strings.TrimPrefix(info.GoVersion, "go")}, map[string]string{}
		for _, m := range info.Deps {
			want[m.Path] = m.Version
		}
		for _, c := range bom.Components {
			got[c.Name] = c.Version
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
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
			content := layout["image/blobs/"+strings.Replace(d.Digest, ":", "/", 1)]
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
		decode(layout["image/index.json"], &top)
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
	})
}

// release runs hack/release and returns the directory with the release.
func release(t *testing.T, env []string) string {
	t.Helper()
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "../../hack/release", dir)
	cmd.Env = append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("hack/release: %v\n%s", err, out)
	}
	return dir
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
