// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// boot runs a guest to its end and returns the exit status of the guest's program. The
// guest has three serial ports: for the console, for the program's output, and for signs
// of life. The last line that the guest writes to the port for signs of life contains the
// exit status.
func boot(qemu *exec.Cmd, silence time.Duration) (status int, err error) {
	var readers, writers [3]*os.File
	for i := range readers {
		if readers[i], writers[i], err = os.Pipe(); err != nil {
			return 0, err
		}
		defer readers[i].Close()
	}
	var said bytes.Buffer
	qemu.ExtraFiles, qemu.Stdout, qemu.Stderr = writers[:], &said, &said
	qemu.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if err := qemu.Start(); err != nil {
		return 0, fmt.Errorf("start QEMU: %w", err)
	}
	for _, w := range writers {
		w.Close()
	}

	var console bytes.Buffer
	var copies sync.WaitGroup
	copies.Go(func() { io.Copy(&console, readers[0]) })
	copies.Go(func() { io.Copy(os.Stdout, readers[1]) })
	life := time.AfterFunc(silence, func() { qemu.Process.Kill() })
	exited := false
	for lines := bufio.NewScanner(readers[2]); lines.Scan(); {
		life.Reset(silence)
		if _, err := fmt.Sscanf(lines.Text(), "exit %d", &status); err == nil {
			exited = true
		}
	}
	silent := !life.Stop()
	copies.Wait()
	ended := qemu.Wait()
	switch {
	case exited:
		return status, nil
	case silent:
		err = fmt.Errorf("the guest showed no sign of life for %v", silence)
	default:
		err = fmt.Errorf("the guest ended early, QEMU with %v", ended)
	}
	return 0, fmt.Errorf("%w\n%s\n%s", err, tail(said.Bytes()), tail(console.Bytes()))
}
