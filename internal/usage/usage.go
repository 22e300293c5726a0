// SPDX-License-Identifier: Apache-2.0

// Package usage makes readable help texts, and clear errors for wrong command lines. An
// error names the mistake, the command, and what the user probably meant.
package usage

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// wrong is an error of the command line.
type wrong struct {
	error
	// command is the command whose help explains the error. It is empty until the error
	// leaves the command.
	command string
}

func (w *wrong) Unwrap() error { return w.error }

// Error implements error.
func (w *wrong) Error() string {
	if w.command == "" {
		return w.error.Error()
	}
	return fmt.Sprintf("%v; see %s --help", w.error, w.command)
}

// Error marks err as an error of the command line. It returns nil if err is nil.
func Error(err error) error {
	if err == nil {
		return nil
	}
	return &wrong{error: err}
}

// Errorf is Error with a new error.
func Errorf(format string, args ...any) error { return Error(fmt.Errorf(format, args...)) }

// in adds the command to an error of the command line.
func in(cmd *cobra.Command, err error) error {
	if ExitStatus(err) != 2 {
		return err
	}
	return &wrong{err, cmd.CommandPath()}
}

// ExitStatus returns the exit status of a program that ends with err: 0 without an error,
// 2 for an error of the command line, and 1 for another error.
func ExitStatus(err error) int {
	var w *wrong
	switch {
	case err == nil:
		return 0
	case errors.As(err, &w):
		return 2
	default:
		return 1
	}
}

// Prepare makes cmd and its subcommands print help with groups of flags, and return clear
// errors for wrong command lines. If a command has subcommands and does nothing itself,
// its command line must name a subcommand.
func Prepare(cmd *cobra.Command) {
	cmd.SetHelpFunc(printHelp)
	cmd.SetUsageFunc(printUsage)
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return in(cmd, flagError(cmd, err)) })
	for _, sub := range cmd.Commands() {
		Prepare(sub)
	}
	if cmd.HasSubCommands() && !cmd.Runnable() {
		missing := func(cmd *cobra.Command, args []string) error { return in(cmd, missingCommand(cmd, args)) }
		cmd.Args, cmd.RunE = missing, missing // without RunE, cobra prints the help
		return
	}
	args, run := cmd.Args, cmd.RunE
	cmd.Args = func(cmd *cobra.Command, given []string) error {
		var err error
		if args != nil {
			err = args(cmd, given)
		}
		for _, check := range []func() error{func() error { return missingFlag(cmd) }, cmd.ValidateFlagGroups} {
			if err == nil {
				err = check()
			}
		}
		return in(cmd, Error(err))
	}
	if run != nil {
		cmd.RunE = func(cmd *cobra.Command, args []string) error { return in(cmd, run(cmd, args)) }
	}
}

// None is a [cobra.PositionalArgs] for commands without arguments.
func None(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return Errorf("%s takes no arguments, but got %q", cmd.CommandPath(), args[0])
}

// One is a [cobra.PositionalArgs] for commands with one argument.
func One(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return Errorf("%s needs an argument: %s", cmd.CommandPath(), argument(cmd))
	}
	return AtMostOne(cmd, args)
}

// AtMostOne is a [cobra.PositionalArgs] for commands with an optional argument.
func AtMostOne(cmd *cobra.Command, args []string) error {
	if len(args) <= 1 {
		return nil
	}
	return Errorf("%s takes at most one argument, %s, but got %d: %q", cmd.CommandPath(), argument(cmd), len(args), args)
}

// argument returns the part of a command's usage line that describes the argument.
func argument(cmd *cobra.Command) string {
	return strings.TrimSpace(strings.TrimPrefix(cmd.Use, cmd.Name()))
}

