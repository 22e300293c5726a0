// SPDX-License-Identifier: Apache-2.0

package main

import (
	userspace "github.com/kpng-project/kpng/backends/userspace/proxy"
	kernelspace "github.com/kpng-project/kpng/backends/windows/kernelspace/proxy"
	"github.com/kpng-project/kpng/backends/windows/kernelspace/winhns"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/cobra"
)

// platformBackends returns the backends that only exist here.
func platformBackends() []backend {
	return []backend{
		{"kernelspace", "Program services into the kernel by the Host Networking Service (HNS), in place of kube-proxy or beside it", newKernelspace},
		{"userspace", "Proxy by sockets of this process, at addresses that are put on a network interface", newUserspace(userspace.NewWindows)},
	}
}

func newKernelspace(cmd *cobra.Command) func() (sink.Sink, error) {
	cmd.Long = "Makes load balancers of the Host Networking Service (HNS) for services, in place of kube-proxy or, for services of another proxy name, beside it. " +
		"What is programmed stays when the program ends: see kpng cleanup kernelspace. It needs an administrator's rights."
	p := kernelspace.New(winhns.HNS{})
	p.Register(cmd.Flags())
	return func() (sink.Sink, error) { return p, nil }
}
