// SPDX-License-Identifier: Apache-2.0

package ownership

import (
	"os"

	"golang.org/x/sys/windows"
)

const errLocked = windows.ERROR_LOCK_VIOLATION

// tryLock locks the file. If another process has locked it, the error is errLocked.
func tryLock(f *os.File) error {
	// Other processes cannot read locked bytes. So lock a byte after the end of the text.
	at := windows.Overlapped{Offset: 1 << 30}
	return windows.LockFileEx(windows.Handle(f.Fd()), windows.LOCKFILE_EXCLUSIVE_LOCK|windows.LOCKFILE_FAIL_IMMEDIATELY, 0, 1, 0, &at)
}
