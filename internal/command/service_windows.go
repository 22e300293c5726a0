// SPDX-License-Identifier: Apache-2.0

package command

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

// errInUse is the error of a listen address that another process uses.
const errInUse = windows.WSAEADDRINUSE

func registerService(fs *pflag.FlagSet, asked *bool) {
	fs.BoolVar(asked, "windows-service", false, "run as a Windows service even if the service manager is not detected; without --log-file, a service logs to the event log")
}

// detectService returns nil if the service manager did not start the program and
// --windows-service is not set.
func (h *hosting) detectService() (*service, error) {
	started, err := svc.IsWindowsService()
	if err != nil && !h.windowsService {
		return nil, fmt.Errorf("detect Windows service manager: %w", err)
	}
	if !started && !h.windowsService {
		return nil, nil
	}
	return &service{openLog: openEventLog, run: runService}, nil
}

// runService runs cmd until it returns or the service manager stops it.
func runService(cmd *cobra.Command) error {
	h := serviceHandler{cmd: cmd}
	if err := svc.Run(cmd.Name(), &h); err != nil {
		return fmt.Errorf("run as Windows service: %w", err)
	}
	return h.err
}

// serviceHandler reports the status of cmd to the service manager.
type serviceHandler struct {
	cmd *cobra.Command
	err error
}

// Execute implements svc.Handler.
func (h *serviceHandler) Execute(_ []string, requests <-chan svc.ChangeRequest, status chan<- svc.Status) (bool, uint32) {
	const (
		accepts = svc.AcceptStop | svc.AcceptShutdown
		sign    = 2 * time.Second // time between status reports while the program stops
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
				// By default, the service manager restarts a service only if its exit code is a
				// system error code. So return such a code; the log has the actual error.
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
	// Without an event source, Windows adds to each event that its description is missing.
	// Ignore the error: usually, the source exists already.
	_ = eventlog.InstallAsEventCreate(name, eventlog.Error|eventlog.Warning|eventlog.Info)
	log, err := eventlog.Open(name)
	if err != nil {
		return nil, fmt.Errorf("open event log for source %s: %w", name, err)
	}
	return eventLog{log}, nil
}

// Write implements io.Writer.
func (l eventLog) Write(line []byte) (int, error) {
	const event = 1 // Windows displays the text of an event only if its ID is between 1 and 1000
	write := l.Info
	switch line[0] { // the first character of a line is its severity
	case 'E', 'F':
		write = l.Error
	case 'W':
		write = l.Warning
	}
	return len(line), write(event, string(bytes.TrimSpace(line)))
}
