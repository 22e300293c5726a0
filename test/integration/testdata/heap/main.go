// SPDX-License-Identifier: Apache-2.0

// Command heap runs a proxy with a sink that does nothing. After the first pass it prints
// the number of services and the size of the live heap in bytes.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"runtime"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/sink"
)

func main() {
	var opts kpng.Options
	flag.StringVar(&opts.Kubeconfig, "kubeconfig", "", "the API server")
	flag.StringVar(&opts.Services.ServiceProxyName, "service-proxy-name", "", "the proxy's name")
	flag.StringVar(&opts.NodeName, "node-name", "", "the node")
	flag.Parse()
	if err := run(opts); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(opts kpng.Options) error {
	opts.Sinks = []kpng.Sink{{Sink: sink.Func(func(context.Context, *sink.Changes) error { return nil })}}
	p, err := kpng.New(opts)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	if err := p.WaitApplied(ctx); err != nil {
		return err
	}
	var memory runtime.MemStats
	for range 3 { // pools, and objects with finalizers, are freed only after several garbage collections
		runtime.GC()
	}
	runtime.ReadMemStats(&memory)
	fmt.Println(p.State().Objects().Services.Len(), memory.HeapAlloc)
	cancel()
	return <-ended
}
