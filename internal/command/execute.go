// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/kpng-project/kpng/internal/plain"
	"github.com/kpng-project/kpng/internal/usage"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"
)

// RegisterLogging adds the flags -v and --vmodule of klog, the flag --log-file, and on
// Windows the flag --windows-service. [Execute] evaluates the last two flags.
func RegisterLogging(fs *pflag.FlagSet) {
	var logging flag.FlagSet
	klog.InitFlags(&logging)
	fs.AddGoFlag(logging.Lookup("v"))
	fs.AddGoFlag(logging.Lookup("vmodule"))
	new(hosting).register(fs)
}

// Execute runs cmd as the whole program, with the program's arguments, and exits. It
// evaluates the flags of [RegisterLogging]. If the Windows service manager started the
// program, Execute runs cmd as a service.
func Execute(cmd *cobra.Command) {
	usage.Prepare(cmd)
	err := runHosted(cmd)
	klog.Flush()
	if status := usage.ExitStatus(err); status != 0 {
		os.Exit(status)
	}
}

// errorText returns the message of an error. It indents all lines except the first one, so
// that they do not look like lines of the log.
func errorText(command string, err error) string {
	return command + ": " + strings.ReplaceAll(err.Error(), "\n", "\n\t")
}

// runHosted runs cmd and prints or logs its error.
func runHosted(cmd *cobra.Command) error {
	h := hostingOf(os.Args[1:])
	stderr := plain.Writer(os.Stderr)
	cmd.SetErr(stderr)
	run, print := untilSignal, func(err error) { fmt.Fprintln(stderr, errorText(cmd.Name(), err)) }
	service, err := h.detectService()
	var log io.Writer
	switch {
	case err != nil:
	case h.logFile != "":
		log, err = openLogFile(string(h.logFile), 100<<20)
	case service != nil:
		log, err = service.openLog(cmd.Name())
	}
	logTo(&logWriter{stderr, log})
	if err == nil && log != nil {
		print = func(err error) { klog.ErrorS(err, "Program failed", "command", cmd.Name()) }
	}
	if service != nil {
		run = service.run
	}
	if err == nil {
		err = run(cmd)
	}
	if err != nil {
		print(err)
	}
	return err
}

// service opens a command's log and runs the command under a service manager.
type service struct {
	openLog func(name string) (io.Writer, error)
	run     func(*cobra.Command) error
}

func untilSignal(cmd *cobra.Command) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal kills the process
	return cmd.ExecuteContext(ctx)
}

// hosting has two flags that the program reads before cobra parses the arguments: the log
// file must be known for cobra's errors, and a Windows service must start quickly.
type hosting struct {
	logFile        nonEmpty
	windowsService bool
}

func (h *hosting) register(fs *pflag.FlagSet) {
	fs.Var(&h.logFile, "log-file", "log to this `file` instead of standard error; at 100 MB it is renamed to FILE.old")
	registerService(fs, &h.windowsService)
}

// hostingOf reads only the flags in hosting. It ignores errors, because cobra reports
// them later.
func hostingOf(args []string) *hosting {
	var h hosting
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	fs.ParseErrorsAllowlist.UnknownFlags = true
	fs.Usage = func() {}
	fs.SetOutput(io.Discard)
	h.register(fs)
	_ = fs.Parse(args)
	return &h
}

// logWriter writes lines of klog to a log. It writes errors to standard error too, or all
// lines if there is no log. Names and errors of other programs may be in these lines.
type logWriter struct{ stderr, log io.Writer }

// Write implements io.Writer.
func (w *logWriter) Write(line []byte) (n int, err error) {
	if w.log == nil || line[0] == 'E' || line[0] == 'F' {
		n, err = w.stderr.Write(line)
	}
	if w.log != nil {
		n, err = w.log.Write(line)
	}
	return n, err
}

// logTo makes klog write to w line by line, and to nothing else.
func logTo(w io.Writer) {
	var logging flag.FlagSet
	klog.InitFlags(&logging)
	for flag, value := range map[string]string{
		"one_output":      "true", // otherwise, klog writes each warning twice to w, and each error three times
		"stderrthreshold": "FATAL",
	} {
		if err := logging.Set(flag, value); err != nil {
			panic(err) // cannot happen: klog has these flags
		}
	}
	klog.LogToStderr(false)
	klog.SetOutput(w)
}
