// SPDX-License-Identifier: Apache-2.0

// Command kpng delivers the services of a cluster from a source to a target. A source is
// an API server, manifests, or another kpng. A target is a network server, a backend in
// this process, or a file.
//
//	kpng kube --kubeconfig F to-api --listen unix:///run/kpng/kpng.sock
//	kpng api --api unix:///run/kpng/kpng.sock to-local json
//
// The command also explains what a node does with a service, and why. docs/operate/run.md is
// its manual.
package main

import (
	"github.com/kpng-project/kpng/internal/command"
	"github.com/spf13/cobra"
)

func main() { command.Execute(newRoot()) }

func newRoot() *cobra.Command {
	var server, manifests, other command.Source
	kube := group("kube", "Watch a Kubernetes API server", targets(&server, true)...)
	server.RegisterKube(kube.PersistentFlags())
	file := group("file", "Read Kubernetes manifests and follow their changes", targets(&manifests, true)...)
	manifests.RegisterManifests(file.PersistentFlags())
	if err := file.MarkPersistentFlagRequired("manifests"); err != nil {
		panic(err) // the flag exists
	}
	api := group("api", "Read from a kpng server (to-api)", targets(&other, false)...)
	other.RegisterAPI(api.PersistentFlags())

	root := group("kpng", "Deliver the services of a cluster to nodes: serve, program or write them")
	addGroup(root, "Sources: read services and deliver them", kube, file, api)
	addGroup(root, "Questions: what there is, and why", getCommand(), explainCommand(), statusCommand())
	addGroup(root, "Node", checkCommand(), waitCommand(), cleanupCommand())
	root.AddCommand(manCommand())
	root.Example = `  kpng kube to-local nftables                    # serve this node in place of kube-proxy
  kpng file -i demo.yaml to-local json --once    # print what a node would serve; needs no cluster
  kpng explain default/web                       # why does a service have these endpoints?`
	addExamples(root)
	root.Version = command.Version()
	root.SilenceErrors = true
	root.SilenceUsage = true
	command.RegisterLogging(root.PersistentFlags())
	return root
}

// group returns a command that only has subcommands.
func group(name, short string, commands ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use:   name,
		Short: short,
	}
	cmd.PersistentFlags().SortFlags = false
	cmd.AddCommand(commands...)
	return cmd
}

// addGroup adds commands with a title to the help text of cmd.
func addGroup(cmd *cobra.Command, title string, commands ...*cobra.Command) {
	cmd.AddGroup(&cobra.Group{ID: title, Title: title})
	for _, c := range commands {
		c.GroupID = title
	}
	cmd.AddCommand(commands...)
}

// targets returns the commands for a source, one per target. hasSelection is true if
// flags select the services. If the source is a kpng server, hasSelection is false,
// because that server has already selected the services.
func targets(s *command.Source, hasSelection bool) []*cobra.Command {
	return []*cobra.Command{toAPI(s, hasSelection), toLocal(s, hasSelection), toFile(s, hasSelection)}
}
