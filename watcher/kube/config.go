// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"errors"
	"fmt"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// LoadConfig returns the connection settings in the kubeconfig file at path. If path is
// empty, it uses the pod's service account or, outside a cluster, the same file as
// kubectl: $KUBECONFIG, else ~/.kube/config. If there is none of these, the error is a
// clientcmd.ErrEmptyConfig. It does not connect.
func LoadConfig(path string) (*rest.Config, error) {
	if path == "" {
		config, err := rest.InClusterConfig()
		if err == nil {
			return config, nil
		}
		if !errors.Is(err, rest.ErrNotInCluster) {
			return nil, fmt.Errorf("use the pod's service account: %w", err)
		}
	}
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = path
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
	switch {
	case err == nil:
		return config, nil
	case path != "" && clientcmd.IsEmptyConfig(err):
		return nil, fmt.Errorf("read kubeconfig %s: the current context has no cluster", path)
	case path != "":
		return nil, fmt.Errorf("read kubeconfig %s: %w", path, err)
	case clientcmd.IsEmptyConfig(err):
		return nil, noServer{}
	default:
		return nil, fmt.Errorf("read kubeconfig from $KUBECONFIG or ~/.kube/config: %w", err)
	}
}

// noServer is a clientcmd.ErrEmptyConfig with a text that names the places searched.
type noServer struct{}

func (noServer) Error() string {
	return "no API server known: no kubeconfig given, no pod service account, and no $KUBECONFIG or ~/.kube/config"
}

func (noServer) Unwrap() error { return clientcmd.ErrEmptyConfig }
