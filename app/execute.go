// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"
)

// Execute runs cmd as the whole program, with the program's arguments, and exits.
// It minds the flags of [RegisterLogging], and on Windows runs under the service
// manager if that started the program.
//
// It enables client-go's streaming lists (KEP-3157), which are off by default before
// v0.35, unless the environment variable KUBE_FEATURE_WatchListClient is set.
func Execute(cmd *cobra.Command) {
	const streamingLists = "KUBE_FEATURE_WatchListClient"
	if _, set := os.LookupEnv(streamingLists); !set {
		os.Setenv(streamingLists, "true") // client-go reads it at the first list
	}
	err := host(cmd)
	klog.Flush()
	if err != nil {
		os.Exit(1)
	}
}

// host runs cmd as its arguments say, and tells why it failed if it did.
func host(cmd *cobra.Command) error {
	h := hostingOf(os.Args[1:])
	service, err := h.service()
	var log io.Writer
	if err == nil {
		log, err = h.openLog(service, cmd.Name())
	}
	if log != nil {
		logTo(log)
	}
	switch {
	case err != nil:
	case service != nil:
		err = service.run(cmd)
	default:
		err = untilSignal(cmd)
	}
	switch {
	case err == nil:
	case log != nil:
		klog.ErrorS(err, "The program ends", "command", cmd.Name())
	default:
		fmt.Fprintf(os.Stderr, "%s: %v\n", cmd.Name(), err)
	}
	return err
}

// openLog opens what to log to; nil means standard error.
func (h *hosting) openLog(s *service, name string) (io.Writer, error) {
	switch {
	case h.logFile != "":
		return openLogFile(string(h.logFile), 100<<20)
	case s != nil:
		return s.openLog(name)
	default:
		return nil, nil
	}
}

// service is how a program runs under a service manager, to which standard error
// means nothing.
type service struct {
	openLog func(name string) (io.Writer, error)
	run     func(*cobra.Command) error
}

// untilSignal runs cmd until it ends or a signal asks for that.
func untilSignal(cmd *cobra.Command) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // so that a second signal kills
	return cmd.ExecuteContext(ctx)
}
