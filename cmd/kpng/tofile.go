// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/manifest"
	"github.com/kpng-project/kpng/internal/usage"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"
)

// toFile returns the command that writes the state of a source to a file. The file's
// services get a label and an annotation, so that "kpng file" with the same flags selects
// them. If hasSelection is false, the source has no flags for the label and the
// annotation, so the command adds these flags.
func toFile(source *command.Source, hasSelection bool) *cobra.Command {
	var (
		once     bool
		interval time.Duration
		marks    manifest.WriteOptions
	)
	cmd := &cobra.Command{
		Use:   "to-file FILE",
		Short: "Write the state of the cluster as YAML or JSON manifests for kpng file",
		Args:  usage.One,
		RunE: func(cmd *cobra.Command, args []string) error {
			if hasSelection {
				marks = manifest.WriteOptions{ServiceProxyName: source.Services().ServiceProxyName, AllPortsAnnotation: source.AllPortsAnnotation()}
			}
			w, err := newFileWriter(args[0], marks)
			switch {
			case err != nil:
				return err
			case interval < 0:
				return usage.Errorf("--min-write-interval is negative: %v", interval)
			case once || w.path == manifest.Stdin:
				snapshot, err := source.Load(cmd.Context())
				if err != nil {
					return err
				}
				if w.path == manifest.Stdin {
					return manifest.Write(cmd.OutOrStdout(), snapshot, w.options)
				}
				return w.write(snapshot)
			}
			klog.FromContext(cmd.Context()).Info("Starting", "version", command.Version(), "source", source.String(), "file", w.path)
			state := cluster.New(cluster.Options{MaxElements: source.MaxElements()})
			group, ctx := errgroup.WithContext(cmd.Context())
			group.Go(func() error { return source.Watch(ctx, state) })
			group.Go(func() error { return w.follow(ctx, state, interval) })
			return group.Wait()
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.BoolVar(&once, "once", false, "exit when everything has been written once; implied by -, the standard output")
	fs.DurationVar(&interval, "min-write-interval", time.Second, "minimum time between writes")
	if hasSelection {
		source.RegisterAllPorts(fs)
	} else {
		fs.StringVar(&marks.ServiceProxyName, "service-proxy-name", "", "label services and slices as those of the proxy of this `name`, so that kpng file with the same flag reads them")
		fs.StringVar(&marks.AllPortsAnnotation, "all-ports-annotation", manifest.DefaultAllPortsAnnotation, "mark all-ports services with this `annotation`, so that kpng file with the same flag reads them")
	}
	return cmd
}

// fileWriter writes the state to a file of manifests.
type fileWriter struct {
	path    string
	options manifest.WriteOptions
}

// newFileWriter returns a writer for the file, or for standard output. The file name's
// suffix selects JSON or YAML.
func newFileWriter(path string, opts manifest.WriteOptions) (*fileWriter, error) {
	switch ext := filepath.Ext(path); {
	case ext == ".json":
		opts.JSON = true
	case ext != ".yaml" && ext != ".yml" && path != manifest.Stdin:
		return nil, usage.Errorf("file name %q must end in .yaml, .yml or .json", path)
	}
	return &fileWriter{path, opts}, nil
}

// follow writes the state when it is synced and after each change. When ctx ends, follow
// returns nil. If the first write fails, follow returns an error. If a later write fails,
// follow retries. It logs only the first of several failures in a row.
func (w *fileWriter) follow(ctx context.Context, state *cluster.State, interval time.Duration) error {
	changed := state.Changed(0)
	for first, failed := true, false; ; first = false {
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
		snapshot, wait := state.Objects(), interval
		err := w.write(snapshot)
		switch {
		case err == nil:
			changed = state.Changed(snapshot.Revision)
		case first:
			return err
		case !failed:
			klog.FromContext(ctx).Error(err, "Cannot write the state; retrying")
		}
		if failed = err != nil; failed {
			wait = max(interval, 5*time.Second)
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil
		}
	}
}

// write replaces the whole file.
func (w *fileWriter) write(s *cluster.Objects) error {
	if err := w.replace(s); err != nil {
		return fmt.Errorf("write %s: %w", w.path, err)
	}
	return nil
}

func (w *fileWriter) replace(s *cluster.Objects) error {
	// The command kpng file skips this temporary file, because its name begins with a dot.
	next, err := os.CreateTemp(filepath.Dir(w.path), ".kpng-*")
	if err != nil {
		return err
	}
	// Make the file readable for all users and complete even after a crash of the machine.
	err = errors.Join(manifest.Write(next, s, w.options), next.Chmod(0o644), next.Sync(), next.Close())
	if err == nil {
		err = os.Rename(next.Name(), w.path)
	}
	if err != nil {
		os.Remove(next.Name())
	}
	return err
}
