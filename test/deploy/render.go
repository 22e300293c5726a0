// SPDX-License-Identifier: Apache-2.0

// Package deploy renders the files in cmd/kpng/deploy for tests.
package deploy

import (
	"fmt"

	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

// Render returns the manifest that "kubectl apply -k" applies for a directory.
func Render(dir string) ([]byte, error) {
	objects, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	if err != nil {
		return nil, fmt.Errorf("render %s: %w", dir, err)
	}
	return objects.AsYaml()
}
