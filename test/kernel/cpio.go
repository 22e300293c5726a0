// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// cpio writes an initramfs in the format newc. The file
// Documentation/driver-api/early-userspace/buffer-format.rst of Linux describes the
// format. The method close also returns the errors of the other methods.
type cpio struct {
	w     *bufio.Writer
	inode int
	err   error
}

// copyFile adds the file source to the archive, as an executable file with the given
// name.
func (c *cpio) copyFile(name, source string) {
	content, err := os.ReadFile(source)
	c.err = errors.Join(c.err, err)
	c.add(name, unix.S_IFREG|0o755, content)
}

func (c *cpio) file(name string, content []byte) { c.add(name, unix.S_IFREG|0o644, content) }

func (c *cpio) folder(name string) { c.add(name, unix.S_IFDIR|0o755, nil) }

func (c *cpio) add(name string, mode int, content []byte) {
	name = strings.TrimPrefix(name, "/")
	c.inode++
	const mtime, links, none = 0, 1, 0
	_, err := fmt.Fprintf(c.w, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		c.inode, mode, none, none, links, mtime, len(content), none, none, none, none, len(name)+1, none, name)
	c.err = errors.Join(c.err, err)
	const header = 110
	c.pad(header + len(name) + 1)
	c.w.Write(content)
	c.pad(len(content))
}

// pad adds zero bytes until the number of written bytes is a multiple of four.
func (c *cpio) pad(written int) { c.w.Write(make([]byte, -written&3)) }

// close ends the archive and returns the errors of all methods.
func (c *cpio) close() error {
	c.add("TRAILER!!!", 0, nil)
	return errors.Join(c.err, c.w.Flush())
}
