// SPDX-License-Identifier: Apache-2.0

package file_test

import (
	"context"
	"fmt"
	"os"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/watcher"
	"github.com/kpng-project/kpng/watcher/file"
)

// This program reads manifests and writes the objects that kpng keeps of them.
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
	objects := state.Objects()
	if err := file.Write(os.Stdout, objects, file.WriteOptions{ServiceProxyName: "kpng-example"}); err != nil {
		fmt.Println(err)
	}
}
