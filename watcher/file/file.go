// SPDX-License-Identifier: Apache-2.0

// Package file fills a cluster.State from manifests: ordinary Kubernetes YAML
// or JSON, as people write it and as
//
//	kubectl get services,endpointslices,nodes -A -o yaml
//
// prints it. [Load] reads manifests once, [Watch] follows them, and [Write] writes
// a state as manifests that are read back into an equal one.
//
// # What is read
//
// A path names a file or a folder. Of a folder, the files directly in it whose
// names end in .yaml, .yml or .json are read in order of their names; hidden
// ones (which start with a dot) are not, and subfolders are not entered. A file
// holds one or more documents, each an object or a list of objects. Services
// and Nodes of v1 and EndpointSlices of discovery.k8s.io/v1 are read; objects
// of any other kind are left alone, with a warning for each kind.
//
// The rules of package watcher say which objects are meant for the proxy. The
// API's defaults are filled in, and an object without a namespace is in
// "default". Nothing is allocated: a service without clusterIP has none.
//
// # What is refused
//
// What is not a regular file, or larger than 512 MiB; the standard input, which
// [Stdin] stands for, is exempt from the former. A file that holds no object at
// all, be it of no bytes or of comments only: it is more likely half written than
// meant to take everything away. A List without items says that there is nothing.
// A folder that has no manifests is allowed if it is so at the first reading.
//
// What the API server would not admit, as far as a service proxy cares: what is
// no YAML, values of the wrong type, unknown fields, addresses and ports that
// are none, the same object twice. [Errors] lists all of it by file, line and
// object. Then nothing of the manifests is used, valid or not: half of what was
// meant is rarely what was meant.
//
// Some things are left out with a warning instead: an unknown field in an object
// that has a metadata.uid, since then an API server of a later release has
// written it; an EndpointSlice that names no service; and an address of a Node
// that is none.
package file

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/watcher"
)

// Stdin is the path that stands for the standard input.
const Stdin = "-"

// Options say what Watch reads.
type Options struct {
	// Path is a file, a folder, or Stdin, which is read once.
	Path string
	// Once ends Watch after the first reading.
	Once bool
	// Options select what is meant for the proxy.
	watcher.Options
	// Clock is for tests. Default: the real one.
	Clock clock.WithTicker
}

// Watch reads manifests into state, which has synced then, and follows their
// changes until ctx is done; it returns nil then. Each reading is one commit,
// which changes only what is different. Nobody else may write to state.
//
// An error of the first reading is returned. One of a later reading is logged,
// once, and state keeps what it has until the manifests are good again, or
// there again: a folder that loses its last manifest takes nothing away either.
// To take everything away, write a List without items. A file is read when it has
// not changed for a moment, so that one that is being written is left in peace;
// a writer that pauses for longer should write another file and rename it.
//
// Changes are noticed at once where the operating system tells of them, and
// within five seconds elsewhere: on network file systems, behind symbolic links
// in a folder, and where the permission to read is given.
func Watch(ctx context.Context, state *cluster.State, opts Options) error {
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	f := &follower{
		opts:      opts,
		log:       klog.FromContext(ctx).WithValues("path", opts.Path),
		state:     state,
		newNotify: fsnotify.NewWatcher,
	}
	return f.run(ctx)
}

// Load reads manifests once. The error is Errors if it is about what they say,
// and that of ctx if it ends before. Then a read of the standard input goes on,
// as nothing can interrupt it.
func Load(ctx context.Context, path string, options watcher.Options) (*Manifests, error) {
	m, _, err := load(ctx, path, options)
	return m, err
}

// load is Load that also returns how many files there are.
func load(ctx context.Context, path string, options watcher.Options) (m *Manifests, files int, err error) {
	p, err := newParser(options)
	if err != nil {
		return nil, 0, err
	}
	names, readOne := []string{"stdin"}, readStdin
	if path != Stdin {
		readOne = readFile
		if names, err = list(path); err != nil {
			return nil, 0, fmt.Errorf("reading manifests: %w", err)
		}
	}
	for _, name := range names {
		data, err := readOne(ctx, name)
		if err == nil {
			p.file(ctx, name, data)
			err = ctx.Err()
		}
		if err != nil {
			return nil, 0, fmt.Errorf("reading manifests: %w", err)
		}
	}
	if len(names) == 0 {
		p.warn(&Error{File: path, Message: "no manifests in this folder"})
	}
	m, err = p.result()
	return m, len(names), err
}

// list returns the files that path stands for, in the order of reading.
func list(path string) ([]string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return []string{path}, nil
	}
	entries, err := os.ReadDir(path) // sorted
	if err != nil {
		return nil, err
	}
	var names []string
	for _, entry := range entries {
		name := filepath.Join(path, entry.Name())
		if !isManifest(entry.Name()) {
			continue
		}
		info, err := os.Stat(name)
		switch {
		case errors.Is(err, fs.ErrNotExist) && entry.Type()&fs.ModeSymlink == 0:
			// It went between the listing and now.
		case err != nil:
			return nil, err
		case !info.IsDir():
			names = append(names, name)
		}
	}
	return names, nil
}

func isManifest(name string) bool {
	return !strings.HasPrefix(name, ".") && slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(name))
}
