// SPDX-License-Identifier: Apache-2.0

// Package ownership ensures that at most one process at a time programs the same objects of a
// dataplane. A backend takes the ownership of its objects in Start and in Cleanup. When the
// process ends, even by SIGKILL, the kernel releases the ownership.
package ownership

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/kpng-project/kpng/sink"
)

// Owner has the ownership of a backend. The zero value owns nothing. Its methods are safe
// for concurrent use.
type Owner struct {
	mu      sync.Mutex
	release func() // nil while nothing is owned
}

// Taken is the error of an attempt to own objects that another owner has. It wraps
// [sink.ErrOwned].
type Taken struct {
	// Objects describes the objects, and By their owner.
	Objects, By string
}

func (e *Taken) Error() string { return fmt.Sprintf("%s: owned by %s", e.Objects, e.By) }

func (e *Taken) Unwrap() error { return sink.ErrOwned }

// Start takes the ownership and then calls start. If start fails or panics, the ownership
// is released. The function take is a call of [Objects] or [File].
func (o *Owner) Start(take func() (release func(), err error), start func() error) error {
	release, err := take()
	if err != nil {
		return err
	}
	defer func() {
		if release != nil {
			release()
		}
	}()
	if err := start(); err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.release, release = release, nil
	return nil
}

// Release releases the ownership. Without ownership, it does nothing.
func (o *Owner) Release() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.release != nil {
		o.release()
		o.release = nil
	}
}

// During holds the ownership while it calls f. If this Owner already has the ownership,
// During just calls f.
func (o *Owner) During(take func() (release func(), err error), f func() error) error {
	o.mu.Lock()
	owned := o.release != nil
	o.mu.Unlock()
	if owned {
		return f()
	}
	release, err := take()
	if err != nil {
		return err
	}
	defer release()
	return f()
}

var started = time.Now()

// self describes this process in one line for other processes.
func self() string {
	const most = 400 // bytes of the command line
	command := strings.Join(os.Args, " ")
	if len(command) > most {
		command = command[:most] + "…"
	}
	return fmt.Sprintf("%q since %s", command, started.UTC().Format(time.RFC3339))
}
