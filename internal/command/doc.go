// SPDX-License-Identifier: Apache-2.0

// Package command has the parts of commands: groups of flags ([Source], [Serving]), and
// the code that runs a sink or a [Backend]. Package app and the command kpng build their
// commands from them.
//
// A command logs to standard error or to a file. On Windows, the service manager can run
// it ([Execute]).
package command
