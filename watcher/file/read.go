// SPDX-License-Identifier: Apache-2.0

package file

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
	"unicode/utf8"
)

const (
	// maxSize is how large a file of manifests may be, in bytes. It keeps what
	// never ends, or is no manifest, from filling the memory.
	maxSize = 512 << 20
	// blockSize is how much is read at a time.
	blockSize = 64 << 10
)

// readFile returns what a regular file holds. Opening anything else might have
// effects, and reading it might never end.
func readFile(ctx context.Context, name string) ([]byte, error) {
	info, err := os.Stat(name)
	if err != nil {
		return nil, err
	}
	if err := checkRegular(name, info); err != nil {
		return nil, err
	}
	// Should something else be there by now, opening it does not wait for anybody.
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close() // nothing was written
	if info, err = f.Stat(); err != nil {
		return nil, err
	}
	if err := checkRegular(name, info); err != nil {
		return nil, err
	}
	return read(ctx, name, f, info.Size(), maxSize)
}

func checkRegular(name string, info fs.FileInfo) error {
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%s: not a regular file (%s); use %q to read the standard input", name, info.Mode(), Stdin)
	}
	return nil
}

// readStdin returns what the standard input holds, which errors call by name. A read of it cannot be
// interrupted: when ctx ends before, it is left to itself.
func readStdin(ctx context.Context, name string) ([]byte, error) {
	type result struct {
		data []byte
		err  error
	}
	done := make(chan result, 1)
	go func(stdin *os.File) {
		data, err := read(ctx, name, stdin, 0, maxSize)
		done <- result{data, err}
	}(os.Stdin)
	select {
	case r := <-done:
		return r.data, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// read returns what r holds, which is size bytes as far as one knows. More than
// limit is an error. Of what does not begin with text it returns the beginning,
// which is enough to refuse it.
func read(ctx context.Context, name string, r io.Reader, size, limit int64) ([]byte, error) {
	var data bytes.Buffer
	if size <= limit {
		data.Grow(int(size) + bytes.MinRead)
	}
	for isText := false; ; isText = true {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		_, err := io.CopyN(&data, r, blockSize)
		if err == nil && !isText {
			if _, found := noText(wholeRunes(data.Bytes())); found {
				return data.Bytes(), nil
			}
		}
		switch {
		case int64(data.Len()) > limit || size > limit:
			return nil, fmt.Errorf("%s: larger than %d MiB", name, limit>>20)
		case err == io.EOF:
			return data.Bytes(), nil
		case err != nil:
			return nil, err
		}
	}
}

// wholeRunes returns text without the last rune if that is cut off.
func wholeRunes(text []byte) []byte {
	for n := 1; n < utf8.UTFMax && n <= len(text); n++ {
		if last := text[len(text)-n:]; utf8.RuneStart(last[0]) {
			if !utf8.FullRune(last) {
				return text[:len(text)-n]
			}
			break
		}
	}
	return text
}

// noText returns the line of the first byte that is not UTF-8, or is zero: no
// text has one, but in an encoding other than UTF-8 or in binary data it is
// what comes first.
func noText(data []byte) (line int, found bool) {
	if utf8.Valid(data) && bytes.IndexByte(data, 0) < 0 {
		return 0, false
	}
	line = 1
	for len(data) > 0 {
		r, size := utf8.DecodeRune(data)
		if r == utf8.RuneError && size == 1 || r == 0 {
			break
		}
		if r == '\n' {
			line++
		}
		data = data[size:]
	}
	return line, true
}

// interruptible is a reader that ends with ctx.
type interruptible struct {
	io.Reader
	ctx context.Context
}

func (r interruptible) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.Reader.Read(p)
}
