// SPDX-License-Identifier: Apache-2.0

package usage_test

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/usage"
	"github.com/spf13/cobra"
)

// newProgram returns a program with the commands "list nodes [NAME]", "list services" and
// "write FILE". The command "write" always fails with the error "broken".
func newProgram() *cobra.Command {
	root := &cobra.Command{Use: "prog", SilenceUsage: true, SilenceErrors: true}
	list := &cobra.Command{Use: "list"}
	nodes := &cobra.Command{Use: "nodes [NAME]", Args: usage.AtMostOne, RunE: func(*cobra.Command, []string) error { return nil }}
	services := &cobra.Command{Use: "services", Args: usage.None, RunE: func(*cobra.Command, []string) error { return usage.Errorf("this is wrong") }}
	write := &cobra.Command{Use: "write FILE", Args: usage.One, RunE: func(*cobra.Command, []string) error { return errors.New("broken") }}
	root.PersistentFlags().IntP("v", "v", 0, "")
	nodes.Flags().String("node-name", "", "")
	nodes.Flags().String("a", "", "")
	nodes.Flags().String("b", "", "")
	nodes.MarkFlagsMutuallyExclusive("a", "b")
	nodes.Flags().Duration("timeout", time.Second, "")
	nodes.Flags().Bool("once", false, "")
	nodes.Flags().Uint8("small", 0, "")
	write.Flags().StringP("input", "i", "", "")
	write.MarkFlagRequired("input")
	list.AddCommand(nodes, services)
	root.AddCommand(list, write)
	usage.Prepare(root)
	return root
}

func TestWrongUsage(t *testing.T) {
	for _, test := range []struct {
		args []string
		want string
	}{
		{nil, "prog needs a command: one of completion, list, write; see prog --help"},
		{[]string{"lsit"}, `prog has no command "lsit" (did you mean list?); use one of completion, list, write; see prog --help`},
		{[]string{"list"}, "prog list needs a command: one of nodes, services; see prog list --help"},
		{[]string{"list", "pods"}, `prog list has no command "pods"; use one of nodes, services; see prog list --help`},
		{[]string{"list", "pods", "-i", "F"}, `prog list has no command "pods"; use one of nodes, services; see prog list --help`},
		{[]string{"list", "serv", "--input=F"}, `prog list has no command "serv" (did you mean services?); use one of nodes, services; see prog list --help`},
		{[]string{"list", "-i", "F", "nodes"}, "prog list nodes has no flag -i; see prog list nodes --help"},
		{[]string{"list", "-i"}, "prog list has no flag -i; prog list needs a command: one of nodes, services; see prog list --help"},
		{[]string{"list", "nodes", "--nod-name=x"}, "prog list nodes has no flag --nod-name (did you mean --node-name?); see prog list nodes --help"},
		{[]string{"list", "nodes", "--node=x"}, "prog list nodes has no flag --node (did you mean --node-name?); see prog list nodes --help"},
		{[]string{"list", "nodes", "--elephant"}, "prog list nodes has no flag --elephant; see prog list nodes --help"},
		{[]string{"list", "nodes", "--node-name"}, "--node-name needs a value; see prog list nodes --help"},
		{[]string{"list", "nodes", "a", "b"}, `prog list nodes takes at most one argument, [NAME], but got 2: ["a" "b"]; see prog list nodes --help`},
		{[]string{"list", "nodes", "--a=1", "--b=2"}, "if any flags in the group [a b] are set none of the others can be; [a b] were all set; see prog list nodes --help"},
		{[]string{"list", "nodes", "-v", "x"}, `-v "x": want a number; see prog list nodes --help`},
		{[]string{"list", "nodes", "--small=300"}, `--small "300": the number is too small or too large; see prog list nodes --help`},
		{[]string{"list", "nodes", "--once=no"}, `--once "no": want true or false; see prog list nodes --help`},
		{[]string{"list", "nodes", "--timeout=5"}, `--timeout "5": want a duration such as 30s or 5m; see prog list nodes --help`},
		{[]string{"list", "services", "x"}, `prog list services takes no arguments, but got "x"; see prog list services --help`},
		{[]string{"list", "services"}, "this is wrong; see prog list services --help"},
		{[]string{"write", "-i", "F"}, "prog write needs an argument: FILE; see prog write --help"},
		{[]string{"write", "x"}, "prog write needs --input; see prog write --help"},
	} {
		root := newProgram()
		root.SetArgs(test.args)
		if err := root.Execute(); err == nil || err.Error() != test.want || usage.ExitStatus(err) != 2 {
			t.Errorf("%q: exit status %d, error\n%v, want\n%s", test.args, usage.ExitStatus(err), err, test.want)
		}
	}
}

func TestOtherErrorsStayAsTheyAre(t *testing.T) {
	root := newProgram()
	root.SetArgs([]string{"write", "-i", "F", "x"})
	if err := root.Execute(); err == nil || err.Error() != "broken" || usage.ExitStatus(err) != 1 {
		t.Errorf("got the error %v", err)
	}
	for _, args := range [][]string{{"--help"}, {"list", "--help"}, {"list", "nodes", "x"}} {
		root, out := newProgram(), bytes.Buffer{}
		root.SetOut(&out)
		root.SetArgs(args)
		if err := root.Execute(); usage.ExitStatus(err) != 0 {
			t.Errorf("%q: %v", args, err)
		}
	}
}
