// SPDX-License-Identifier: Apache-2.0

package sink_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
)

// source returns a source with two services. Each has one endpoint.
func source() *sinktest.Source {
	src := sinktest.NewSource()
	for i, name := range []string{"dns", "web"} {
		src.Set(&api.View{
			Service: &api.Service{Namespace: "default", Name: name},
			Endpoints: []api.Endpoint{{
				Addr:       netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}),
				Conditions: api.Conditions{Ready: true, Serving: true},
			}},
		})
	}
	src.MarkSynced()
	return src
}

func Example() {
	src := source() // a real program uses a feed or a remote client
	printer := sink.Func(func(_ context.Context, c *sink.Changes) error {
		fmt.Println("first:", c.First, "last:", c.Last)
		for s := range c.Services {
			for old, new := range s.Endpoints() {
				switch {
				case old == nil:
					fmt.Println("add", new.Addr, "to", s.Key)
				case new == nil:
					fmt.Println("remove", old.Addr, "from", s.Key)
				}
			}
		}
		return nil
	})

	ctx, cancel := context.WithCancel(context.Background())
	d := sink.NewDriver(src, printer, sink.Options{Name: "printer"})
	ended := make(chan error)
	go func() { ended <- d.Run(ctx) }()

	_ = d.WaitApplied(ctx, src.Revision())
	src.Delete(web)
	_ = d.WaitApplied(ctx, src.Revision())
	cancel()
	fmt.Println(<-ended)
	// Output:
	// first: true last: true
	// add 10.0.0.1 to default/dns
	// add 10.0.0.2 to default/web
	// first: false last: false
	// remove 10.0.0.2 from default/web
	// context canceled
}

// The driver retries the service that cannot be programmed, without delaying the others.
func ExampleFailed() {
	attempts := 0
	program := func(c sink.Change) error {
		if attempts++; attempts == 1 {
			return errors.New("no memory in map")
		}
		fmt.Println("programmed", c.Key)
		return nil
	}
	backend := sink.Func(func(_ context.Context, c *sink.Changes) error {
		var failed sink.Failed
		for s := range c.Services {
			failed.Do(s.Key, func() error { return program(s) })
		}
		return failed.Err()
	})
	err := sink.Run(context.Background(), source(), backend, sink.Options{Once: true})
	fmt.Println(err)
	// Output:
	// programmed default/web
	// programmed default/dns
	// <nil>
}

func ExampleFullState() {
	writer := sink.FullState(func(_ context.Context, services []*api.View) error {
		for _, s := range services {
			fmt.Println(s.Key(), len(s.Endpoints))
		}
		return nil
	})
	fmt.Println(sink.Run(context.Background(), source(), writer, sink.Options{Once: true}))
	// Output:
	// default/dns 1
	// default/web 1
	// <nil>
}
