// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
)

// order is the task of a process that runs the test binary. The process reads its order
// from an environment variable.
type order struct {
	// Test is the name of the test that calls Run.
	Test string
	Site Site
	// Cleanup is true if the process cleans up instead of running the proxy.
	Cleanup bool
}

const orderVariable = "KPNG_CONFORMANCE"

// The kit and a process with a sink exchange these JSON messages. The kit sends objects,
// and the process sends reports about them. The kit may also request numbers.
type (
	publication struct {
		Generation int
		Objects    *Objects
		// Count requests the present numbers of the sink, and nothing else.
		Count bool
	}
	report struct {
		Generation int
		// Applied is true if the whole generation is programmed. If it is false, Trouble may
		// contain the reason.
		Applied bool
		Trouble string
		// Honours are the traffic parameters that the sink honours.
		Honours nodeview.Parameters
		// Counts is true if the sink is a backends.Counter.
		Counts bool
		// Counted is the answer to a publication with Count.
		Counted *counted
	}
	counted struct {
		Stats []backends.Stats
		Error string
	}
)

// sinkSubject runs a sink in processes of the test binary.
type sinkSubject struct {
	test string

	mu   sync.Mutex
	last publication
	// running contains the processes that were not killed.
	running map[*sinkProcess]struct{}
}

// newSinkSubject returns a subject for the sinks that newSink creates. If this process
// has an order, newSinkSubject carries out the order and does not return.
func newSinkSubject(t *testing.T, newSink NewSink, opts Options) *sinkSubject {
	t.Helper()
	if text := os.Getenv(orderVariable); text != "" {
		var o order
		if err := json.Unmarshal([]byte(text), &o); err != nil {
			t.Fatalf("%s: %v", orderVariable, err)
		}
		if o.Test != t.Name() {
			t.Fatalf("this process is the proxy of %s, but runs %s", o.Test, t.Name())
		}
		if err := o.carryOut(newSink, sink.Options{BatchSize: opts.BatchSize}); err != nil {
			fmt.Fprintf(os.Stderr, "conformance: %v\n", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	return &sinkSubject{test: t.Name(), running: map[*sinkProcess]struct{}{}}
}

// command returns a command that runs the test binary to execute o.
func (s *sinkSubject) command(ctx context.Context, o order) (*exec.Cmd, *output, error) {
	o.Test = s.test
	text, err := json.Marshal(o)
	if err != nil {
		return nil, nil, err
	}
	var pattern []string
	for name := range strings.SplitSeq(s.test, "/") {
		pattern = append(pattern, "^"+regexp.QuoteMeta(name)+"$")
	}
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run="+strings.Join(pattern, "/"), "-test.count=1", "-test.timeout=0")
	cmd.Env = append(os.Environ(), orderVariable+"="+string(text))
	printed := &output{}
	cmd.Stdout, cmd.Stderr = printed, printed
	return cmd, printed, nil
}

func (s *sinkSubject) Publish(_ context.Context, objects *Objects) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = publication{Generation: s.last.Generation + 1, Objects: objects}
	for p := range s.running {
		if err := p.send(s.last); err != nil {
			return err
		}
	}
	return nil
}

func (s *sinkSubject) Start(_ context.Context, site Site) (Process, error) {
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make a pair of sockets: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(ends[0]), "proxy"), os.NewFile(uintptr(ends[1]), "kit")
	defer ours.Close()
	defer theirs.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		return nil, fmt.Errorf("use a socket: %w", err)
	}
	// The process runs longer than the case that starts it.
	cmd, printed, err := s.command(context.Background(), order{Site: site})
	if err != nil {
		return nil, err
	}
	cmd.ExtraFiles = []*os.File{theirs}
	ended, err := site.Start(cmd)
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("start the test binary again: %w", err)
	}
	p := &sinkProcess{subject: s, cmd: cmd, output: printed, conn: conn, encoder: json.NewEncoder(conn), done: make(chan struct{}), reported: make(chan struct{}), counted: make(chan counted, 1)}
	go p.wait(ended)
	go p.read()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running[p] = struct{}{}
	return p, p.send(s.last)
}

// Settle waits until all processes have programmed the last published objects.
func (s *sinkSubject) Settle(ctx context.Context) error {
	s.mu.Lock()
	generation := s.last.Generation
	var running []*sinkProcess
	for p := range s.running {
		running = append(running, p)
	}
	s.mu.Unlock()
	for _, p := range running {
		if err := p.awaitApplied(ctx, generation); err != nil {
			return err
		}
	}
	return nil
}

