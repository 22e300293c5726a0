// SPDX-License-Identifier: Apache-2.0

// Command kpng-callout runs the program that $CALLOUT names, with arguments if
// need be, whenever what its node has to proxy changes. The program is given all
// of it on standard input, and never a part of it: one JSON object a service, as
// kpng-json prints it, or with --frontends the node and one JSON object a frontend:
//
//	CALLOUT=jq kpng-callout --manifests examples/demo.yaml --node-name vm-002
//
// A program that fails is run again, after a while that grows.
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
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/cobra"
)

func main() {
	callout := callout{stdout: os.Stdout}
	cmd := app.Command("kpng-callout", sink.FullStateOf(&callout))
	cmd.Long = "kpng-callout runs the program $CALLOUT with all that this node has to proxy on standard input, one JSON object a service: never a part of it, and for the first time when every service is known."
	cmd.Flags().DurationVar(&callout.timeout, "callout-timeout", time.Minute, "kill $CALLOUT and what it started, and count it as failed, when it runs for longer")
	cmd.Flags().BoolVar(&callout.frontends, "frontends", false, "give the node on a line, then each frontend with everything decided, instead of services")
	cmd.PreRunE = func(*cobra.Command, []string) (err error) {
		if callout.timeout <= 0 {
			return fmt.Errorf("--callout-timeout is not greater than zero: %v", callout.timeout)
		}
		if callout.args, err = split(os.Getenv("CALLOUT")); err != nil {
			return err
		}
		if _, err := exec.LookPath(callout.args[0]); err != nil {
			return fmt.Errorf("the environment variable CALLOUT names a program that cannot be run: %w", err)
		}
		return nil
	}
	app.Execute(cmd)
}

// SyncState implements sink.StateSink.
func (c *callout) SyncState(ctx context.Context, node *api.Node, services []*api.ServiceEndpoints) error {
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
