// SPDX-License-Identifier: Apache-2.0

package command

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"
)

// logFile is a log file of limited size. It is safe for concurrent use.
type logFile struct {
	path string
	most int64

	mu   sync.Mutex
	file *os.File
	size int64
}

// openLogFile opens the file and creates its folder. If the program crashes, the Go
// runtime writes its report to this file too.
func openLogFile(path string, most int64) (*logFile, error) {
	f := &logFile{path: path, most: most}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("open log file: %w", err)
	}
	return f, f.open()
}

func (f *logFile) open() error {
	file, err := os.OpenFile(f.path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("open log file: %w", err)
	}
	info, err := file.Stat()
	if err := errors.Join(err, debug.SetCrashOutput(file, debug.CrashOptions{})); err != nil {
		file.Close()
		return fmt.Errorf("log to %s: %w", f.path, err)
	}
	f.file, f.size = file, info.Size()
	return nil
}

func (f *logFile) Write(line []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.file == nil || f.size > 0 && f.size+int64(len(line)) > f.most {
		if err := f.rotate(); err != nil {
			return 0, err
		}
	}
	n, err := f.file.Write(line)
	f.size += int64(n)
	return n, err
}

// rotate renames the file and opens a new one. If rotate cannot rename the file, it
// reopens the same file.
func (f *logFile) rotate() error {
	if f.file != nil {
		// Close all descriptors of the file first, because Windows cannot rename an open file.
		err := errors.Join(debug.SetCrashOutput(nil, debug.CrashOptions{}), f.file.Close())
		f.file = nil
		if err == nil {
			_ = os.Rename(f.path, f.path+".old")
		}
	}
	return f.open()
}
