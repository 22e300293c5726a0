// SPDX-License-Identifier: Apache-2.0

//go:build linux

package userspacebench

import (
	"os"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// content replaces this process by the program in args. When that program sets a resource
// limit, the system call succeeds without effect. kube-proxy needs this, because it ends
// if it cannot raise its limit of open files to 64,000. In some containers not even root
// can raise the limit.
func content(args []string) {
	runtime.LockOSThread()
	const newLimit = 16 + 2*8 // offset of prlimit64's third argument, the new limit, in struct seccomp_data
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}, // load the number of the system call
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 3, K: unix.SYS_PRLIMIT64},
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: newLimit},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: 1, K: 0},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		fatal(err)
	}
	if err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&program)), 0, 0); err != nil {
		fatal(err)
	}
	os.Unsetenv("KPNG_BENCH_CONTENT")
	fatal(syscall.Exec(args[0], args, os.Environ()))
}
