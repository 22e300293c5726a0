// SPDX-License-Identifier: Apache-2.0

package importer

import (
	_ "embed"
	"fmt"
	"maps"
	"math"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const kpngModule = "github.com/kpng-project/kpng"

// unwanted contains modules that kpng must not add to the programs that import it. There
// are two exceptions: package metrics may import Prometheus. On Windows, kernelspace may
// import hcsshim, and hcsshim imports parts of gRPC.
var unwanted = []string{
	"github.com/Microsoft/hcsshim",
	"github.com/google/nftables",
	"github.com/prometheus",
	"github.com/spf13/cobra",
	"google.golang.org/grpc",
	"k8s.io/kubernetes",
	"sigs.k8s.io/knftables",
}

// unwantedIn returns the unwanted packages or modules among the given paths, sorted.
func unwantedIn(paths []string) []string {
	var found []string
	for _, path := range paths {
		if slices.ContainsFunc(unwanted, func(u string) bool { return path == u || strings.HasPrefix(path, u+"/") }) {
			found = append(found, path)
		}
	}
	slices.Sort(found)
	return found
}

// embedder is a minimal program that embeds kpng.
//
//go:embed testdata/embedder/main.go
var embedder string

// nodeProxy is a program that runs the proxy of a node with nftables.
//
//go:embed testdata/node/main.go
var nodeProxy string

// program returns the source of a program that imports packages of kpng.
func program(packages ...string) map[string]string {
	var b strings.Builder
	b.WriteString("package main\n\n")
	for _, p := range packages {
		fmt.Fprintf(&b, "import _ %q\n", path.Join(kpngModule, p))
	}
	b.WriteString("\nfunc main() {}\n")
	return map[string]string{"main.go": b.String()}
}

// clientGoOnly imports only the packages that every program needs to watch Kubernetes.
const clientGoOnly = `package main

import (
	_ "k8s.io/client-go/kubernetes"
	_ "k8s.io/client-go/tools/cache"
	_ "k8s.io/client-go/tools/clientcmd"
)

func main() {}
`

func TestImporterLinksNothingUnwanted(t *testing.T) {
	without := newModule(t, "", map[string]string{"main.go": clientGoOnly})
	for _, c := range []struct {
		name     string
		packages []string
		wanted   []string // the program may link modules with these prefixes
	}{
		{"facade", []string{".", "sink", "watcher/kube"}, nil},
		{"metrics", []string{"metrics"}, []string{"github.com/prometheus"}},
		{"node", []string{"node"}, nil},
		{"backends", []string{
			"backends/nftables", "backends/userspace",
			"node/nodeaddr",
		}, nil},
		{"kernelspace", []string{"backends/windows/kernelspace"}, []string{"github.com/Microsoft/hcsshim", "google.golang.org/grpc"}},
	} {
		importer := newImporter(t, program(c.packages...))
		for _, goos := range []string{"linux", "windows", "darwin"} {
			t.Run(c.name+" on "+goos, func(t *testing.T) {
				linked := importer.linked(t, goos)
				for _, found := range unwantedIn(slices.Collect(maps.Keys(linked))) {
					if !slices.ContainsFunc(c.wanted, func(w string) bool { return strings.HasPrefix(found, w) }) {
						t.Errorf("the program links %s", found)
					}
				}
				t.Logf("linked in addition to the standard library and client-go:\n%s",
					strings.Join(ownPackages(linked, without.linked(t, goos)), "\n"))
			})
		}
	}
}

func TestImporterNeedsNoKubernetesModule(t *testing.T) {
	importer := newImporter(t, map[string]string{"main.go": embedder})
	without := newModule(t, "", map[string]string{"main.go": clientGoOnly})
	versions := importer.versions(t)
	if v, ok := versions["k8s.io/kubernetes"]; ok {
		t.Errorf("the modules include k8s.io/kubernetes %s", v)
	}
	t.Logf("modules with a higher version than client-go requires:\n%s",
		strings.Join(raised(without.versions(t), versions), "\n"))
}

func TestImporterBinaryHasNoUnwantedModules(t *testing.T) {
	importer := newImporter(t, map[string]string{"main.go": embedder})
	program := importer.build(t)
	var modules, versions []string
	for _, line := range importer.goCommand(t, "version", "-m", program) {
		if f := strings.Fields(line); len(f) > 2 && f[0] == "dep" {
			modules = append(modules, f[1])
			versions = append(versions, f[1]+" "+f[2])
		}
	}
	info, err := os.Stat(program)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes, stripped, built from:\n%s", info.Size(), strings.Join(versions, "\n"))
	if !slices.Contains(modules, kpngModule) {
		t.Errorf("the modules of the binary do not include %s: %v", kpngModule, modules)
	}
	if found := unwantedIn(modules); len(found) > 0 {
		t.Errorf("the binary has unwanted modules:\n%s", strings.Join(found, "\n"))
	}
}

// TestSizeOfNodeProxy compares the size and the number of modules of a program with the
// figures in docs/build/embedding.md. The size may differ by a tenth.
func TestSizeOfNodeProxy(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(checkout(t), "docs/build/embedding.md"))
	if err != nil {
		t.Fatal(err)
	}
	figures := regexp.MustCompile(`with the proxy of a node and nftables\s+has\s+(\d+)\s+MB\s+and\s+(\d+)\s+modules`).FindSubmatch(text)
	if figures == nil {
		t.Fatal("docs/build/embedding.md has no figures")
	}
	wantMB, _ := strconv.Atoi(string(figures[1]))
	wantModules, _ := strconv.Atoi(string(figures[2]))
	importer := newImporter(t, map[string]string{"main.go": nodeProxy})
	program := importer.build(t)
	modules := 0
	for _, line := range importer.goCommand(t, "version", "-m", program) {
		if f := strings.Fields(line); len(f) > 2 && f[0] == "dep" {
			modules++
		}
	}
	info, err := os.Stat(program)
	if err != nil {
		t.Fatal(err)
	}
	if size := float64(info.Size()) / 1e6; math.Abs(size-float64(wantMB)) > float64(wantMB)/10 || modules != wantModules {
		t.Errorf("the program has %.1f MB and %d modules, docs/build/embedding.md says %d MB and %d modules", size, modules, wantMB, wantModules)
	}
}

