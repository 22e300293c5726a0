// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/windows"
	"golang.org/x/sys/windows/svc"
	"golang.org/x/sys/windows/svc/eventlog"
)

func registerService(fs *pflag.FlagSet, asked *bool) {
	fs.BoolVar(asked, "windows-service", false, "run under the Windows service manager, even if nothing shows that it started the program; a service without --log-file logs to the event log")
}

// service returns how to run under the service manager, and nil if that has not
// started the program.
func (h *hosting) service() (*service, error) {
	started, err := svc.IsWindowsService()
	if err != nil && !h.windowsService {
		return nil, fmt.Errorf("finding out who started the program: %w", err)
	}
	if !started && !h.windowsService {
		return nil, nil
	}
	return &service{openLog: openEventLog, run: runService}, nil
}

// runService runs cmd until it ends or the service manager asks for that.
func runService(cmd *cobra.Command) error {
	h := serviceHandler{cmd: cmd}
	if err := svc.Run(cmd.Name(), &h); err != nil {
		return fmt.Errorf("running as a Windows service: %w", err)
	}
	return h.err
}

// serviceHandler tells the service manager how cmd fares.
type serviceHandler struct {
	cmd *cobra.Command
	err error
}

// Execute implements svc.Handler.
func (h *serviceHandler) Execute(_ []string, requests <-chan svc.ChangeRequest, status chan<- svc.Status) (bool, uint32) {
	const (
		accepts = svc.AcceptStop | svc.AcceptShutdown
		sign    = 2 * time.Second // how often stopping gives a sign of life
	)
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- h.cmd.ExecuteContext(ctx) }()
	status <- svc.Status{State: svc.Running, Accepts: accepts}

	stopping := svc.Status{State: svc.StopPending, WaitHint: uint32((5 * sign).Milliseconds())}
	alive := time.NewTicker(sign)
	defer alive.Stop()
	for {
		select {
		case h.err = <-ended:
			if h.err != nil {
				// Not a code of its own: the service manager restarts what failed
				// only if it says so, and the log has the reason.
				return false, uint32(windows.ERROR_EXCEPTION_IN_SERVICE)
			}
			return false, 0
		case r := <-requests:
			switch r.Cmd {
			case svc.Interrogate:
				status <- r.CurrentStatus
			case svc.Stop, svc.Shutdown:
				stop()
				status <- stopping
			}
		case <-alive.C:
			if ctx.Err() != nil {
				stopping.CheckPoint++
				status <- stopping
			}
		}
	}
}

// eventLog writes lines of klog to the event log.
type eventLog struct{ *eventlog.Log }

func openEventLog(name string) (io.Writer, error) {
	// Says how events are to be shown. It is there already but for the first
	// time, and without it they are shown all the same, with a remark.
	_ = eventlog.InstallAsEventCreate(name, eventlog.Error|eventlog.Warning|eventlog.Info)
	log, err := eventlog.Open(name)
	if err != nil {
		return nil, fmt.Errorf("opening the event log for source %s: %w", name, err)
	}
	return eventLog{log}, nil
}

// Write implements io.Writer.
func (l eventLog) Write(line []byte) (int, error) {
	const event = 1 // those up to 1000 are shown as they are
	write := l.Info
	switch line[0] { // the severity begins a line
	case 'E', 'F':
		write = l.Error
	case 'W':
		write = l.Warning
	}
	return len(line), write(event, string(bytes.TrimSpace(line)))
}
