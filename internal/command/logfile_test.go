// SPDX-License-Identifier: Apache-2.0

package command

import (
	"errors"
	"os"
	"path/filepath"
	"runtime/debug"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestLogFileIsRenamedAtItsLimit(t *testing.T) {
	t.Cleanup(func() { debug.SetCrashOutput(nil, debug.CrashOptions{}) })
	path := filepath.Join(t.TempDir(), "logs", "kpng.log")
	write := func(lines ...string) {
		t.Helper()
		f, err := openLogFile(path, 8)
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range lines {
			if n, err := f.Write([]byte(line)); n != len(line) || err != nil {
				t.Fatalf("Write(%q) = %d, %v", line, n, err)
			}
		}
		f.file.Close()
	}
	expect := func(want map[string]string) {
		t.Helper()
		got := map[string]string{}
		for _, suffix := range []string{"", ".old"} {
			if data, err := os.ReadFile(path + suffix); err == nil {
				got[suffix] = string(data)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("files by suffix (-want +got):\n%s", diff)
		}
	}
	write("one\n", "two\n")
	expect(map[string]string{"": "one\ntwo\n"})
	write("three\n", "4\n")
	expect(map[string]string{"": "three\n4\n", ".old": "one\ntwo\n"})
	write("a line above the limit\n", "5\n")
	expect(map[string]string{"": "5\n", ".old": "a line above the limit\n"})
}

func TestHostingFlagsAreFoundAmongOthers(t *testing.T) {
	for _, test := range []struct {
		name string
		args []string
		want string
	}{
		{"no flag", []string{"--api", "tcp://127.0.0.1:12090"}, ""},
		{"between other flags", []string{"-v=4", "kube", "--once", "--log-file", `C:\k.log`, "--api=x"}, `C:\k.log`},
		{"in one argument", []string{"--log-file=k.log"}, "k.log"},
		{"an empty value is left to the command", []string{"--log-file="}, ""},
		{"arguments after a double dash are not flags", []string{"--", "--log-file=k.log"}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := hostingOf(test.args).logFile; string(got) != test.want {
				t.Errorf("log file of %q is %q, want %q", test.args, got, test.want)
			}
		})
	}
}

func TestErrorsForgeNoLinesOfTheLog(t *testing.T) {
	err := errors.Join(errors.New("first"), errors.New("E1126 12:00:00.000000 second"))
	if got, want := errorText("kpng", err), "kpng: first\n\tE1126 12:00:00.000000 second"; got != want {
		t.Errorf("error %q, want %q", got, want)
	}
}
