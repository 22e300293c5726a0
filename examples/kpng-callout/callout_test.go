// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

const demo = "../demo.yaml"

// beTheCommand is the name of an environment variable. If this variable is set, the test
// binary runs as kpng-callout.
const beTheCommand = "KPNG_TEST_CALLOUT"

func TestMain(m *testing.M) {
	if os.Getenv(beTheCommand) != "" {
		main()
		return
	}
	goleak.VerifyTestMain(m)
}

// run runs a callout and returns its standard output.
func run(t *testing.T, timeout time.Duration, stdin string, args ...string) (string, error) {
	t.Helper()
	out, err := os.Create(filepath.Join(t.TempDir(), "stdout"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	c := callout{args: args, timeout: timeout, stdout: out}
	result := c.run(t.Context(), strings.NewReader(stdin))
	said, err := os.ReadFile(out.Name())
	if err != nil {
		t.Fatal(err)
	}
	return string(said), result
}

func TestCalloutReadsStdinAndWritesToStdout(t *testing.T) {
	got, err := run(t, time.Minute, "a\nb\n", "sed", "s/b/ c /")
	if want := "a\n c \n"; got != want || err != nil {
		t.Errorf("output %q, error %v, want %q", got, err, want)
	}
}

func TestCalloutMayIgnoreItsInput(t *testing.T) {
	if _, err := run(t, time.Minute, strings.Repeat("x", 1<<20), "true"); err != nil {
		t.Error(err)
	}
}

func TestFailureNamesCalloutAndCause(t *testing.T) {
	for _, test := range []struct {
		name string
		args []string
		want []string
	}{
		{"an exit code and standard error", []string{"sh", "-c", "echo no such thing >&2; exit 3"}, []string{"sh -c", "exit status 3", "no such thing"}},
		{"a signal", []string{"sh", "-c", "kill -9 $$"}, []string{"signal: killed"}},
		{"a program that does not exist", []string{"/does/not/exist"}, []string{"/does/not/exist", "no such file"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := run(t, time.Minute, "", test.args...)
			if err == nil {
				t.Fatal("no error")
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not contain %q", err, want)
				}
			}
		})
	}
}

func TestLongErrorsKeepTheirEnd(t *testing.T) {
	_, err := run(t, time.Minute, "", "sh", "-c", "seq 100000 >&2; echo the end >&2; exit 1")
	if err == nil || !strings.HasSuffix(err.Error(), "100000\nthe end") || len(err.Error()) > maxTail+200 {
		t.Errorf("an error of %d bytes does not have the expected end", len(fmt.Sprint(err)))
	}
}

func TestHungCalloutIsKilledWithItsChildren(t *testing.T) {
	out, err := run(t, 200*time.Millisecond, "", "sh", "-c", "echo $$; sleep 1000 & echo $!; wait")
	if err == nil || !strings.Contains(err.Error(), "ran longer than 200ms") {
		t.Errorf("error %v, want the timeout", err)
	}
	pids := strings.Fields(out)
	if len(pids) != 2 {
		t.Fatalf("processes %q, want two", pids)
	}
	for _, pid := range pids {
		waitDead(t, pid)
	}
}

func TestChildrenOfCalloutDoNotDelayNextRun(t *testing.T) {
	out, err := run(t, time.Minute, "", "sh", "-c", "sleep 1000 & echo $!")
	if err != nil {
		t.Error(err)
	}
	var pid int
	if _, err := fmt.Sscan(out, &pid); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Errorf("processes that the callout left behind: %v", err)
	}
}

// waitDead waits until a process has ended. A zombie counts as ended.
func waitDead(t *testing.T, pid string) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		stat, err := os.ReadFile("/proc/" + pid + "/stat")
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		// The file begins with "PID (NAME) STATE". Z is the state of a zombie.
		if _, after, _ := bytes.Cut(stat, []byte(") ")); bytes.HasPrefix(after, []byte("Z")) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("process %s still runs: %s", pid, stat)
		}
	}
}

// command returns a command that runs kpng-callout for those services in demo.yaml that
// have no label service-proxy-name. The process is killed at the end of the test.
func command(t *testing.T, callout string, args ...string) *exec.Cmd {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, os.Args[0], append([]string{"--manifests", demo, "--node-name", "vm-002"}, args...)...)
	cmd.Env = append(os.Environ(), beTheCommand+"=1", "CALLOUT="+callout)
	return cmd
}

func TestCommandPassesOneLinePerService(t *testing.T) {
	out, err := command(t, "jq -c '[.Service.Name, (.Endpoints|length)]'", "--once").Output()
	if want := "[\"web\",2]\n"; string(out) != want || err != nil {
		t.Errorf("output %q, error %v, want %q", out, err, want)
	}
}

func TestCommandWithoutCalloutIsAnError(t *testing.T) {
	out, err := command(t, "").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "CALLOUT names no program") {
		t.Errorf("output %q, error %v", out, err)
	}
}

func TestMissingProgramIsAnError(t *testing.T) {
	for _, callout := range []string{"/does/not/exist -x", "no-such-program"} {
		out, err := command(t, callout).CombinedOutput()
		program, _, _ := strings.Cut(callout, " ")
		if err == nil || !strings.Contains(string(out), "CALLOUT") || !strings.Contains(string(out), program) {
			t.Errorf("CALLOUT=%q: output %q, error %v", callout, out, err)
		}
	}
}

