// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import "sync"

// output stores the last bytes that a process has printed.
type output struct {
	mu   sync.Mutex
	text []byte
}

// maxOutput limits an output. If a process prints more, the output stores between
// maxOutput and twice maxOutput bytes.
const maxOutput = 16 << 10

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.text = append(o.text, p...)
	if len(o.text) > 2*maxOutput {
		o.text = append(o.text[:0], o.text[len(o.text)-maxOutput:]...)
	}
	return len(p), nil
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return string(o.text)
}
