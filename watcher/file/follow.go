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
	"github.com/kpng-project/kpng/watcher"
	"k8s.io/klog/v2"
)

const (
	settleTime    = 100 * time.Millisecond // a file is read after this time without a change
	maxSettleTime = 2 * time.Second        // a file is read after this time even if it keeps changing
	pollInterval  = 5 * time.Second        // the time between checks without notifications
)

// Options configure Watch.
type Options struct {
	// Path is a file, a folder, or Stdin, which is read once.
	Path string
	// Once makes Watch return after the first reading.
	Once bool
	// Options select the objects for the proxy.
	watcher.Options
}

// Watch reads manifests into state and marks it as synced. It follows changes of the
// manifests until ctx ends and then returns nil. Each reading is one commit that changes
// only what differs. The state must have no other writer. Watch returns an error of the
// first reading. It logs an error of a later reading once, and state keeps its content
// until the manifests exist and are valid again. If a folder loses its last manifest,
// state keeps its objects.
//
// Watch reads a file when it has not changed for 100 ms, because it may be half written.
// It notices changes immediately if the operating system sends notifications. Otherwise
// it notices them within five seconds: on network file systems, behind symbolic links in
// a folder, and after changes of permissions.
func Watch(ctx context.Context, state *cluster.State, opts Options) error {
	log := klog.FromContext(ctx).WithValues("path", opts.Path)
	f := &follower{opts: opts, log: log, state: state, notify: &fsnotify.Watcher{}, loaded: func(error) {}}
	if !opts.Once && opts.Path != Stdin {
		if notify, err := fsnotify.NewWatcher(); err != nil {
			f.noNotification(err)
		} else {
			defer notify.Close() // an error needs no handling
			f.notify = notify
		}
	}
	return f.run(ctx)
}

// follower reads the manifests again when two sightings differ. A notification only
// triggers a new sighting. So files may be written, renamed over, or swapped by a link in
// a higher folder.
type follower struct {
	opts   Options
	log    klog.Logger
	state  *cluster.State
	notify *fsnotify.Watcher // its channels are nil if there are no notifications
	loaded func(error)       // called with the result of each reading except the first

	seen                sighting
	files               int    // number of files in the last valid reading
	failure, unnotified string // the last logged errors
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
	if f.opts.Path == Stdin && !f.opts.Once {
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

// A folder that is being replaced may look empty for a moment.
var errVanished = errors.New("folder no longer has manifests; use a List without items if there are no objects")

// load reads the manifests and writes them to the state.
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
		failing = errVanished.Error() // a folder that was removed may come back empty
	} else if err != nil {
		failing = strings.TrimPrefix(err.Error(), "read manifests: ")
	}
	if failing != "" && failing != f.failure {
		f.log.Error(err, "Cannot read manifests; keeping the previous state")
	} else if failing == "" && f.failure != "" {
		f.log.Info("Manifests are valid again")
	}
	f.failure = failing
	f.loaded(err)
}

// noNotification logs an error of the notifications, unless it is the same as the last
// one.
func (f *follower) noNotification(err error) {
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fsnotify.ErrNonExistentWatch) && f.unnotified != err.Error() {
		f.unnotified = err.Error()
		f.log.Info("Notifications unavailable for some manifests; polling", "err", err, "interval", pollInterval)
	}
}

// arm watches the folders in which a change may concern the path: the folder with the
// manifests, and its parent, in which it may be replaced. If the path is a symbolic link,
// it also watches the folders of its target. Adding a folder again has an effect only if
// another one has replaced it.
func (f *follower) arm() {
	if f.notify.Events == nil {
		return
	}
	var folders []string
	target, _ := filepath.EvalSymlinks(f.opts.Path) // empty after an error: the working directory, which is harmless
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

// sighting maps the names of a path's files to their state at some time. If the files
// cannot be read, its only key is the error.
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