func TestZeroTimeoutIsAnError(t *testing.T) {
	out, err := command(t, "true", "--callout-timeout=0").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "--callout-timeout 0s must be greater than zero") {
		t.Errorf("output %q, error %v", out, err)
	}
}

func TestCommandLogsFailureAndRetries(t *testing.T) {
	seen := filepath.Join(t.TempDir(), "seen")
	cmd := command(t, fmt.Sprintf(`sh -c "mkdir %s && echo the first time >&2 && exit 7; wc -l"`, seen), "--once")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if string(out) != "1\n" || err != nil {
		t.Errorf("output %q, error %v, want a count of one line", out, err)
	}
	for _, want := range []string{"exit status 7", "the first time", "Sync failed; retrying"} {
		if !strings.Contains(stderr.String(), want) {
			t.Errorf("the log does not contain %q:\n%s", want, &stderr)
		}
	}
}

func TestFrontendsFlag(t *testing.T) {
	out, err := command(t, `jq -rc '[.Name, .Kind, .Addr, .Port, .Elsewhere.Verdict, .Elsewhere.Endpoints[0].Addr]'`,
		"--manifests", demo, "--service-proxy-name", "kpng-example", "--node-name", "vm-002", "--once", "--frontends").Output()
	if err != nil {
		t.Fatal(err)
	}
	want := `["vm-002",null,null,null,null,null]
["kpng-example","ExternalIP","10.0.0.55",6000,"Forward","11.0.2.2"]
["kpng-example","ExternalIP","1000::55",6000,"Forward","1100::202"]
`
	if got := string(out); got != want {
		t.Errorf("the callout printed\n%swant\n%s", got, want)
	}
}

func TestRunsOfCalloutNeverOverlap(t *testing.T) {
	dir := t.TempDir()
	manifest, lock := filepath.Join(dir, "state.yaml"), filepath.Join(dir, "lock")
	port := func(number int) {
		t.Helper()
		service := fmt.Sprintf(`{"apiVersion":"v1","kind":"Service","metadata":{"name":"a","namespace":"default"},"spec":{"clusterIP":"10.96.0.1","ports":[{"port":%d}]}}`, number)
		if err := os.WriteFile(manifest+".new", []byte(service), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(manifest+".new", manifest); err != nil {
			t.Fatal(err)
		}
	}
	const last = 20
	port(1)
	// Each run takes longer than the time between two changes, so changes occur during a
	// run.
	cmd := command(t, fmt.Sprintf(`sh -c "mkdir %[1]s || echo two at once; jq '.Service.Ports[0].Port'; sleep 0.1; rmdir %[1]s"`, lock), "--manifests", manifest)
	out := startReading(t, cmd)
	for want := 1; ; {
		line, err := out.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		var got int
		if _, err := fmt.Sscan(line, &got); err != nil {
			t.Fatalf("the callout printed %q", line)
		}
		if got == last {
			break
		}
		if want == 1 {
			for want < last {
				want++
				port(want)
				time.Sleep(10 * time.Millisecond)
			}
		}
	}
	end(t, cmd, os.Interrupt)
}

func TestCalloutIsKilledWithCommand(t *testing.T) {
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGKILL} {
		t.Run(signal.String(), func(t *testing.T) {
			cmd := command(t, `sh -c "echo $$; exec sleep 1000"`)
			pid, err := startReading(t, cmd).ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			end(t, cmd, signal)
			waitDead(t, strings.TrimSpace(pid))
		})
	}
}

// startReading starts cmd and returns its standard output.
func startReading(t *testing.T, cmd *exec.Cmd) *bufio.Reader {
	t.Helper()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return bufio.NewReader(out)
}

// end sends cmd a signal and waits until cmd ends. Unless the signal is SIGKILL, cmd must
// succeed.
func end(t *testing.T, cmd *exec.Cmd, signal os.Signal) {
	t.Helper()
	if err := cmd.Process.Signal(signal); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil && signal != os.Signal(syscall.SIGKILL) {
		t.Errorf("after signal %s the command returned %v", signal, err)
	}
}

// In place of iptables, the script all-ip.sh runs programs that do nothing.
func TestAllIPScriptNamesTheMissingFlag(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"iptables", "ip6tables", "iptables-restore", "ip6tables-restore"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\ncase $0 in *-restore) cat >/dev/null;; esac\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	const plain, allPorts = `{"Service": {"Namespace": "a", "Name": "plain"}}`, `{"Service": {"Namespace": "a", "Name": "all", "MapIP": true}}`
	for _, test := range []struct {
		stdin string
		fails bool
	}{{"", false}, {allPorts, false}, {plain + allPorts, false}, {plain, true}, {plain + plain, true}} {
		cmd := exec.CommandContext(t.Context(), "./all-ip.sh")
		var stderr bytes.Buffer
		cmd.Stdin, cmd.Stderr = strings.NewReader(test.stdin), &stderr
		err := cmd.Run()
		if (err != nil) != test.fails {
			t.Errorf("input %s: error %v, want one: %t", test.stdin, err, test.fails)
		}
		named := strings.Contains(stderr.String(), "a/plain") && strings.Contains(stderr.String(), "--all-ports")
		if named != strings.Contains(test.stdin, "plain") {
			t.Errorf("input %s: standard error %q", test.stdin, &stderr)
		}
	}
}