func TestUnwantedImportIsDetected(t *testing.T) {
	importer := newImporter(t, map[string]string{"main.go": `package main

import (
	_ "github.com/kpng-project/kpng/api"
	_ "github.com/spf13/cobra"
)

func main() {}
`})
	got := unwantedIn(slices.Collect(maps.Keys(importer.linked(t, "linux"))))
	if diff := cmp.Diff([]string{"github.com/spf13/cobra"}, got); diff != "" {
		t.Errorf("unwanted (-want +got):\n%s", diff)
	}
}

func TestUnwanted(t *testing.T) {
	for name, c := range map[string]struct{ paths, want []string }{
		"no unwanted package":           {[]string{"k8s.io/client-go/rest", kpngModule + "/sink"}, nil},
		"a module":                      {[]string{"google.golang.org/grpc"}, []string{"google.golang.org/grpc"}},
		"a package in a module":         {[]string{"k8s.io/api", "google.golang.org/grpc/codes"}, []string{"google.golang.org/grpc/codes"}},
		"any module of an organisation": {[]string{"github.com/prometheus/common/model"}, []string{"github.com/prometheus/common/model"}},
		"a name with the same prefix":   {[]string{"google.golang.org/grpcx", "k8s.io/kubernetes-client"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, unwantedIn(c.paths)); diff != "" {
				t.Errorf("unwanted (-want +got):\n%s", diff)
			}
		})
	}
}

func TestRaised(t *testing.T) {
	without := map[string]string{"same": "v1", "raised": "v1", "dropped": "v1"}
	with := map[string]string{"same": "v1", "raised": "v2", "added": "v1"}
	if diff := cmp.Diff([]string{"raised v1 → v2"}, raised(without, with)); diff != "" {
		t.Errorf("raised (-want +got):\n%s", diff)
	}
}

// ownPackages returns the packages in the map linked, sorted. It omits each package whose
// module also occurs in the map other.
func ownPackages(linked, other map[string]string) []string {
	theirs := map[string]bool{}
	for _, module := range other {
		theirs[module] = true
	}
	var paths []string
	for path, module := range linked {
		if !theirs[module] {
			paths = append(paths, path)
		}
	}
	slices.Sort(paths)
	return paths
}

// raised returns a line for each module whose versions differ in the maps.
func raised(without, with map[string]string) []string {
	var lines []string
	for path, version := range without {
		if v, ok := with[path]; ok && v != version {
			lines = append(lines, fmt.Sprintf("%s %s → %s", path, version, v))
		}
	}
	slices.Sort(lines)
	return lines
}
