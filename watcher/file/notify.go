// SPDX-License-Identifier: Apache-2.0

package file

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"
)

// notifications are the operating system's: of changes in the folders that
// matter to a path. Where there are none, polling has to do.
type notifications struct {
	log     klog.Logger
	watcher *fsnotify.Watcher // nil if there are none
	// folders are those being watched.
	folders map[string]os.FileInfo
	// said holds the errors that have been logged.
	said map[string]bool
}

func (n *notifications) open(log klog.Logger, newWatcher func() (*fsnotify.Watcher, error)) {
	n.log, n.folders, n.said = log, map[string]os.FileInfo{}, map[string]bool{}
	var err error
	if n.watcher, err = newWatcher(); err != nil {
		n.watcher = nil
		n.failed(err)
	}
}

func (n *notifications) close() {
	if n.watcher != nil {
		if err := n.watcher.Close(); err != nil {
			n.failed(err)
		}
	}
}

func (n *notifications) events() <-chan fsnotify.Event {
	if n.watcher == nil {
		return nil
	}
	return n.watcher.Events
}

func (n *notifications) errors() <-chan error {
	if n.watcher == nil {
		return nil
	}
	return n.watcher.Errors
}

// failed logs each error once.
func (n *notifications) failed(err error) {
	if !n.said[err.Error()] {
		n.said[err.Error()] = true
		n.log.Info("No notification of some changes to manifests, polling instead", "err", err, "interval", pollInterval)
	}
}

// arm watches the folders that matter to path as it is now. A folder that was
// replaced by another of the same name is watched anew.
func (n *notifications) arm(path string) {
	if n.watcher == nil {
		return
	}
	wanted := folders(path)
	watched := n.watcher.WatchList()
	for folder, info := range n.folders {
		if now, ok := wanted[folder]; !ok || !os.SameFile(now, info) || !slices.Contains(watched, folder) {
			delete(n.folders, folder)
			if err := n.watcher.Remove(folder); err != nil && !errors.Is(err, fsnotify.ErrNonExistentWatch) {
				n.failed(err)
			}
		}
	}
	for _, folder := range slices.Sorted(maps.Keys(wanted)) {
		if _, ok := n.folders[folder]; ok {
			continue
		}
		switch err := n.watcher.Add(folder); {
		case err == nil:
			n.folders[folder] = wanted[folder]
		case !errors.Is(err, fs.ErrNotExist):
			n.failed(err)
		}
	}
}

// folders returns the folders in which a change may concern path: the one that
// holds the manifests, and the one above, in which it may be replaced; if
// path is a symbolic link, those of its target, too. Each is there once, even
// if it has several names.
func folders(path string) map[string]os.FileInfo {
	found := map[string]os.FileInfo{}
	add := func(folder string) {
		info, err := os.Stat(folder)
		if err != nil {
			return
		}
		for _, other := range found {
			if os.SameFile(info, other) {
				return
			}
		}
		found[folder] = info
	}
	for _, resolve := range []func(string) (string, error){
		func(path string) (string, error) { return filepath.Clean(path), nil },
		filepath.EvalSymlinks,
	} {
		folder, err := resolve(path)
		if err != nil {
			continue
		}
		if info, err := os.Stat(folder); err != nil || !info.IsDir() {
			folder = filepath.Dir(folder)
		}
		add(folder)
		add(filepath.Join(folder, ".."))
	}
	return found
}
