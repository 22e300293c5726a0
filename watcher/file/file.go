// SPDX-License-Identifier: Apache-2.0

// Package file fills a cluster.State from manifests. A manifest contains Kubernetes
// objects in YAML or JSON. It may be written by hand, by "kubectl get
// services,endpointslices,nodes -A -o yaml", or by "kpng … to-file". [Watch] reads
// manifests and follows their changes.
//
// A path is a file or a folder. In a folder, the package reads files whose names end in
// .yaml, .yml or .json and do not begin with a dot. It reads Services and Nodes (v1) and
// EndpointSlices (discovery.k8s.io/v1), also in lists. It skips objects of other kinds,
// with one warning for each kind. Package watcher selects the objects for the proxy.
// Missing fields get the API's defaults. The package allocates no IPs and no node ports.
//
// The package rejects objects with unknown fields, and objects that the API server would
// not admit. It checks only fields that concern a service proxy. It rejects a file
// without objects, but accepts a List without items. The error names the file, document,
// object and field of each problem. After an error the package uses none of the
// manifests, because the user rarely wants only some of the objects. Three problems cause
// only a warning: an EndpointSlice without a service, an invalid address of a Node, and
// unknown fields in an object with a metadata.uid. A newer API server may have written
// such fields.
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
	"time"

	"github.com/kpng-project/kpng/internal/manifest"
	"github.com/kpng-project/kpng/watcher"
	"k8s.io/klog/v2"
)

// maxSize is the maximum size of a file, so that a wrong path cannot exhaust the memory.
const maxSize = 512 << 20

// progressInterval is the time between the lines in the log while load runs.
const progressInterval = 5 * time.Second

// load reads manifests once. If ctx ends, it returns early. A running parser or a read of
// standard input then continues in the background, because it cannot be interrupted.
func load(ctx context.Context, path string, options watcher.Options) (*manifests, error) {
	p, err := newParser(options)
	if err != nil {
		return nil, err
	}
	p.reading.Store(&path)
	done := make(chan error, 1)
	go func(stdin io.Reader) { done <- p.load(ctx, path, stdin) }(os.Stdin)
	begin, progress := time.Now(), time.NewTicker(progressInterval)
	defer progress.Stop()
	for {
		select {
		case err := <-done:
			return &p.manifests, err
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-progress.C:
			klog.FromContext(ctx).Info("Reading manifests", "file", *p.reading.Load(), "objects", p.objects.Load(), "after", time.Since(begin).Round(time.Second))
		}
	}
}

func (p *parser) load(ctx context.Context, path string, stdin io.Reader) error {
	files, err := []string{"stdin"}, error(nil)
	if path != manifest.Stdin {
		files, err = list(path)
	}
	for i := 0; i < len(files) && err == nil && ctx.Err() == nil; i++ {
		p.reading.Store(&files[i])
		var data []byte
		if path == manifest.Stdin {
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
		p.warn(path, "folder has no manifests")
	}
	p.manifests.files = len(files)
	return p.finish()
}

// list returns the names of the files at path, in the order in which load reads them.
func list(path string) (names []string, err error) {
	if info, err := os.Stat(path); err != nil || !info.IsDir() {
		return []string{path}, err
	}
	entries, err := os.ReadDir(path) // sorted by name
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), ".") || !slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(entry.Name())) {
			continue
		}
		name := filepath.Join(path, entry.Name())
		info, err := os.Stat(name)
		if errors.Is(err, fs.ErrNotExist) && entry.Type()&fs.ModeSymlink == 0 {
			continue // the file was removed after the call of ReadDir
		} else if err != nil {
			return nil, err
		} else if !info.IsDir() {
			names = append(names, name)
		}
	}
	return names, err
}

// readFile returns the content of a regular file. It rejects other kinds of files,
// because opening them may have side effects, and reading them may never end.
func readFile(name string) ([]byte, error) {
	info, err := os.Stat(name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s: not a regular file (%s); use %q to read standard input", name, info.Mode(), manifest.Stdin)
	}
	// With O_NONBLOCK, OpenFile returns even if a named pipe has replaced the file
	// meanwhile.
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close() // the file was only read, so the error does not matter
	return readAll(name, f)
}

func readAll(name string, r io.Reader) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxSize+1))
	if len(data) > maxSize {
		err = fmt.Errorf("%s: larger than %d MiB", name, maxSize>>20)
	}
	return data, err
}
