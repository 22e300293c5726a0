// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/spf13/cobra"
)

// addExamples sets the examples in the help texts of the commands that deliver services.
func addExamples(root *cobra.Command) {
	sources := map[string]string{
		"kube": "--kubeconfig kubeconfig.yaml",
		"file": "-i manifests.yaml",
		"api":  "--api unix:///run/kpng/kpng.sock",
	}
	for _, source := range root.Commands() {
		from, delivers := sources[source.Name()]
		if !delivers {
			continue
		}
		for _, target := range source.Commands() {
			switch target.Name() {
			case "to-api":
				target.Example = fmt.Sprintf("  %s %s --listen tcp://127.0.0.1:12090", target.CommandPath(), from)
			case "to-file":
				target.Example = fmt.Sprintf("  %[1]s state.yaml %[2]s\n  %[1]s - %[2]s --once", target.CommandPath(), from)
			default:
				for _, backend := range target.Commands() {
					needs := ""
					if backend.Name() == "ovs" {
						needs = " --bridge br-int"
					}
					backend.Example = fmt.Sprintf("  %[1]s %[2]s%[3]s\n  %[1]s %[2]s%[3]s --node-name worker-1 --once", backend.CommandPath(), from, needs)
				}
			}
		}
	}
}
