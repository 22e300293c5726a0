// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"sync"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/remote"
	"github.com/kpng-project/kpng/remote/transport"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
)

// apiFlags are the settings of a command that is served by another kpng.
type apiFlags struct {
	addresses []string
	tls       transport.TLS
	insecure  bool
}

func (f *apiFlags) register(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.StringSliceVar(&f.addresses, "api", nil, "be served by the kpng at this `address`, tcp://host:port or unix:///path; of several, one after the other is tried")
	fs.StringVar(&f.tls.CAFile, "tls-ca-file", "", "with --api: the `file` with the authorities that sign the server's certificate; for TLS, with the next two")
	fs.StringVar(&f.tls.CertFile, "tls-cert-file", "", "with --api: the `file` with this client's certificate")
	fs.StringVar(&f.tls.KeyFile, "tls-key-file", "", "with --api: the `file` with the certificate's key")
	fs.StringVar(&f.tls.ServerName, "tls-server-name", "", "with --api: the `name` in the server's certificate; without it, the host of its address")
	fs.BoolVar(&f.insecure, "insecure", false, "with --api: allow an address of another machine without TLS")
	// What to serve is the server's to say.
	for _, other := range []string{"kubeconfig", "manifests", "service-proxy-name", "keep-labels", "keep-annotations", "all-ports-annotation"} {
		cmd.MarkFlagsMutuallyExclusive("api", other)
	}
}

// check returns an error if there are flags that mean nothing without another one.
func (f *apiFlags) check() error {
	if len(f.addresses) == 0 && (f.tls != transport.TLS{} || f.insecure) {
		return errors.New("the flags --tls-… and --insecure are for --api, which is not given")
	}
	return nil
}

func (f *apiFlags) options() transport.DialOptions {
	opts := transport.DialOptions{Addresses: f.addresses, Insecure: f.insecure}
	if f.tls != (transport.TLS{}) {
		opts.TLS = &f.tls
	}
	return opts
}

// served is a source that another kpng serves.
type served struct {
	*remote.Client
	node string
	opts kpng.Options // of which those of the node and of sinks count

	mu     sync.Mutex
	driver *sink.Driver
}

func newServed(dial transport.DialOptions, opts kpng.Options) (*served, error) {
	if opts.NodeName == "" {
		name, err := kpng.DefaultNodeName()
		if err != nil {
			return nil, err
		}
		opts.NodeName = name
	}
	dial.FailFast = opts.Sink.Once
	client, err := remote.NewClient(remote.ClientOptions{DialOptions: dial, NodeName: opts.NodeName})
	if err != nil {
		return nil, err
	}
	return &served{Client: client, node: opts.NodeName, opts: opts}, nil
}

// Run implements source, for one sink.
func (v *served) Run(ctx context.Context, sinks ...sink.Sink) error {
	opts := v.opts.Sink
	opts.Observer = v.opts.Observe(opts.Name)
	driver := sink.NewDriver(v.Client, sinks[0], opts)
	v.mu.Lock()
	v.driver = driver
	v.mu.Unlock()
	defer v.Close()

	group, running := errgroup.WithContext(ctx)
	following, stopFollowing := context.WithCancel(running)
	group.Go(func() error {
		err := v.Client.Run(following)
		if following.Err() != nil {
			return nil
		}
		return err
	})
	group.Go(func() error {
		defer stopFollowing()
		return driver.Run(running)
	})
	err := group.Wait()
	if err == context.Cause(ctx) && !opts.Once {
		return nil
	}
	return err
}

// Status implements source.
func (v *served) Status() []sink.Status {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.driver == nil {
		return nil
	}
	return []sink.Status{v.driver.Status()}
}

// NodeName implements source.
func (v *served) NodeName() string { return v.node }
