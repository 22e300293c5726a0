// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
)

// program is what the go command knows about an executable file.
type program struct {
	info     *buildinfo.BuildInfo
	settings map[string]string // of the build, for example GOOS
}

func readProgram(file string) (*program, error) {
	info, err := buildinfo.ReadFile(file)
	if err != nil {
		return nil, err
	}
	p := &program{info, map[string]string{}}
	for _, s := range info.Settings {
		p.settings[s.Key] = s.Value
	}
	return p, nil
}

// version returns the version that the program reports. It fails if the program was built
// without a version, or from a modified checkout.
func (p *program) version() (string, error) {
	v := p.info.Main.Version
	if !strings.HasPrefix(v, "v") || strings.HasSuffix(v, "+dirty") {
		return "", fmt.Errorf("%s has version %q: build it from a clean checkout, with -buildvcs", p.info.Path, v)
	}
	return v, nil
}

// linked is a module that a program contains.
type linked struct {
	*debug.Module
	licences []string // files
	imports  []string // paths of the modules that its packages import
}

// standard stands for Go's standard library among the modules of a program.
const standard = "stdlib"

// modules returns the modules that the program contains, ordered by path. The first one is
// the main module, and the second one is Go's standard library. The method runs the go
// command in the current directory, which must be in the main module.
func (p *program) modules() ([]*linked, error) {
	type listed struct {
		ImportPath, Dir string
		Standard        bool
		Module          *struct{ Path, Dir string }
		Imports         []string
	}
	cmd := exec.Command("go", "list", "-deps", "-json=ImportPath,Dir,Standard,Module,Imports", p.info.Path)
	cmd.Env = append(os.Environ(), "GOOS="+p.settings["GOOS"], "GOARCH="+p.settings["GOARCH"], "CGO_ENABLED="+p.settings["CGO_ENABLED"])
	cmd.Stderr = os.Stderr
	text, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("list packages of %s: %w", p.info.Path, err)
	}
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return nil, fmt.Errorf("find Go: %w", err)
	}

	byPath := map[string]*linked{
		p.info.Main.Path: {Module: &p.info.Main},
		standard:         {Module: &debug.Module{Path: standard, Version: strings.TrimPrefix(p.info.GoVersion, "go")}},
	}
	for _, m := range p.info.Deps {
		path := m.Path
		if m.Replace != nil {
			m = m.Replace
		}
		byPath[path] = &linked{Module: m}
	}
	var packages []listed
	owner := map[string]string{} // module of each package
	for decoder := json.NewDecoder(bytes.NewReader(text)); ; {
		var pkg listed
		if err := decoder.Decode(&pkg); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("list packages of %s: %w", p.info.Path, err)
		}
		owner[pkg.ImportPath] = standard
		if !pkg.Standard {
			owner[pkg.ImportPath] = pkg.Module.Path
		}
		packages = append(packages, pkg)
	}
	for _, pkg := range packages {
		m, top := byPath[owner[pkg.ImportPath]], strings.TrimSpace(string(root))
		if m == nil {
			return nil, fmt.Errorf("package %s of module %s is not in the program: run in its checkout, with its module file", pkg.ImportPath, owner[pkg.ImportPath])
		}
		if !pkg.Standard {
			top = pkg.Module.Dir
		}
		for _, path := range pkg.Imports {
			if to, ok := owner[path]; ok && to != owner[pkg.ImportPath] && !slices.Contains(m.imports, to) {
				m.imports = append(m.imports, to)
			}
		}
		if m.licences, err = addLicences(m.licences, pkg.Dir, top); err != nil {
			return nil, err
		}
	}
	modules := make([]*linked, 0, len(byPath))
	for _, m := range byPath {
		if len(m.licences) == 0 {
			return nil, fmt.Errorf("module %s has no licence", m.Path)
		}
		slices.Sort(m.imports)
		modules = append(modules, m)
	}
	order := func(m *linked) int { return slices.Index([]string{standard, p.info.Main.Path}, m.Path) }
	slices.SortFunc(modules, func(a, b *linked) int {
		return cmp.Or(order(b)-order(a), cmp.Compare(a.Path, b.Path))
	})
	return modules, nil
}

// addLicences adds the licences and notices that apply to the directory of a package. They
// are in this directory and in its parents, up to the top of the module.
func addLicences(to []string, dir, top string) ([]string, error) {
	for ; ; dir = filepath.Dir(dir) {
		files, err := os.ReadDir(dir)
		if err != nil {
			return nil, err
		}
		for _, file := range files {
			path := filepath.Join(dir, file.Name())
			if isLicence(file) && !slices.Contains(to, path) {
				to = append(to, path)
			}
		}
		if dir == top || len(dir) <= len(top) {
			return to, nil
		}
	}
}

func isLicence(file os.DirEntry) bool {
	name := strings.ToLower(file.Name())
	if !file.Type().IsRegular() || strings.HasSuffix(name, ".go") {
		return false
	}
	for _, prefix := range []string{"license", "licence", "copying", "notice", "patents", "copyright"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}
