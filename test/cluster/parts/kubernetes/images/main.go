// SPDX-License-Identifier: Apache-2.0

// Command images prints the names of the images that the e2e tests of Kubernetes use.
package main

import (
	"fmt"

	"k8s.io/kubernetes/test/utils/image"
)

func main() {
	for _, config := range image.GetImageConfigs() {
		fmt.Println(config.GetE2EImage())
	}
}
