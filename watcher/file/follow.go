// SPDX-License-Identifier: Apache-2.0

package file

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"

	"github.com/kpng-project/kpng/cluster"
)

const (
	// settleTime is how long a file must not have changed before it is read.
	settleTime = 100 * time.Millisecond
	// maxSettleTime is how long changes that never pause are waited out.
	maxSettleTime = 2 * time.Second
	// pollInterval is how often we look without being told to. Network file
	// systems tell nothing, and some changes happen where we do not watch: to
	// the target of a link in the folder, or two levels above it.
	pollInterval = 5 * time.Second
)

// follower reads manifests again when they change.
//
// What tells a change is what the files look like (see sighting); a
// notification of the operating system is but a reason to look. So it does not
// matter whether a file is written in place, renamed over, or swapped by a
// symbolic link some levels up, and notifications of a busy folder cost little.
type follower struct {
	opts  Options
	log   klog.Logger
	state *cluster.State

	newNotify func() (*fsnotify.Watcher, error)
	// loaded, if set, is told the outcome of each reading.
	loaded func(error)

	notifications notifications
	seen          sighting
	// files is how many files the last good reading found.
	files int
	// failing is the trouble of the last reading's error, empty if it was good.
	failing string
	// warned holds what the last good reading warned of.
	warned map[string]bool
}

func (f *follower) run(ctx context.Context) error {
	follow := !f.opts.Once && f.opts.Path != Stdin
	if follow {
		f.notifications.open(f.log, f.newNotify)
		defer f.notifications.close()
		f.notifications.arm(f.opts.Path)
	}
	switch err := f.load(ctx); {
	case ctx.Err() != nil:
		return nil
	case err != nil:
		return err
	}
	f.state.SetSynced()
	switch {
	case follow:
		f.follow(ctx)
	case !f.opts.Once:
		<-ctx.Done()
	}
	return nil
}

func (f *follower) follow(ctx context.Context) {
	poll := f.opts.Clock.NewTicker(pollInterval)
	defer poll.Stop()

	var settled <-chan time.Time // nil while nothing has changed
	var deadline time.Time       // for reading what does not settle
	for {
		changed := false
		select {
		case <-ctx.Done():
			return
		case event := <-f.notifications.events():
			// Two writes may be too close for the time of the file to tell.
			changed = event.Op != fsnotify.Chmod && f.seen.has(event.Name)
		case err := <-f.notifications.errors():
			f.notifications.failed(err)
		case <-poll.C():
			changed = f.failing != ""
		case <-settled:
			if look(f.opts.Path).equal(f.seen) || !f.opts.Clock.Now().Before(deadline) {
				settled = nil
				f.reload(ctx)
			}
		}
		f.notifications.arm(f.opts.Path)
		now := look(f.opts.Path)
		if !changed && now.equal(f.seen) {
			continue
		}
		f.seen = now
		if settled == nil {
			deadline = f.opts.Clock.Now().Add(maxSettleTime)
		}
		settled = f.opts.Clock.After(max(0, min(settleTime, deadline.Sub(f.opts.Clock.Now()))))
	}
}

// load reads the manifests and writes them to the state.
func (f *follower) load(ctx context.Context) error {
	f.seen = look(f.opts.Path)
	m, files, err := load(ctx, f.opts.Path, f.opts.Options)
	if err != nil {
		return err
	}
	if files == 0 && f.files > 0 {
		// Were it meant, it would look the same as a folder being replaced.
		return fmt.Errorf("reading manifests: %w", errVanished)
	}
	f.files = files
	f.state.Update(func(tx *cluster.Tx) {
		tx.ReplaceNodes(slices.Values(m.Nodes))
		tx.ReplaceServices(slices.Values(m.Services))
		tx.ReplaceSlices(slices.Values(m.Slices))
	})
	warned := make(map[string]bool, len(m.Warnings))
	for _, w := range m.Warnings {
		if !f.warned[w.Error()] && !warned[w.Error()] {
			f.log.Info("Manifests are used with a warning", w.keysAndValues()...)
		}
		warned[w.Error()] = true
	}
	f.warned = warned
	f.log.V(2).Info("Read manifests", "services", len(m.Services), "slices", len(m.Slices), "nodes", len(m.Nodes))
	return nil
}

// errVanished says that a folder has lost its manifests.
var errVanished = errors.New("the folder has no manifests any more; a List without items says that there is nothing")

// reload is load for all but the first time.
func (f *follower) reload(ctx context.Context) {
	err := f.load(ctx)
	if ctx.Err() != nil {
		return
	}
	switch {
	case err != nil && trouble(err) != f.failing:
		f.failing = trouble(err)
		f.log.Error(err, "Manifests cannot be used, keeping what was read before")
	case err == nil && f.failing != "":
		f.failing = ""
		f.log.Info("Manifests are good again")
	}
	if f.loaded != nil {
		f.loaded(err)
	}
}

// trouble returns what tells err from others that are logged. A folder that is
// removed and comes back empty is one trouble.
func trouble(err error) string {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, errVanished) {
		return errVanished.Error()
	}
	return err.Error()
}

// sighting is what the files of a path looked like at some time.
type sighting struct {
	files []seenFile
	// err says why there is nothing to see.
	err string
}

type seenFile struct {
	name string
	info os.FileInfo
}

func look(path string) sighting {
	names, err := list(path)
	if err != nil {
		return sighting{err: err.Error()}
	}
	var s sighting
	for _, name := range names {
		info, err := os.Stat(name)
		if err != nil {
			return sighting{err: err.Error()}
		}
		s.files = append(s.files, seenFile{name, info})
	}
	return s
}

func (s sighting) equal(o sighting) bool {
	return s.err == o.err && slices.EqualFunc(s.files, o.files, func(a, b seenFile) bool {
		return a.name == b.name && os.SameFile(a.info, b.info) && a.info.Size() == b.info.Size() && a.info.ModTime().Equal(b.info.ModTime())
	})
}

// has reports whether name is one of the files.
func (s sighting) has(name string) bool {
	return slices.ContainsFunc(s.files, func(f seenFile) bool { return filepath.Clean(f.name) == filepath.Clean(name) })
}
