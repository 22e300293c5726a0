// SPDX-License-Identifier: Apache-2.0

//go:build unix

package ownership

import (
	"os"

	"golang.org/x/sys/unix"
)

const errLocked = unix.EWOULDBLOCK

// tryLock locks the file. If another process has locked it, the error is errLocked.
func tryLock(f *os.File) error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) }
