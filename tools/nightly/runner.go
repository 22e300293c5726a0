// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// runner runs parts and stores their results.
type runner struct {
	store  store
	commit commit
	// logs is the folder of the outputs of parts.
	logs string
	// out gets a line for each part.
	out io.Writer
	// grace is how long a part may clean up after its time limit.
	grace time.Duration
}

// runAll runs the parts that have no result for this code, or with again all parts.
func (r runner) runAll(ctx context.Context, parts []part, again bool) error {
	var bad []string
	for _, p := range parts {
		last, err := r.lastResult(p.Name)
		if err != nil {
			return err
		}
		if again || last.Outcome == "" || last.Outcome == skipped {
			if last, err = r.run(ctx, p); err != nil {
				return fmt.Errorf("part %s: %w", p.Name, err)
			}
			if err := r.store.add(last); err != nil {
				return fmt.Errorf("part %s: store result: %w", p.Name, err)
			}
		}
		fmt.Fprintf(r.out, "%-34s %s %s\n", p.Name, last.Outcome, last.Reason)
		if last.Outcome != passed {
			bad = append(bad, p.Name)
		}
	}
	if len(bad) > 0 {
		return fmt.Errorf("parts that did not pass: %s", strings.Join(bad, ", "))
	}
	return nil
}

// lastResult returns the last result of a part for this code. Its outcome is empty if there
// is none.
func (r runner) lastResult(part string) (result, error) {
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
func (r runner) run(ctx context.Context, p part) (result, error) {
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
	log, err := os.Create(filepath.Join(r.logs, p.Name+".log"))
	if err != nil {
		return res, err
	}
	defer log.Close()
	fmt.Fprintf(r.out, "%-34s runs for at most %s; output: %s\n", p.Name, p.Limit, log.Name())

	limited, cancel := context.WithTimeout(ctx, p.Limit)
	defer cancel()
	cmd := exec.CommandContext(limited, "bash", "-euo", "pipefail", "-c", p.Command)
	cmd.Stdout, cmd.Stderr = log, log
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
