// SPDX-License-Identifier: Apache-2.0

package file_test

import (
	"context"
	"fmt"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/watcher"
	"github.com/kpng-project/kpng/watcher/file"
)

// This program reads manifests and prints the names of their services.
func Example() {
	state := cluster.New(cluster.Options{})
	err := file.Watch(context.Background(), state, file.Options{
		Path: "../../examples/demo.yaml", Once: true,
		Options: watcher.Options{ServiceProxyName: "kpng-example"},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	for key := range state.Objects().Services.All() {
		fmt.Println(key)
	}
	// Output: default/kpng-example
}
