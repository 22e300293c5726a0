// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command kernel runs a program, usually a test binary, on a Debian kernel in QEMU:
//
//	CGO_ENABLED=0 go build -C test -o /tmp/kernel ./kernel
//	go test -p 1 -exec "/tmp/kernel -debian bullseye" ./backends/nftables
//
// The guest sees this machine's files at the same paths, so that the program finds its
// libraries, other programs, the working directory and testdata. Changes of files stay in
// the guest's memory. The program runs as root, with its usual arguments and environment.
// Command kernel prints the program's output and exits with the program's exit status.
// Command kernel itself needs no privileges.
//
// Flags:
//
//	-debian SUITE    the Debian release whose kernel boots: bullseye (5.10) or bookworm (6.1)
//	-without NAMES   kernel modules that must not load, separated by commas
//	-memory MIB      memory of the guest
//	-silence LIMIT   how long a guest may show no sign of life before it is killed
//	-accel NAME      QEMU's accelerator: tcg, which emulates, or kvm
//
// The first run downloads the kernel into the folder kpng/kernel of the user's cache. It
// uses apt-get, which checks Debian's signatures. To use another mirror than
// http://deb.debian.org/debian, set $KPNG_DEBIAN_MIRROR. Later runs need no network. To
// get a newer kernel, remove the folder.
//
// Command kernel needs the Debian packages apt, dpkg, debian-archive-keyring, kmod and
// qemu-system-x86. The guest uses iproute2, which must be installed on this machine. With
// the accelerator tcg, a guest boots in about 5 seconds, and programs run 10 to 30 times
// slower than without QEMU. KVM is not the default because it fails on many virtual
// machines.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	if os.Getpid() == 1 && os.Args[0] == initPath {
		guestMain()
	}
	// The kernel kills QEMU when the thread that started QEMU ends. So this goroutine keeps
	// its thread.
	runtime.LockOSThread()
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM, unix.SIGQUIT)
	defer stop()
	status, err := run(ctx, os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "kernel:", err)
		status = 125
	}
	os.Exit(status)
}

// run parses the flags in args, runs the program and returns its exit status.
func run(ctx context.Context, args []string) (int, error) {
	flags := flag.NewFlagSet("kernel", flag.ExitOnError)
	suite := flags.String("debian", "bookworm", "the Debian `suite` whose kernel boots")
	without := flags.String("without", "", "kernel `modules` that must not load, separated by commas")
	memory := flags.Int("memory", 1024, "memory of the guest in `MiB`")
	silence := flags.Duration("silence", 3*time.Minute, "how long a guest may show no sign of life")
	accelerator := flags.String("accel", "tcg", "QEMU's `accelerator`")
	flags.Parse(args)
	if flags.NArg() == 0 {
		return 0, errors.New("no program to run given")
	}
	// The $PATH of users other than root may lack these folders.
	os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin")
	qemu, err := find("qemu-system-x86_64", "qemu-system-x86")
	if err != nil {
		return 0, err
	}
	dir, err := os.Getwd()
	if err != nil {
		return 0, err
	}
	k, err := debianKernel(ctx, *suite)
	if err != nil {
		return 0, fmt.Errorf("get kernel of Debian %s: %w", *suite, err)
	}
	initramfs, err := k.initramfs(&job{Args: flags.Args(), Env: os.Environ(), Dir: dir, Modules: k.modules})
	if err != nil {
		return 0, fmt.Errorf("make initramfs: %w", err)
	}
	defer os.Remove(initramfs)
	parameters := "console=ttyS0 quiet panic=-1 no_timer_check mitigations=off rdinit=" + initPath
	if *without != "" {
		parameters += " module_blacklist=" + *without
	}
	return boot(exec.CommandContext(ctx, qemu,
		"-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
		"-machine", "pc,accel="+*accelerator, "-cpu", "max", "-smp", "2", "-m", fmt.Sprint(*memory),
		"-kernel", k.image, "-initrd", initramfs, "-append", parameters,
		"-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap",
		"-device", "virtio-9p-pci,fsdev=host,mount_tag="+hostTag,
		// In the guest, these ports are ttyS0, ttyS1 and ttyS2; see boot.
		"-serial", "file:/dev/fd/3", "-serial", "file:/dev/fd/4", "-serial", "file:/dev/fd/5",
	), *silence)
}

// find returns the path of a program. Its error names the Debian package to install.
func find(program, debianPackage string) (string, error) {
	path, err := exec.LookPath(program)
	if err != nil {
		return "", fmt.Errorf("%s is missing: install Debian package %s", program, debianPackage)
	}
	return path, nil
}

// tail returns the last 4 KiB of an output, for an error message.
func tail(b []byte) string {
	const limit = 4 << 10
	return strings.TrimSpace(string(b[max(0, len(b)-limit):]))
}
