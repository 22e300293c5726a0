// SPDX-License-Identifier: Apache-2.0

package ownership

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// File takes the ownership of the objects that a state file records. It locks a file
// whose name is path with the suffix ".lock". This file stays. If another owner has the
// objects, the error is a [*Taken]. If path is empty, there are no objects to own.
func File(path string) (release func(), err error) {
	if path == "" {
		return func() {}, nil
	}
	lock := path + ".lock"
	if err := os.MkdirAll(filepath.Dir(lock), 0o755); err != nil {
		return nil, fmt.Errorf("make the directory of %s: %w", lock, err)
	}
	f, err := os.OpenFile(lock, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the lock of a state file: %w", err)
	}
	if err := tryLock(f); err != nil {
		defer f.Close()
		if !errors.Is(err, errLocked) {
			return nil, fmt.Errorf("lock %s: %w", lock, err)
		}
		by, err := os.ReadFile(lock)
		if err != nil || len(by) == 0 {
			by = []byte("another process")
		}
		return nil, &Taken{"state file " + path, strings.TrimSpace(string(by))}
	}
	text := fmt.Sprintf("process %d: %s\n", os.Getpid(), self())
	if err := errors.Join(f.Truncate(0), writeAt(f, text)); err != nil {
		return nil, errors.Join(fmt.Errorf("write %s: %w", lock, err), f.Close())
	}
	return func() { f.Close() }, nil
}

func writeAt(f *os.File, text string) error {
	_, err := f.WriteAt([]byte(text), 0)
	return err
}