// stats returns the numbers of the running process.
func (s *sinkSubject) stats(ctx context.Context) ([]backends.Stats, error) {
	s.mu.Lock()
	var p *sinkProcess
	for running := range s.running {
		p = running
	}
	s.mu.Unlock()
	if err := p.send(publication{Count: true}); err != nil {
		return nil, err
	}
	select {
	case c := <-p.counted:
		if c.Error != "" {
			return nil, errors.New(c.Error)
		}
		return c.Stats, nil
	case <-p.done:
		return nil, errEnded(p.err)
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// unsupported returns the features that the sink does not declare as backends.Capable or
// backends.Counter.
func (s *sinkSubject) unsupported() map[Feature]string {
	var honours nodeview.Parameters
	counts := false
	s.mu.Lock()
	for p := range s.running {
		p.mu.Lock()
		honours, counts = p.last.Honours, p.last.Counts
		p.mu.Unlock()
	}
	s.mu.Unlock()
	lacks := map[Feature]string{}
	for feature, honoured := range map[Feature]bool{
		Weights: honours.Weights, StableHashing: honours.Algorithm, Resets: honours.Resets, NodePortRanges: honours.NodePortSources,
	} {
		if !honoured {
			lacks[feature] = "the sink does not honour this parameter"
		}
	}
	if !counts {
		lacks[counters] = "the sink does not count"
	}
	return lacks
}

func (s *sinkSubject) Cleanup(ctx context.Context, site Site) error {
	cmd, printed, err := s.command(ctx, order{Site: site, Cleanup: true})
	if err != nil {
		return err
	}
	ended, err := site.Start(cmd)
	if err == nil {
		err = <-ended
	}
	if err != nil {
		return fmt.Errorf("clean up: %w\n%s", err, printed)
	}
	return nil
}

// sinkProcess is a process with a sink.
type sinkProcess struct {
	subject *sinkSubject
	cmd     *exec.Cmd
	output  *output
	conn    net.Conn
	encoder *json.Encoder
	// done is closed when the process has ended and err is set.
	done chan struct{}
	err  error

	mu   sync.Mutex
	last report
	// This channel is closed and replaced when a report arrives.
	reported chan struct{}
	// counted receives the numbers that stats requests.
	counted chan counted
}

func (p *sinkProcess) wait(ended <-chan error) {
	p.err = <-ended
	close(p.done)
	p.conn.Close()
}

func (p *sinkProcess) send(m publication) error {
	if err := p.encoder.Encode(m); err != nil {
		return fmt.Errorf("publish to the proxy: %w\n%s", err, p.output)
	}
	return nil
}

func (p *sinkProcess) read() {
	for decoder := json.NewDecoder(p.conn); ; {
		var r report
		if err := decoder.Decode(&r); err != nil {
			return // the process has ended, and awaitApplied returns the reason
		}
		if r.Counted != nil {
			p.counted <- *r.Counted
			continue
		}
		p.mu.Lock()
		if r.Generation >= p.last.Generation { // a report about an older generation is ignored
			p.last = r
			close(p.reported)
			p.reported = make(chan struct{})
		}
		p.mu.Unlock()
	}
}

func (p *sinkProcess) awaitApplied(ctx context.Context, generation int) error {
	for {
		p.mu.Lock()
		last, reported := p.last, p.reported
		p.mu.Unlock()
		if last.Applied && last.Generation >= generation {
			return nil
		}
		select {
		case <-reported:
		case <-p.done:
			return errEnded(p.err)
		case <-ctx.Done():
			return fmt.Errorf("the proxy has not programmed the published objects: %w; its report: %q", context.Cause(ctx), last.Trouble)
		}
	}
}

func (p *sinkProcess) Kill() error {
	p.subject.mu.Lock()
	delete(p.subject.running, p)
	p.subject.mu.Unlock()
	err := p.cmd.Process.Kill()
	<-p.done
	if err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill proxy: %w", err)
	}
	if strings.Contains(p.output.String(), "WARNING: DATA RACE") {
		return fmt.Errorf("the proxy has a data race:\n%s", p.output)
	}
	return nil
}

func (p *sinkProcess) Output() string { return p.output.String() }
