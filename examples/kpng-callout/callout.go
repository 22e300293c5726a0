// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"k8s.io/klog/v2"
)

// callout is the program in $CALLOUT.
type callout struct {
	args    []string // the program and its arguments
	timeout time.Duration
	stdout  *os.File

	// frontends is true if the program gets the node and its frontends on standard input,
	// instead of services.
	frontends bool
}

// gracePeriod limits how long the child processes of an ended callout can keep standard
// input and standard error open.
const gracePeriod = time.Second

// run runs the callout once, and waits until it ends. After the timeout or when ctx ends,
// it kills the callout.
func (c *callout) run(ctx context.Context, stdin io.Reader) error {
	ctx, cancel := context.WithTimeoutCause(ctx, c.timeout, fmt.Errorf("it ran longer than %s", c.timeout))
	defer cancel()
	var stderr tail
	cmd := exec.CommandContext(ctx, c.args[0], c.args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, c.stdout, &stderr
	cmd.WaitDelay = gracePeriod
	killAll(cmd)

	// The kernel kills the callout when the thread that started the callout ends. So reserve
	// this thread for this goroutine.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := cmd.Run()
	if ctx.Err() != nil && err != nil {
		err = fmt.Errorf("killed: %w", context.Cause(ctx))
	}
	if errors.Is(err, exec.ErrWaitDelay) {
		err = nil // the callout succeeded, but a child process still runs
	}
	said := stderr.String()
	switch {
	case err != nil && said != "":
		return fmt.Errorf("callout %s: %w: %s", c, err, said)
	case err != nil:
		return fmt.Errorf("callout %s: %w", c, err)
	case said != "":
		klog.FromContext(ctx).Info("Callout succeeded with output on standard error", "callout", c.String(), "stderr", said)
	}
	return nil
}

// String returns the command line of the callout.
func (c *callout) String() string { return strings.Join(c.args, " ") }
