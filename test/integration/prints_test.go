// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bytes"
	"context"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// prints is a writer that splits the output of kpng-json into prints. Each print is the
// whole state. The prints have no separator, so the last line of each print must show the
// same service.
type prints struct {
	// last is the beginning of the last line of each print.
	last []byte
	// If the field each is not nil, Write calls it with every print.
	each func(print []byte)

	mu      sync.Mutex
	rest    []byte
	checked int // rest[:checked] was searched for the end of a print
	print   []byte
	more    chan struct{} // closed by the next print
}

// newPrints returns a writer for output in which each print ends with the given service.
func newPrints(namespace, name string) *prints {
	return &prints{
		last: fmt.Appendf(nil, `{"Service":{"Namespace":%q,"Name":%q,`, namespace, name),
		more: make(chan struct{}),
	}
}

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
		next := make([]byte, 0, p.checked+p.checked/4) // the next print will have about the same size
		p.print, p.rest, p.checked = p.rest[:p.checked:p.checked], append(next, p.rest[p.checked:]...), 0
		if p.each != nil {
			p.each(p.print)
		}
		close(p.more)
		p.more = make(chan struct{})
	}
}

// get returns the last print, and a channel that the next print closes.
func (p *prints) get() ([]byte, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.print, p.more
}

// wait waits for a print that satisfies the given condition, and returns the print. After
// a timeout it returns the last print and false.
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

// winners matches the winners of lost claims. A view keeps the winner that was current
// when the view was computed.
var winners = regexp.MustCompile(`,"Winner":\{[^}]*\}`)

func withoutWinners(print []byte) []byte { return winners.ReplaceAll(print, nil) }

// expect waits for a print that equals want, apart from the winners of lost claims. After
// a timeout the test fails.
func (p *prints) expect(t testing.TB, want []byte, by string) {
	t.Helper()
	want = withoutWinners(want)
	if got, ok := p.wait(t, func(print []byte) bool { return bytes.Equal(withoutWinners(print), want) }); !ok {
		got = withoutWinners(got)
		t.Fatalf("output of %s (-want +got):\n%s", by,
			cmp.Diff(strings.Split(string(want), "\n"), strings.Split(string(got), "\n")))
	}
}
