// SPDX-License-Identifier: Apache-2.0

package kpng

import (
	"context"
	"errors"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/watcher/file"
	"github.com/kpng-project/kpng/watcher/kube"
)

// source returns a function that fills the cluster state from the source in opts. If once
// is true, that function does not retry after an error but returns the error.
func source(opts Options, once bool) (func(context.Context, *cluster.State) error, error) {
	given := 0
	for _, set := range [...]bool{opts.Kubeconfig != "", opts.Config != nil, opts.Informers != nil, opts.Manifests != "", opts.Source != nil} {
		if set {
			given++
		}
	}
	if given > 1 {
		return nil, errors.New("at most one of Kubeconfig, Config, Informers, Manifests and Source may be set")
	}
	if opts.Source != nil {
		return opts.Source, nil
	}
	if opts.Manifests != "" {
		return func(ctx context.Context, state *cluster.State) error {
			return file.Watch(ctx, state, file.Options{Path: opts.Manifests, Once: once, Options: opts.Services})
		}, nil
	}
	config := opts.Config
	if config == nil && opts.Informers == nil {
		var err error
		if config, err = kube.LoadConfig(opts.Kubeconfig); err != nil {
			return nil, err
		}
	}
	from := kube.Options{
		Options:   opts.Services,
		Config:    config,
		Informers: opts.Informers,
		NodeName:  opts.NodeName,
		FailFast:  once,
	}
	return func(ctx context.Context, state *cluster.State) error { return kube.Watch(ctx, state, from) }, from.Validate()
}
