// SPDX-License-Identifier: Apache-2.0

package kpng

import (
	"context"
	"errors"
	"fmt"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/watcher/file"
	"github.com/kpng-project/kpng/watcher/kube"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// source returns what fills the state, as opts says.
func source(opts Options) (func(context.Context, *cluster.State) error, error) {
	given := 0
	for _, set := range [...]bool{opts.Kubeconfig != "", opts.Config != nil, opts.Informers != nil, opts.Manifests != ""} {
		if set {
			given++
		}
	}
	if given > 1 {
		return nil, errors.New("more than one of Kubeconfig, Config, Informers and Manifests is given")
	}
	if opts.Manifests != "" {
		return func(ctx context.Context, state *cluster.State) error {
			return file.Watch(ctx, state, file.Options{Path: opts.Manifests, Once: opts.Sink.Once, Options: opts.Services})
		}, nil
	}
	config := opts.Config
	if config == nil && opts.Informers == nil {
		var err error
		if config, err = loadConfig(opts.Kubeconfig); err != nil {
			return nil, err
		}
	}
	return func(ctx context.Context, state *cluster.State) error {
		return kube.Watch(ctx, state, kube.Options{
			Options:   opts.Services,
			Config:    config,
			Informers: opts.Informers,
			NodeName:  opts.NodeName,
			FailFast:  opts.Sink.Once,
		})
	}, nil
}

// loadConfig reads the kubeconfig file of path; without one, it takes the pod's
// service account or, outside a cluster, what kubectl would.
func loadConfig(path string) (*rest.Config, error) {
	if path == "" {
		config, err := rest.InClusterConfig()
		if err == nil {
			return config, nil
		}
		if !errors.Is(err, rest.ErrNotInCluster) {
			return nil, fmt.Errorf("using the pod's service account: %w", err)
		}
	}
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = path
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
	switch {
	case err == nil:
		return config, nil
	case path != "" && clientcmd.IsEmptyConfig(err):
		return nil, fmt.Errorf("kubeconfig %s: its current context names no cluster", path)
	case path != "":
		return nil, fmt.Errorf("kubeconfig %s: %w", path, err)
	case clientcmd.IsEmptyConfig(err):
		return nil, errors.New("no API server known: no kubeconfig or manifests given, not in a pod, and nothing in $KUBECONFIG or ~/.kube/config")
	default:
		return nil, fmt.Errorf("kubeconfig of $KUBECONFIG or ~/.kube/config: %w", err)
	}
}
