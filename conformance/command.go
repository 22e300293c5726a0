// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Command is a Subject that runs the proxy as a command.
type Command struct {
	// Proxy returns the command that runs the proxy until it is killed.
	Proxy func(Site) *exec.Cmd
	// Clean returns the command that removes all objects of the proxy. If Clean is nil,
	// Cleanup does nothing.
	Clean func(Site) *exec.Cmd
	// Publisher writes the objects to the place from which the command reads them.
	Publisher
}

// Publisher writes objects to the place from which a proxy reads them. For the contract
// of Publish, see Subject.Publish.
type Publisher interface {
	Publish(ctx context.Context, objects *Objects) error
}

// Start implements Subject.
func (c *Command) Start(_ context.Context, site Site) (Process, error) {
	cmd, p := c.Proxy(site), &commandProcess{done: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = &p.output, &p.output
	ended, err := site.Start(cmd)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd, err)
	}
	p.process = cmd.Process
	go func() {
		p.err = <-ended
		close(p.done)
	}()
	return p, nil
}

// Cleanup implements Subject.
func (c *Command) Cleanup(_ context.Context, site Site) error {
	if c.Clean == nil {
		return nil
	}
	cmd, printed := c.Clean(site), &output{}
	cmd.Stdout, cmd.Stderr = printed, printed
	ended, err := site.Start(cmd)
	if err == nil {
		err = <-ended
	}
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", cmd, err, printed)
	}
	return nil
}

// commandProcess is a running command.
type commandProcess struct {
	process *os.Process
	output  output
	done    chan struct{}
	err     error // the result of the process, after done is closed
}

func (p *commandProcess) Kill() error {
	err := p.process.Kill()
	<-p.done
	if err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill proxy: %w", err)
	}
	return nil
}

func (p *commandProcess) Output() string { return p.output.String() }

// errEnded returns an error for a process that ended before the kit killed it. The argument is
// the result of the process.
func errEnded(result error) error {
	if result == nil {
		return errors.New("the proxy has ended")
	}
	return fmt.Errorf("the proxy has ended: %w", result)
}

// Manifests is the path of a file. The method Publish atomically writes the objects to
// that file, in the format of package watcher/file.
type Manifests string

// Publish implements Publisher.
func (path Manifests) Publish(_ context.Context, objects *Objects) error {
	list := struct {
		metav1.TypeMeta `json:",inline"`
		Items           []any `json:"items"`
	}{metav1.TypeMeta{APIVersion: "v1", Kind: "List"}, []any{}}
	for _, o := range objects.Nodes {
		o := o.DeepCopy()
		o.TypeMeta = metav1.TypeMeta{APIVersion: corev1.SchemeGroupVersion.String(), Kind: "Node"}
		list.Items = append(list.Items, o)
	}
	for _, o := range objects.Services {
		o := o.DeepCopy()
		o.TypeMeta = metav1.TypeMeta{APIVersion: corev1.SchemeGroupVersion.String(), Kind: "Service"}
		list.Items = append(list.Items, o)
	}
	for _, o := range objects.Slices {
		o := o.DeepCopy()
		o.TypeMeta = metav1.TypeMeta{APIVersion: discoveryv1.SchemeGroupVersion.String(), Kind: "EndpointSlice"}
		list.Items = append(list.Items, o)
	}
	text, err := json.MarshalIndent(list, "", " ")
	if err != nil {
		return fmt.Errorf("write manifests: %w", err)
	}
	next := filepath.Join(filepath.Dir(string(path)), ".next-"+filepath.Base(string(path)))
	if err := os.WriteFile(next, text, 0o600); err != nil {
		return fmt.Errorf("write manifests: %w", err)
	}
	if err := os.Rename(next, string(path)); err != nil {
		return fmt.Errorf("write manifests: %w", err)
	}
	return nil
}
