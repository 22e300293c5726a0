// SPDX-License-Identifier: Apache-2.0

// Package file fills a cluster.State from manifests: ordinary Kubernetes YAML
// or JSON, as people write it and as
//
//	kubectl get services,endpointslices,nodes -A -o yaml
//
// prints it. [Watch] reads manifests and follows their changes. [Write] writes a
// state as manifests that are read back into an equal one.
//
// A path names a file or a folder. Of a folder, the files directly in it whose names end
// in .yaml, .yml or .json are read in the order of their names, except hidden ones, which
// start with a dot. A file holds one or more documents, each an object or a list of
// objects. Services and Nodes of v1 and EndpointSlices of discovery.k8s.io/v1 are read.
// Objects of other kinds are skipped, with one warning for each kind. The rules of package
// watcher say which objects are meant for the proxy. The API's defaults are filled in, and
// an object without a namespace is in "default". Nothing is allocated: a service without
// clusterIP has none.
//
// # What is refused
//
// A path must be a folder, a regular file of up to 512 MiB, or [Stdin]. A file must hold an
// object: one without is more likely half written than meant to remove everything. A List
// without items says that there are no objects. A folder may be without manifests at the
// first reading.
//
// Objects are refused that the API server would not admit, as far as a service proxy
// cares: invalid YAML, values of the wrong type, unknown or duplicate fields, invalid
// addresses and ports, and the same object twice. The error lists all of it by file,
// document, object and field. Then nothing of the manifests is used, valid or not: half
// of what was meant is rarely what was meant.
//
// Some things are left out with a warning instead: an unknown field in an object that
// has a metadata.uid, since an API server of a later release has written it; an
// EndpointSlice that names no service; and an invalid address of a Node.
package file

import (
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

// maxSize is the largest size of a file in bytes. It keeps a wrong one from filling the
// memory.
const (
	maxSize  = 512 << 20
	tooLarge = "%s: larger than 512 MiB"
)

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
	files, err := []string{path}, error(nil)
	if path != Stdin {
		files, err = list(path)
	}
	if err != nil {
		return fmt.Errorf("read manifests: %w", err)
	}
	for _, name := range files {
		data, err := read(name, stdin)
		switch {
		case err != nil:
			return fmt.Errorf("read manifests: %w", err)
		case ctx.Err() != nil:
			return ctx.Err()
		}
		if name == Stdin {
			name = "stdin"
		}
		p.file(ctx, name, data)
	}
	if len(files) == 0 {
		p.warn(path, "no manifests in this folder")
	}
	p.manifests.files = len(files)
	return p.finish()
}

// list returns the files that path stands for, in the order of reading.
func list(path string) ([]string, error) {
	if info, err := os.Stat(path); err != nil || !info.IsDir() {
		return []string{path}, err
	}
	entries, err := os.ReadDir(path) // sorted
	if err != nil {
		return nil, err
	}
	var names []string
	for _, entry := range entries {
		extension := filepath.Ext(entry.Name())
		if strings.HasPrefix(entry.Name(), ".") || !slices.Contains([]string{".yaml", ".yml", ".json"}, extension) {
			continue
		}
		name := filepath.Join(path, entry.Name())
		info, err := os.Stat(name)
		switch {
		case errors.Is(err, fs.ErrNotExist) && entry.Type()&fs.ModeSymlink == 0:
			// The file was removed after the folder was read.
		case err != nil:
			return nil, err
		case !info.IsDir():
			names = append(names, name)
		}
	}
	return names, nil
}

// read returns the content of a regular file, or of the standard input. Opening anything
// else might have effects, and reading it might never end.
func read(name string, r io.Reader) ([]byte, error) {
	if name != Stdin {
		info, err := os.Stat(name)
		if err != nil {
			return nil, err
		}
		if !info.Mode().IsRegular() {
			return nil, fmt.Errorf("%s: not a regular file (%s); use %q to read the standard input", name, info.Mode(), Stdin)
		}
		if info.Size() > maxSize {
			return nil, fmt.Errorf(tooLarge, name)
		}
		// Opening does not block, even if a named pipe has replaced the file by now.
		f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
		if err != nil {
			return nil, err
		}
		defer f.Close() // nothing was written
		r = f
	}
	data, err := io.ReadAll(io.LimitReader(r, maxSize+1))
	if len(data) > maxSize {
		err = fmt.Errorf(tooLarge, name)
	}
	return data, err
}
