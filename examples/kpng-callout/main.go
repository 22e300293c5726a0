// SPDX-License-Identifier: Apache-2.0

// Command kpng-callout runs the program in $CALLOUT after every change of the node's
// services. The program gets all services on standard input, with one JSON object per
// service, as kpng-json prints it. With --frontends, the program gets the node and one
// JSON object per frontend instead of the services. Without flags that select a source or
// services, it reads from the kpng server on this machine. Examples:
//
//	CALLOUT=jq kpng-callout
//	CALLOUT=jq kpng-callout --manifests examples/demo.yaml --node-name vm-002
//
// If the program fails, kpng-callout runs it again, with backoff.
package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/remote"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/cobra"
)

func main() {
	callout := callout{stdout: os.Stdout}
	cmd := app.Command(app.Options{Name: "kpng-callout", Sink: sink.FullStateOf(&callout), Server: remote.DefaultAddress})
	cmd.Long = "kpng-callout runs the program $CALLOUT with the node's whole state on standard input, one JSON object per service. The first run follows when all services are known."
	cmd.Flags().DurationVar(&callout.timeout, "callout-timeout", time.Minute, "kill $CALLOUT and its children after this time, and count it as failed")
	cmd.Flags().BoolVar(&callout.frontends, "frontends", false, "pass the node and each frontend, with every decision made, instead of services")
	cmd.PreRunE = func(*cobra.Command, []string) (err error) {
		if callout.timeout <= 0 {
			return fmt.Errorf("--callout-timeout %v must be greater than zero", callout.timeout)
		}
		if callout.args, err = split(os.Getenv("CALLOUT")); err != nil {
			return err
		}
		if _, err := exec.LookPath(callout.args[0]); err != nil {
			return fmt.Errorf("find the program in the environment variable CALLOUT: %w", err)
		}
		return nil
	}
	app.Execute(cmd)
}

// SyncState implements sink.StateSink.
func (c *callout) SyncState(ctx context.Context, node *api.Node, services []*api.View) error {
	var stdin bytes.Buffer
	var err error
	if c.frontends {
		err = nodeview.WriteFrontends(&stdin, node, services)
	} else {
		err = nodeview.WriteViews(&stdin, services)
	}
	if err != nil {
		return err
	}
	return c.run(ctx, &stdin)
}
