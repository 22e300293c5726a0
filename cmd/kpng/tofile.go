// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/watcher/file"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"
)

// toFile writes the state of a source, marked so that it is read back with the
// source's own flags.
func toFile(source *app.Source) *cobra.Command {
	return writeCommand(source, func() file.WriteOptions {
		return file.WriteOptions{ServiceProxyName: source.Services().ServiceProxyName, AllPortsAnnotation: source.AllPortsAnnotation()}
	})
}

// toFileFromAPI is toFile for a source that does not say what it was told to serve.
func toFileFromAPI(source *app.Source) *cobra.Command {
	var marks file.WriteOptions
	cmd := writeCommand(source, func() file.WriteOptions { return marks })
	cmd.Flags().StringVar(&marks.ServiceProxyName, "service-proxy-name", "", "label services and slices as those of the proxy of this `name`, for who reads the file with the same flag")
	cmd.Flags().StringVar(&marks.AllPortsAnnotation, "all-ports-annotation", file.DefaultAllPortsAnnotation, "mark all-ports services with this `annotation`, for who reads the file with the same flag")
	return cmd
}

func writeCommand(source *app.Source, marks func() file.WriteOptions) *cobra.Command {
	var (
		once     bool
		interval time.Duration
	)
	cmd := &cobra.Command{
		Use:   "to-file FILE",
		Short: "Write the state of the cluster as manifests, in YAML or JSON, for kpng file to read",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			w, err := newFileWriter(args[0], marks())
			switch {
			case err != nil:
				return err
			case interval < 0:
				return fmt.Errorf("--min-write-interval is negative: %v", interval)
			case w.path == file.Stdin:
				return writeOnce(cmd.Context(), source, func(s *cluster.Snapshot) error { return file.Write(cmd.OutOrStdout(), s, w.options) })
			case once:
				return writeOnce(cmd.Context(), source, w.write)
			}
			state := cluster.New(cluster.Options{})
			group, ctx := errgroup.WithContext(cmd.Context())
			group.Go(func() error { return source.Watch(ctx, state) })
			group.Go(func() error { return w.follow(ctx, state, interval) })
			return group.Wait()
		},
	}
	cmd.Flags().SortFlags = false
	cmd.Flags().BoolVar(&once, "once", false, "end when everything has been written once; so it always is for -, the standard output")
	cmd.Flags().DurationVar(&interval, "min-write-interval", time.Second, "the least time from one writing to the next")
	return cmd
}

// writeOnce writes what the source says now.
func writeOnce(ctx context.Context, source *app.Source, write func(*cluster.Snapshot) error) error {
	snapshot, err := source.Load(ctx)
	if err != nil {
		return err
	}
	return write(snapshot)
}

// fileWriter keeps a file of manifests.
type fileWriter struct {
	path    string
	options file.WriteOptions
}

// newFileWriter returns a writer of the file, or of the standard output. The
// file's name says whether it is JSON.
func newFileWriter(path string, opts file.WriteOptions) (*fileWriter, error) {
	switch filepath.Ext(path) {
	case ".json":
		opts.JSON = true
	case ".yaml", ".yml":
	default:
		if path != file.Stdin {
			return nil, fmt.Errorf("file %q: its name has to end in .yaml, .yml or .json", path)
		}
	}
	return &fileWriter{path, opts}, nil
}

// follow writes the state when it has synced and again whenever it has changed,
// until ctx ends; then it returns nil. It returns an error if the first writing
// fails. A later failure is logged, and tried again.
func (w *fileWriter) follow(ctx context.Context, state *cluster.State, interval time.Duration) error {
	changed := state.Synced()
	failed := ""
	for first := true; ; first = false {
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
		snapshot := state.Snapshot()
		err := w.write(snapshot)
		switch {
		case err == nil:
			failed = ""
			changed = state.Changed(snapshot.Revision)
		case first:
			return err
		case err.Error() != failed:
			failed = err.Error()
			klog.FromContext(ctx).Error(err, "Could not write the state, will try again")
		}
		select {
		case <-time.After(max(interval, retryInterval(err))):
		case <-ctx.Done():
			return nil
		}
	}
}

// retryInterval is the least time until a failed writing is tried again.
func retryInterval(err error) time.Duration {
	if err == nil {
		return 0
	}
	return 5 * time.Second
}

// write replaces the file, as a whole, by one with the state. What goes wrong in
// the same way is the same error: it does not name the file that is new each time.
func (w *fileWriter) write(s *cluster.Snapshot) error {
	err := w.replace(s)
	var atPath *fs.PathError
	var atLink *os.LinkError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &atPath):
		err = fmt.Errorf("%s: %w", atPath.Op, atPath.Err)
	case errors.As(err, &atLink):
		err = fmt.Errorf("%s: %w", atLink.Op, atLink.Err)
	}
	return fmt.Errorf("writing %s: %w", w.path, err)
}

func (w *fileWriter) replace(s *cluster.Snapshot) (err error) {
	// A name that who reads the folder passes over.
	next, err := os.CreateTemp(filepath.Dir(w.path), ".kpng-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			next.Close()
			os.Remove(next.Name())
		}
	}()
	if err := file.Write(next, s, w.options); err != nil {
		return err
	}
	if err := finish(next); err != nil {
		return err
	}
	return os.Rename(next.Name(), w.path)
}

// finish makes f what everybody may read, even after the machine has crashed.
func finish(f *os.File) error {
	if err := f.Chmod(0o644); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	return f.Close()
}
