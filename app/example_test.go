// SPDX-License-Identifier: Apache-2.0

package app_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/pflag"
)

// A real program calls app.Main with its sink, or app.Execute with its command. This
// example sets the arguments itself and calls ExecuteContext.
func Example() {
	program := func(_ context.Context, services []*api.View) error {
		for _, s := range services {
			fmt.Println("program", s.Key(), "with", len(s.Endpoints), "endpoints")
		}
		return nil
	}
	cmd := app.Command(app.Options{Name: "my-proxy", Sink: sink.FullState(program)})
	cmd.SetArgs([]string{"--manifests", "../examples/demo.yaml", "--node-name", "vm-002", "--once"})
	if err := cmd.ExecuteContext(context.Background()); err != nil {
		log.Fatal(err)
	}
	// Output:
	// program default/web with 2 endpoints
}

// tableSink is a sink with the flag --table.
type tableSink struct{ table string }

// Register implements app.Configurable.
func (t *tableSink) Register(fs *pflag.FlagSet) {
	fs.StringVar(&t.table, "table", "my-proxy", "the `name` of the table to program")
}

// Configure implements app.Configurable.
func (t *tableSink) Configure() error {
	if t.table == "" {
		return errors.New("--table is empty")
	}
	return nil
}

// Sync implements sink.Sink.
func (t *tableSink) Sync(_ context.Context, c *sink.Changes) error {
	for s := range c.Services {
		fmt.Println("table", t.table, "gets", s.Key)
	}
	return nil
}

// The example runs a sink with flags of its own.
func ExampleConfigurable() {
	for _, table := range []string{"nodes", ""} {
		cmd := app.Command(app.Options{Name: "my-proxy", Sink: &tableSink{}})
		cmd.SetArgs([]string{"--manifests=../examples/demo.yaml", "--node-name=vm-002", "--once", "--table=" + table})
		fmt.Println(cmd.ExecuteContext(context.Background()))
	}
	// Output:
	// table nodes gets default/web
	// <nil>
	// --table is empty
}
