// SPDX-License-Identifier: Apache-2.0

// Package file fills a cluster.State from manifests: Kubernetes YAML or JSON, as people
// write it and as kubectl get services,endpointslices,nodes -A -o yaml prints it. [Watch]
// reads manifests and follows their changes. [Write] writes a state as manifests that are
// read back into an equal one.
//
// A path names a file or a folder, in which the files are read whose names end in .yaml,
// .yml or .json and do not begin with a dot. Services and Nodes of v1 and EndpointSlices of
// discovery.k8s.io/v1 are read, singly or in lists. Others are skipped with one warning for
// each kind. The rules of package watcher say which objects are meant for the proxy. The
// API's defaults are filled in, but nothing is allocated, such as a clusterIP.
//
// Objects are refused that the API server would not admit, as far as a service proxy
// cares, unknown fields included, and so is a file without an object: a List without items
// says that there are none. The error lists all of it by file, document, object and field.
// Then nothing of the manifests is used: half of what was meant is rarely what was meant.
// Some things are left out with a warning instead: an unknown field in an object that has
// a metadata.uid, since an API server of a later release has written it; an EndpointSlice
// that names no service; and an invalid address of a Node.
package file

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/kpng-project/kpng/watcher"
)

// Stdin is the path that stands for the standard input.
const Stdin = "-"

// maxSize keeps a wrong file from filling the memory.
const maxSize = 512 << 20

// load reads manifests once. It returns when ctx ends, although nothing can interrupt the
// parser or a read of the standard input: these end in the background.
func load(ctx context.Context, path string, options watcher.Options) (*manifests, error) {
	p, err := newParser(options)
	if err != nil {
		return nil, err
	}
	done := make(chan error, 1)
	go func(stdin io.Reader) { done <- p.load(ctx, path, stdin) }(os.Stdin)
	select {
	case err := <-done:
		return &p.manifests, err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (p *parser) load(ctx context.Context, path string, stdin io.Reader) error {
	files, err := []string{"stdin"}, error(nil)
	if path != Stdin {
		files, err = list(path)
	}
	for i := 0; i < len(files) && err == nil && ctx.Err() == nil; i++ {
		var data []byte
		if path == Stdin {
			data, err = readAll(files[i], stdin)
		} else {
			data, err = readFile(files[i])
		}
		if err == nil {
			p.file(ctx, files[i], data)
		}
	}
	if err = cmp.Or(ctx.Err(), err); err != nil {
		return fmt.Errorf("read manifests: %w", err)
	}
	if len(files) == 0 {
		p.warn(path, "no manifests in this folder")
	}
	p.manifests.files = len(files)
	return p.finish()
}

// list returns the files that path stands for, in the order of reading.
func list(path string) (names []string, err error) {
	if info, err := os.Stat(path); err != nil || !info.IsDir() {
		return []string{path}, err
	}
	entries, err := os.ReadDir(path) // sorted
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), ".") || !slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(entry.Name())) {
			continue
		}
		name := filepath.Join(path, entry.Name())
		info, err := os.Stat(name)
		if errors.Is(err, fs.ErrNotExist) && entry.Type()&fs.ModeSymlink == 0 {
			continue // the file was removed after the folder was read
		} else if err != nil {
			return nil, err
		} else if !info.IsDir() {
			names = append(names, name)
		}
	}
	return names, err
}

// readFile returns the content of a regular file. Opening anything else might have effects,
// and reading it might never end.
func readFile(name string) ([]byte, error) {
	info, err := os.Stat(name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s: not a regular file (%s); use %q to read the standard input", name, info.Mode(), Stdin)
	}
	// Opening does not block, even if a named pipe has replaced the file by now.
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close() // nothing was written
	return readAll(name, f)
}

func readAll(name string, r io.Reader) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxSize+1))
	if len(data) > maxSize {
		err = fmt.Errorf("%s: larger than %d MiB", name, maxSize>>20)
	}
	return data, err
}
