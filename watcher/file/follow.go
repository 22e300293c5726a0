// SPDX-License-Identifier: Apache-2.0

package file

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/manifest"
	"github.com/kpng-project/kpng/watcher"
	"k8s.io/klog/v2"
)

const (
	settleTime    = 100 * time.Millisecond // files are read after this time without changes
	maxSettleTime = 2 * time.Second        // files are read after this time even if they keep changing
	pollInterval  = 5 * time.Second        // time between checks for unreported changes
)

// Options configures Watch.
type Options struct {
	// Path is a file, a folder, or "-", standard input. Watch reads standard input only once.
	Path string
	// Once makes Watch return after the first reading.
	Once bool
	// These options select the objects for the proxy.
	watcher.Options
}

// Watch reads manifests into state and marks state as synced. It reads them again when
// they change. When ctx ends, it returns nil. Each reading makes one commit, which
// changes only the objects that differ from those in state. The state must have no other
// writer. If the first reading fails, Watch returns the error. If a later reading fails,
// Watch logs the error once, and state keeps its content until the manifests exist and
// are valid again. The state also keeps its content if a folder loses its last manifest.
//
// Watch reads a changed file only after 100 ms without further changes, because it may be
// half written. It notices most changes immediately, through notifications of the
// operating system. Within five seconds it notices changes on network file systems and
// behind symbolic links in a folder, and new permissions of a file that was unreadable.
func Watch(ctx context.Context, state *cluster.State, opts Options) error {
	log := klog.FromContext(ctx).WithValues("path", opts.Path)
	f := &follower{opts: opts, log: log, state: state, notify: &fsnotify.Watcher{}, loaded: func(error) {}}
	if !opts.Once && opts.Path != manifest.Stdin {
		if notify, err := fsnotify.NewWatcher(); err != nil {
			f.noNotification(err)
		} else {
			defer notify.Close() // ignore the error of Close, which does no harm
			f.notify = notify
		}
	}
	return f.run(ctx)
}

// follower reads the manifests again when their sighting (the results of os.Stat)
// changes. A notification only triggers a new sighting. So it does not matter how a file
// changes: by a write, a rename, or a new symbolic link in a higher folder.
type follower struct {
	opts   Options
	log    klog.Logger
	state  *cluster.State
	notify *fsnotify.Watcher // its channels are nil if there are no notifications
	loaded func(error)       // called with the result of each reading except the first

	seen                sighting
	files               int    // number of files in the last valid reading
	failure, unnotified string // the last logged errors of readings and of notifications
	warned              map[string]bool
}

func (f *follower) run(ctx context.Context) error {
	f.arm()
	if err := f.load(ctx); ctx.Err() != nil {
		return nil
	} else if err != nil {
		return err
	}
	f.state.SetSynced()
	if f.opts.Path == manifest.Stdin && !f.opts.Once {
		<-ctx.Done()
	}
	poll := time.NewTicker(pollInterval)
	defer poll.Stop()
	for !f.opts.Once && ctx.Err() == nil {
		f.arm()
		again := false
		select {
		case <-ctx.Done():
		case <-f.notify.Events:
		case err := <-f.notify.Errors:
			f.noNotification(err)
		case <-poll.C:
			again = f.failure != ""
		}
		if !again && look(f.opts.Path).equal(f.seen) {
			continue
		}
		for range maxSettleTime / settleTime {
			f.seen = look(f.opts.Path)
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(settleTime):
			}
			if look(f.opts.Path).equal(f.seen) {
				break
			}
		}
		f.reload(ctx)
	}
	return nil
}

// errVanished reports a folder without manifests. This is an error, because a folder may
// be empty for a moment while it is replaced.
var errVanished = errors.New("folder no longer has manifests; use a List without items if there are no objects")

// load reads the manifests and writes their objects to the state.
func (f *follower) load(ctx context.Context) error {
	f.seen = look(f.opts.Path)
	m, err := load(ctx, f.opts.Path, f.opts.Options)
	if err != nil {
		return err
	}
	if m.files == 0 && f.files > 0 {
		return fmt.Errorf("read manifests: %w", errVanished)
	}
	f.files = m.files
	f.state.Update(func(tx *cluster.Tx) {
		tx.ReplaceNodes(slices.Values(m.nodes))
		tx.ReplaceServices(slices.Values(m.services))
		tx.ReplaceSlices(slices.Values(m.slices))
		for _, write := range m.problems {
			write(tx)
		}
	})
	warned := map[string]bool{}
	for _, w := range m.warnings {
		if !f.warned[w] && !warned[w] {
			f.log.Info("Manifests read with a warning", "warning", w)
		}
		warned[w] = true
	}
	f.warned = warned
	f.log.V(2).Info("Read manifests", "services", len(m.services), "slices", len(m.slices), "nodes", len(m.nodes))
	return nil
}

// reload reads the manifests again.
func (f *follower) reload(ctx context.Context) {
	err := f.load(ctx)
	if ctx.Err() != nil {
		return
	}
	failing := ""
	if errors.Is(err, fs.ErrNotExist) {
		failing = errVanished.Error() // the same message for a missing and an empty folder
	} else if err != nil {
		failing = strings.TrimPrefix(err.Error(), "read manifests: ")
	}
	if failing != "" && failing != f.failure {
		f.log.Error(err, "Cannot read manifests; keeping the previous state")
	} else if failing == "" && f.failure != "" {
		f.log.Info("Manifests are valid again")
	}
	f.failure = failing
	f.state.SetSourceError(err)
	f.loaded(err)
}

// noNotification logs an error of fsnotify if it differs from the last logged error.
func (f *follower) noNotification(err error) {
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fsnotify.ErrNonExistentWatch) && f.unnotified != err.Error() {
		f.unnotified = err.Error()
		f.log.Info("Notifications unavailable for some manifests; polling", "err", err, "interval", pollInterval)
	}
}

// arm requests notifications for the folder with the manifests. Because this folder may
// be replaced, it also requests notifications for the parent folder. If the path is a
// symbolic link, arm also requests notifications for these two folders of the target. A
// repeated request has an effect only if a new folder has replaced the old folder.
func (f *follower) arm() {
	if f.notify.Events == nil {
		return
	}
	var folders []string
	target, _ := filepath.EvalSymlinks(f.opts.Path) // after an error, target is "" and arm watches the working directory, which is harmless
	for _, folder := range []string{filepath.Clean(f.opts.Path), target} {
		if info, err := os.Stat(folder); err != nil || !info.IsDir() {
			folder = filepath.Dir(folder)
		}
		folders = append(folders, folder, filepath.Join(folder, ".."))
	}
	for _, folder := range f.notify.WatchList() {
		if !slices.Contains(folders, folder) {
			f.noNotification(f.notify.Remove(folder))
		}
	}
	for _, folder := range folders {
		f.noNotification(f.notify.Add(folder))
	}
}

// sighting contains what os.Stat returned for each file of a path. If os.Stat fails, the
// text of its error is the map's only key.
type sighting map[string]fs.FileInfo

func look(path string) sighting {
	s := sighting{}
	names, err := list(path)
	for _, name := range names {
		if err == nil {
			s[name], err = os.Stat(name)
		}
	}
	if err != nil {
		return sighting{err.Error(): nil}
	}
	return s
}

func (s sighting) equal(o sighting) bool {
	return maps.EqualFunc(s, o, func(a, b fs.FileInfo) bool {
		return a == b || a != nil && b != nil && os.SameFile(a, b) && a.Size() == b.Size() && a.ModTime().Equal(b.ModTime())
	})
}
