// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

type kernel struct {
	// image is the path of vmlinuz. modules is the path of the folder lib/modules.
	image, modules, version string
}

// debianKernel returns the kernel of a Debian release. It downloads the kernel if the
// cache does not have it.
func debianKernel(ctx context.Context, suite string) (*kernel, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, err
	}
	cache = filepath.Join(cache, "kpng", "kernel")
	dir := filepath.Join(cache, suite)
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		if err := os.MkdirAll(cache, 0o755); err != nil {
			return nil, err
		}
		tmp, err := os.MkdirTemp(cache, "."+suite+"-")
		if err != nil {
			return nil, err
		}
		defer os.RemoveAll(tmp)
		if err := download(ctx, suite, tmp); err != nil {
			return nil, err
		}
		// Another process may have created dir in the meantime.
		if err := os.Rename(filepath.Join(tmp, "root"), dir); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
	}
	images, err := filepath.Glob(filepath.Join(dir, "boot", "vmlinuz-*"))
	if err != nil {
		return nil, err
	}
	if len(images) != 1 {
		return nil, fmt.Errorf("%s has %d kernels, want 1: remove that folder", dir, len(images))
	}
	_, version, _ := strings.Cut(filepath.Base(images[0]), "-")
	return &kernel{image: images[0], modules: filepath.Join(dir, "lib", "modules"), version: version}, nil
}

var imagePackage = regexp.MustCompile(`(?m)^ *Depends: (linux-image-\d\S*)$`)

// download writes a release's kernel to dir/root. It runs apt-get with separate settings
// and package lists, so that this machine's settings and package lists do not change.
func download(ctx context.Context, suite, dir string) error {
	fmt.Fprintf(os.Stderr, "kernel: downloading the kernel of Debian %s\n", suite)
	mirror := os.Getenv("KPNG_DEBIAN_MIRROR")
	if mirror == "" {
		mirror = "http://deb.debian.org/debian"
	}
	for name, text := range map[string]string{
		"sources.list": fmt.Sprintf("deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s %s main\n", mirror, suite),
		"status":       "",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	for _, folder := range []string{"lists/partial", "archives/partial", "root"} {
		if err := os.MkdirAll(filepath.Join(dir, folder), 0o755); err != nil {
			return err
		}
	}
	command := func(program, debianPackage string, args ...string) (string, error) {
		path, err := find(program, debianPackage)
		if err != nil {
			return "", err
		}
		cmd := exec.CommandContext(ctx, path, args...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		if err != nil {
			return "", fmt.Errorf("%s: %w\n%s", program, err, tail(out))
		}
		return string(out), nil
	}
	apt := func(program string, args ...string) (string, error) {
		return command(program, "apt", append([]string{
			"-qq",
			"-o", "APT::Architecture=amd64",
			"-o", "APT::Sandbox::User=", // run as the current user, because another user might be unable to read the cache
			"-o", "Dir::Etc::SourceList=" + dir + "/sources.list", "-o", "Dir::Etc::SourceParts=-",
			"-o", "Dir::State=" + dir, "-o", "Dir::State::Status=" + dir + "/status",
			"-o", "Dir::Cache=" + dir,
			"-o", "Acquire::Languages=none",
			"-o", "Acquire::Retries=3",
		}, args...)...)
	}
	if _, err := apt("apt-get", "update", "--error-on=any"); err != nil {
		return err
	}
	depends, err := apt("apt-cache", "depends", "linux-image-amd64")
	if err != nil {
		return err
	}
	image := imagePackage.FindStringSubmatch(depends)
	if image == nil {
		return fmt.Errorf("package linux-image-amd64 of %s names no kernel: %q", suite, depends)
	}
	if _, err := apt("apt-get", "download", image[1]); err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(dir, image[1]+"_*.deb"))
	if err != nil {
		return err
	}
	if len(files) != 1 {
		return fmt.Errorf("apt-get downloaded %d files of package %s, want 1", len(files), image[1])
	}
	if _, err := command("dpkg-deb", "dpkg", "-x", files[0], "root"); err != nil {
		return err
	}
	_, err = command("depmod", "kmod", "-b", "root", strings.TrimPrefix(image[1], "linux-image-"))
	return err
}

// initramfs writes the guest's first file system to a file, and returns the file's name.
func (k *kernel) initramfs(j *job) (name string, err error) {
	files, err := k.moduleFiles("virtio_pci", "9pnet_virtio", "9p", "overlay")
	if err != nil {
		return "", err
	}
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	if err := checkStatic(self); err != nil {
		return "", err
	}
	text, err := json.Marshal(j)
	if err != nil {
		return "", err
	}
	f, err := os.CreateTemp("", "kpng-initramfs-")
	if err != nil {
		return "", err
	}
	defer func() {
		if err = errors.Join(err, f.Close()); err != nil {
			os.Remove(f.Name())
		}
	}()
	archive := &cpio{w: bufio.NewWriter(f)}
	archive.copyFile(initPath, self)
	archive.file(jobPath, text)
	archive.folder(modulesDir)
	for i, file := range files {
		archive.copyFile(fmt.Sprintf("%s/%02d-%s", modulesDir, i, filepath.Base(file)), file)
	}
	return f.Name(), archive.close()
}

// checkStatic checks that a program is statically linked, because the initramfs has no
// libraries.
func checkStatic(program string) error {
	file, err := elf.Open(program)
	if err != nil {
		return err
	}
	defer file.Close()
	if slices.ContainsFunc(file.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) {
		return fmt.Errorf("%s needs dynamic libraries: build it with CGO_ENABLED=0", program)
	}
	return nil
}

// moduleFiles returns the files of the named modules and of their dependencies, in load
// order. It omits modules that are part of the kernel image.
func (k *kernel) moduleFiles(names ...string) ([]string, error) {
	dir := filepath.Join(k.modules, k.version)
	text, err := os.ReadFile(filepath.Join(dir, "modules.dep"))
	if err != nil {
		return nil, err
	}
	builtin, err := os.ReadFile(filepath.Join(dir, "modules.builtin"))
	if err != nil {
		return nil, err
	}
	var files []string
	for _, name := range names {
		if bytes.Contains(builtin, []byte("/"+name+".ko\n")) {
			continue
		}
		// A line of the text has the form "module: dependency ...". The dependencies must load
		// from last to first.
		line := regexp.MustCompile(`(?m)^\S*/` + name + `\.ko:.*$`).FindString(string(text))
		if line == "" {
			return nil, fmt.Errorf("%s has no module %s", dir, name)
		}
		needed := strings.Fields(strings.Replace(line, ":", "", 1))
		slices.Reverse(needed)
		for _, file := range needed {
			if file = filepath.Join(dir, file); !slices.Contains(files, file) {
				files = append(files, file)
			}
		}
	}
	return files, nil
}
