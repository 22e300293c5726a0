// SPDX-License-Identifier: Apache-2.0

package app

import (
	"flag"
	"io"

	"github.com/spf13/pflag"
	"k8s.io/klog/v2"
)

// hosting says who runs the program and where it logs. Its flags count before a
// command has looked at any: what is wrong with the others has to be logged as
// well, and a service manager does not wait long for its answer.
type hosting struct {
	logFile        given
	windowsService bool
}

func (h *hosting) register(fs *pflag.FlagSet) {
	fs.Var(&h.logFile, "log-file", "log to this `file` instead of standard error; from 100 MB on it starts anew, and the one before it has .old after its name")
	registerService(fs, &h.windowsService)
}

// hostingOf returns what the arguments of a program say. Who reads them after it
// says what is wrong with them.
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

// logTo makes klog write to w, a line at a time. Errors are on standard error as
// well.
func logTo(w io.Writer) {
	var logging flag.FlagSet
	klog.InitFlags(&logging)
	// Without it a line is written once for each severity that it reaches.
	if err := logging.Set("one_output", "true"); err != nil {
		panic(err) // klog has no such flag
	}
	klog.LogToStderr(false)
	klog.SetOutput(w)
}
