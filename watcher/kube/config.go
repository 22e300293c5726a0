// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"errors"
	"fmt"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// LoadConfig returns how to reach the API server of a kubeconfig file. Without a
// path, it takes the pod's service account or, outside a cluster, what kubectl
// would: $KUBECONFIG, else ~/.kube/config. It talks to nobody.
func LoadConfig(path string) (*rest.Config, error) {
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
		return nil, errors.New("no API server known: no kubeconfig given, not in a pod, and nothing in $KUBECONFIG or ~/.kube/config")
	default:
		return nil, fmt.Errorf("kubeconfig of $KUBECONFIG or ~/.kube/config: %w", err)
	}
}
