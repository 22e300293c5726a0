// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
)

// runner runs parts and stores their results.
type runner struct {
	store  store
	commit commit
	// logs is the folder of the outputs of parts.
	logs string
	// out gets lines about each part. Only printf writes to it.
	out   io.Writer
	print sync.Mutex
	// jobs is the number of parts that run at the same time, without parts that run alone.
	jobs int
	// grace is how long a part may clean up after its time limit.
	grace time.Duration
}

// printf writes the lines of one part without lines of other parts between them.
func (r *runner) printf(format string, args ...any) {
	r.print.Lock()
	defer r.print.Unlock()
	fmt.Fprintf(r.out, format, args...)
}

// runAll runs the parts that have no result for this code, or all parts if again is true.
// Parts that need the machine alone run last, one after the other.
func (r *runner) runAll(ctx context.Context, parts []part, again bool) error {
	var bad []string
	var mu sync.Mutex // protects bad
	for _, alone := range []bool{false, true} {
		group, running := errgroup.WithContext(ctx) // a part without a result stops all parts
		group.SetLimit(r.jobs)
		if alone {
			group.SetLimit(1)
		}
		for _, p := range parts {
			if p.Alone != alone || running.Err() != nil {
				continue
			}
			group.Go(func() error {
				last, err := r.runOnce(running, p, again)
				if err != nil {
					return fmt.Errorf("part %s: %w", p.Name, err)
				}
				if last.Outcome != passed {
					mu.Lock()
					bad = append(bad, p.Name)
					mu.Unlock()
				}
				return nil
			})
		}
		if err := group.Wait(); err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if len(bad) > 0 {
		return fmt.Errorf("parts that did not pass: %s", strings.Join(bad, ", "))
	}
	return nil
}

// runOnce runs a part and stores its result, or returns the result that the part has for
// this code.
func (r *runner) runOnce(ctx context.Context, p part, again bool) (result, error) {
	last, err := r.lastResult(p.Name)
	if err != nil {
		return last, err
	}
	if !again && last.Outcome != "" && last.Outcome != skipped {
		r.printf("%-34s %s before\n", p.Name, last.Outcome)
		return last, nil
	}
	if last, err = r.run(ctx, p); err != nil {
		return last, err
	}
	details := ""
	if last.Outcome == failed || last.Outcome == timedOut {
		lines, err := failures(r.log(p))
		if err != nil {
			return last, err
		}
		details = fmt.Sprintf("    %s\n    output: %s\n", strings.Join(lines, "\n    "), r.log(p))
	}
	if err := r.store.add(last); err != nil {
		return last, fmt.Errorf("store result: %w", err)
	}
	r.printf("%-34s %s (%s)\n%s", p.Name, last.outcome(), duration(last.Seconds), details)
	return last, nil
}

func (r *runner) log(p part) string { return filepath.Join(r.logs, p.Name+".log") }

// failure matches lines of an output that name a failure.
var failure = regexp.MustCompile(`^\s*--- FAIL|^FAIL\s+\S|^panic:|^fatal error:|^WARNING: DATA RACE|^\S+\.go:\d+:\d+: `)

// failures returns the first lines of an output that name a failure. If there are no such
// lines, it returns the last lines.
func failures(log string) ([]string, error) {
	const most = 8
	file, err := os.Open(log)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var named, last []string
	for reader := bufio.NewReader(file); err == nil; {
		var line string
		line, err = reader.ReadString('\n')
		if line = strings.TrimRight(line, " \t\n"); line == "" {
			continue
		}
		if runes := []rune(line); len(runes) > 200 {
			line = string(runes[:200]) + "…"
		}
		if failure.MatchString(line) && len(named) < most {
			named = append(named, line)
		}
		last = append(last[max(0, len(last)-most+1):], line)
	}
	if err != io.EOF {
		return nil, err
	}
	if len(named) > 0 {
		return named, nil
	}
	return last, nil
}

// lastResult returns the last result of a part for this code. If there is no such result, the
// outcome is empty.
func (r *runner) lastResult(part string) (result, error) {
	results, err := r.store.read(part)
	var last result
	for _, result := range results {
		if result.Code == r.commit.Code {
			last = result
		}
	}
	return last, err
}

// run runs a part. It fails only if the part has no result, for example because ctx ended.
func (r *runner) run(ctx context.Context, p part) (result, error) {
	started := time.Now()
	res := result{
		Part: p.Name, Commit: r.commit.Hash, Code: r.commit.Code, Date: started.UTC().Truncate(time.Second),
		Kernel: kernel(), Machine: thisMachine(),
	}
	for _, program := range p.Needs {
		if _, err := exec.LookPath(program); err != nil {
			res.Outcome, res.Reason = skipped, program+" is missing"
			return res, nil
		}
	}
	if err := os.MkdirAll(r.logs, 0o755); err != nil {
		return res, err
	}
	log, err := os.Create(r.log(p))
	if err != nil {
		return res, err
	}
	defer log.Close()
	// The name is short, because names of Unix sockets are limited. Tests that drop privileges
	// write to the folder, too.
	temp, err := os.MkdirTemp("", "n")
	if err != nil {
		return res, err
	}
	defer os.RemoveAll(temp)
	if err := os.Chmod(temp, 0o777|os.ModeSticky); err != nil {
		return res, err
	}
	r.printf("%-34s runs for at most %s\n", p.Name, p.Limit)

	// The kernel kills the part when the thread that started it ends.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	limited, cancel := context.WithTimeout(ctx, p.Limit)
	defer cancel()
	cmd := exec.CommandContext(limited, "bash", "-euo", "pipefail", "-c", p.Command)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(os.Environ(), "TMPDIR="+temp)
	// The part is a process group. So all its processes end with it, and they get no signal
	// from the terminal before this program does.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = r.grace
	err = cmd.Run()
	if cmd.Process != nil {
		syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // kill processes that the part left behind
	}
	res.Seconds = float64(time.Since(started).Milliseconds()) / 1000
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return res, fmt.Errorf("stopped after %s, without a result", time.Since(started).Round(time.Second))
	case limited.Err() != nil:
		res.Outcome = timedOut
	case err == nil:
		res.Outcome = passed
	case errors.As(err, &exit):
		res.Outcome = failed
	default:
		return res, err
	}
	if _, err := log.Seek(0, io.SeekStart); err != nil {
		return res, err
	}
	res.Figures, err = readFigures(log)
	return res, err
}