// missingCommand returns the error for a command that needs a subcommand.
func missingCommand(cmd *cobra.Command, args []string) error {
	var names []string
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			names = append(names, c.Name())
		}
	}
	known := strings.Join(names, ", ")
	if len(args) == 0 {
		return Errorf("%s needs a command: one of %s", cmd.CommandPath(), known)
	}
	return Errorf("%s has no command %q%s; use one of %s", cmd.CommandPath(), args[0], suggestion("", args[0], names), known)
}

func missingFlag(cmd *cobra.Command) error {
	var missing []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if required := f.Annotations[cobra.BashCompOneRequiredFlag]; len(required) > 0 && required[0] == "true" && !f.Changed {
			missing = append(missing, "--"+f.Name)
		}
	})
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("%s needs %s", cmd.CommandPath(), strings.Join(missing, " and "))
}

// flagError returns the error for flags that pflag cannot parse.
func flagError(cmd *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	var noValue *pflag.ValueRequiredError
	var invalid *pflag.InvalidValueError
	switch {
	case errors.As(err, &unknown):
		// A command that needs a subcommand has few flags of its own. It does not know
		// the flags of the missing subcommand.
		if given := cmd.Flags().Args(); cmd.HasSubCommands() && len(given) > 0 {
			return missingCommand(cmd, given)
		}
		if unknown.GetSpecifiedShortnames() != "" {
			err = fmt.Errorf("%s has no flag -%s", cmd.CommandPath(), unknown.GetSpecifiedName())
		} else {
			var names []string
			cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
			name := unknown.GetSpecifiedName()
			err = fmt.Errorf("%s has no flag --%s%s", cmd.CommandPath(), name, suggestion("--", name, names))
		}
		if cmd.HasSubCommands() {
			err = fmt.Errorf("%w; %w", err, missingCommand(cmd, nil))
		}
	case errors.As(err, &noValue):
		err = fmt.Errorf("%s needs a value", flagName(noValue.GetFlag()))
	case errors.As(err, &invalid):
		err = fmt.Errorf("%s %q: %s", flagName(invalid.GetFlag()), invalid.GetValue(), wantedValue(invalid))
	}
	return Error(err)
}

func flagName(f *pflag.Flag) string {
	if len(f.Name) == 1 {
		return "-" + f.Name
	}
	return "--" + f.Name
}

// wantedValue says which values a flag takes.
func wantedValue(err *pflag.InvalidValueError) string {
	var number *strconv.NumError
	switch {
	case err.GetFlag().Value.Type() == "duration":
		return "want a duration such as 30s or 5m"
	case !errors.As(err, &number):
		return err.Unwrap().Error()
	case number.Func == "ParseBool":
		return "want true or false"
	case errors.Is(number.Err, strconv.ErrRange):
		return "the number is too small or too large"
	default:
		return "want a number"
	}
}

// suggestion returns a question about the known name that is most similar to word. If no
// name is similar, it returns "".
func suggestion(prefix, word string, known []string) string {
	best, least := "", len(word)/3+1
	for _, name := range known {
		d := distance(word, name, least)
		if len(word) > 1 && strings.HasPrefix(name, word) {
			d = min(d, 1)
		}
		if d < least {
			best, least = name, d
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf(" (did you mean %s%s?)", prefix, best)
}

// distance returns how many letters must be inserted, deleted, replaced or swapped to
// turn the word a into the word b. If the lengths of the words differ by limit or more,
// it returns limit.
func distance(a, b string, limit int) int {
	if max(len(a)-len(b), len(b)-len(a)) >= limit {
		return limit
	}
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		for j := range rows[i] {
			if i == 0 || j == 0 {
				rows[i][j] = i + j
				continue
			}
			replaced := rows[i-1][j-1]
			if a[i-1] != b[j-1] {
				replaced++
			}
			rows[i][j] = min(rows[i-1][j]+1, rows[i][j-1]+1, replaced)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				rows[i][j] = min(rows[i][j], rows[i-2][j-2]+1)
			}
		}
	}
	return rows[len(a)][len(b)]
}
