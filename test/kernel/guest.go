// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// job describes the program that the guest runs.
type job struct {
	Args, Env []string
	Dir       string
	// Modules is the host's folder that becomes /lib/modules in the guest.
	Modules string
}

// The paths of three things in the initramfs: this program, the job as JSON, and the
// folder with the modules that the guest needs to mount the host's file system. Sorted by
// name, the module files are in load order.
const (
	initPath   = "/init"
	jobPath    = "/job"
	modulesDir = "/modules"
)

// hostTag is the mount tag of the host's file system.
const hostTag = "host"

// guestMain is the main function of the guest's first process. It does not return.
func guestMain() {
	status, err := guest()
	if err != nil {
		fmt.Fprintln(os.Stderr, "kernel:", err) // stderr is the console
	} else {
		fmt.Fprintf(life, "exit %d\n", status)
	}
	for _, port := range []*os.File{os.Stderr, output, life} {
		if port != nil {
			unix.IoctlSetInt(int(port.Fd()), unix.TCSBRK, 1) // like tcdrain: wait until all output is sent
		}
	}
	unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	select {}
}

// output and life are serial ports. The comment of the function boot describes them.
var output, life *os.File

func guest() (status int, err error) {
	var j job
	text, err := os.ReadFile(jobPath)
	if err != nil {
		return 0, err
	}
	if err := json.Unmarshal(text, &j); err != nil {
		return 0, err
	}
	for _, variable := range j.Env {
		name, value, _ := strings.Cut(variable, "=")
		os.Setenv(name, value)
	}
	if err := loadModules(); err != nil {
		return 0, err
	}
	if err := makeRoot(&j); err != nil {
		return 0, err
	}
	if output, err = openPort("/dev/ttyS1"); err != nil {
		return 0, err
	}
	if life, err = openPort("/dev/ttyS2"); err != nil {
		return 0, err
	}
	go func() {
		for ; ; time.Sleep(time.Second) {
			fmt.Fprintln(life, "alive")
		}
	}()
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		return 0, fmt.Errorf("set up lo (needs ip of Debian package iproute2): %w: %s", err, out)
	}
	if err := unix.Sethostname([]byte("kernel")); err != nil {
		return 0, fmt.Errorf("set host name: %w", err)
	}
	files := unix.Rlimit{Cur: 1 << 20, Max: 1 << 20}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return 0, fmt.Errorf("raise limit of open files: %w", err)
	}
	return execute(&j)
}

func loadModules() error {
	names, err := filepath.Glob(modulesDir + "/*")
	if err != nil {
		return err
	}
	for _, name := range names {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil {
			return fmt.Errorf("load %s: %w", name, err)
		}
		f.Close()
	}
	return nil
}

// makeRoot makes the host's file system the root file system. An overlay in memory
// receives all writes.
func makeRoot(j *job) error {
	type mount struct {
		source, target, kind string
		flags                uintptr
		data                 string
	}
	for _, m := range []mount{
		{hostTag, "/host", "9p", unix.MS_RDONLY, "trans=virtio,version=9p2000.L,cache=loose,msize=512000"},
		{"tmpfs", "/written", "tmpfs", 0, "size=90%"},
		{"overlay", "/root", "overlay", 0, "lowerdir=/host,upperdir=/written/files,workdir=/written/work"},
		{"/host" + j.Modules, "/root/lib/modules", "", unix.MS_BIND, ""},
		{"proc", "/root/proc", "proc", 0, ""},
		{"sysfs", "/root/sys", "sysfs", 0, ""},
		{"cgroup2", "/root/sys/fs/cgroup", "cgroup2", 0, ""},
		{"devtmpfs", "/root/dev", "devtmpfs", 0, ""},
		{"devpts", "/root/dev/pts", "devpts", 0, ""},
		{"tmpfs", "/root/dev/shm", "tmpfs", 0, ""},
		{"tmpfs", "/root/run", "tmpfs", 0, ""},
	} {
		if m.kind == "overlay" {
			for _, dir := range []string{"/written/files", "/written/work"} {
				if err := os.Mkdir(dir, 0o755); err != nil {
					return err
				}
			}
		}
		if err := os.MkdirAll(m.target, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.source, m.target, m.kind, m.flags, m.data); err != nil {
			return fmt.Errorf("mount %s at %s: %w", m.source, m.target, err)
		}
	}
	if err := os.Chdir("/root"); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move root file system: %w", err)
	}
	// Chroot also changes the root folder of kernel threads. So the kernel finds modprobe
	// and the modules.
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("change root folder: %w", err)
	}
	return os.Chdir(j.Dir)
}

// openPort opens a serial port in raw mode.
func openPort(name string) (*os.File, error) {
	f, err := os.OpenFile(name, os.O_WRONLY|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	settings, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	if err != nil {
		return nil, fmt.Errorf("read settings of %s: %w", name, err)
	}
	settings.Oflag &^= unix.OPOST
	if err := unix.IoctlSetTermios(int(f.Fd()), unix.TCSETS, settings); err != nil {
		return nil, fmt.Errorf("set up %s: %w", name, err)
	}
	return f, nil
}

// execute runs the program. It also reaps orphaned processes.
func execute(j *job) (status int, err error) {
	program, err := exec.LookPath(j.Args[0])
	if err != nil {
		return 0, err
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return 0, err
	}
	process, err := os.StartProcess(program, j.Args, &os.ProcAttr{Files: []*os.File{null, output, output}})
	if err != nil {
		return 0, err
	}
	for {
		var end unix.WaitStatus
		pid, err := unix.Wait4(-1, &end, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return 0, fmt.Errorf("wait for program: %w", err)
		case pid == process.Pid && end.Signaled():
			fmt.Fprintf(output, "kernel: %s was killed by %v\n", program, end.Signal())
			return 128 + int(end.Signal()), nil
		case pid == process.Pid:
			return end.ExitStatus(), nil
		}
	}
}
