// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// prints is a writer that cuts what kpng-json writes into prints, each of them
// all that it shows at a time. As nothing is between them, each has to end with
// the same service.
type prints struct {
	// last is what the line of that service begins with.
	last []byte
	// each, if set, is called with each print, by who writes.
	each func(print []byte)

	mu      sync.Mutex
	rest    []byte
	checked int // bytes of rest that have no end of a print in them
	print   []byte
	more    chan struct{} // closed by the next print
}

// newPrints returns prints that end with a service of this name.
func newPrints(namespace, name string) *prints {
	return &prints{
		last: fmt.Appendf(nil, `{"Service":{"Namespace":%q,"Name":%q,`, namespace, name),
		more: make(chan struct{}),
	}
}

// Write implements io.Writer.
func (p *prints) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rest = append(p.rest, b...)
	for {
		end := bytes.IndexByte(p.rest[p.checked:], '\n')
		if end < 0 {
			return len(b), nil
		}
		line := p.rest[p.checked : p.checked+end+1]
		p.checked += len(line)
		if !bytes.HasPrefix(line, p.last) {
			continue
		}
		next := make([]byte, 0, p.checked+p.checked/4) // about as large
		p.print, p.rest, p.checked = p.rest[:p.checked:p.checked], append(next, p.rest[p.checked:]...), 0
		if p.each != nil {
			p.each(p.print)
		}
		close(p.more)
		p.more = make(chan struct{})
	}
}

// get returns the last print, and what is closed when there is another.
func (p *prints) get() ([]byte, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.print, p.more
}

// wait waits for a print that is as is says, and returns it. If that does not come
// it returns false, and the last one.
func (p *prints) wait(t testing.TB, is func([]byte) bool) ([]byte, bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		print, more := p.get()
		if print != nil && is(print) {
			return print, true
		}
		select {
		case <-more:
		case <-ctx.Done():
			return print, false
		}
	}
}

// expect fails the test unless want comes to be printed.
func (p *prints) expect(t testing.TB, want []byte, by string) {
	t.Helper()
	if got, ok := p.wait(t, func(print []byte) bool { return bytes.Equal(print, want) }); !ok {
		t.Fatalf("what is printed by %s (-want +got):\n%s", by,
			cmp.Diff(strings.Split(string(want), "\n"), strings.Split(string(got), "\n")))
	}
}
