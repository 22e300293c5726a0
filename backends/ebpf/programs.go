// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// programs are the maps and programs in the kernel, and the links that attach the
// programs to the cgroup.
type programs struct {
	connectObjects
	links []link.Link
	// lock is the directory of the instance, which the process has opened and locked.
	lock *os.File
}

// hook is a hook of the cgroup. Its pinned link has the hook's name.
type hook struct {
	name    string
	attach  ebpf.AttachType
	program *ebpf.Program
}

func (p *programs) hooks() []hook {
	return []hook{
		{"connect4", ebpf.AttachCGroupInet4Connect, p.Connect4},
		{"connect6", ebpf.AttachCGroupInet6Connect, p.Connect6},
		{"sendmsg4", ebpf.AttachCGroupUDP4Sendmsg, p.Sendmsg4},
		{"sendmsg6", ebpf.AttachCGroupUDP6Sendmsg, p.Sendmsg6},
		{"recvmsg4", ebpf.AttachCGroupUDP4Recvmsg, p.Recvmsg4},
		{"recvmsg6", ebpf.AttachCGroupUDP6Recvmsg, p.Recvmsg6},
		{"getpeername4", ebpf.AttachCgroupInet4GetPeername, p.Getpeername4},
		{"getpeername6", ebpf.AttachCgroupInet6GetPeername, p.Getpeername6},
	}
}

// load makes the maps, or opens those that exist, and loads the programs. It needs CAP_BPF
// and CAP_NET_ADMIN.
func load(ctx context.Context, o *Options) (p *programs, err error) {
	if err := checkKernel(); err != nil {
		return nil, err
	}
	spec, err := loadConnect()
	if err != nil {
		return nil, err
	}
	for name, size := range o.sizes() {
		spec.Maps[name].MaxEntries = uint32(size)
		spec.Maps[name].Pinning = ebpf.PinByName
	}
	if o.HostNetworkOnly {
		cookie, err := netNSCookie()
		if err != nil {
			return nil, err
		}
		if err := spec.Variables["only_netns"].Set(cookie); err != nil {
			return nil, err
		}
	}
	dir := o.directory()
	lock, err := lockDirectory(dir)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			lock.Close()
		}
	}()
	p = &programs{lock: lock}
	err = spec.LoadAndAssign(&p.connectObjects, &ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: dir}})
	if errors.Is(err, ebpf.ErrMapIncompatible) {
		// Unpin the old maps. They exist until the programs that use them are replaced.
		klog.FromContext(ctx).Info("Replacing eBPF maps of another layout or size", "reason", err)
		for name := range o.sizes() {
			if err := os.Remove(filepath.Join(dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, err
			}
		}
		err = spec.LoadAndAssign(&p.connectObjects, &ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: dir}})
	}
	if err != nil {
		return nil, fmt.Errorf("load eBPF programs: %w", err)
	}
	return p, nil
}

// lockDirectory makes a directory for maps and links, and locks it until the result is
// closed or the process ends. Two processes that write the same maps would corrupt each
// other's lists.
func lockDirectory(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make a directory for maps and links: %w", err)
	}
	lock, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("lock the directory of maps and links: %w", err)
	}
	err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		return lock, nil
	}
	lock.Close()
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, fmt.Errorf("another process uses the maps in %s; stop it, or choose another instance", dir)
	}
	return nil, fmt.Errorf("lock the directory %s: %w", dir, err)
}

// checkKernel returns an error that names what the kernel or the process lacks.
func checkKernel() error {
	noMemory := rlimit.RemoveMemlock()
	var missing []string
	for _, f := range []struct {
		name string
		err  error
	}{
		{"maps of type LRU hash (CONFIG_BPF_SYSCALL)", features.HaveMapType(ebpf.LRUHash)},
		{"programs at sockets of cgroups (CONFIG_CGROUP_BPF)", features.HaveProgramType(ebpf.CGroupSockAddr)},
		{"the eBPF helper get_netns_cookie (Linux 5.8)", features.HaveProgramHelper(ebpf.CGroupSockAddr, asm.FnGetNetnsCookie)},
	} {
		if errors.Is(f.err, unix.EPERM) {
			return fmt.Errorf("eBPF needs the capabilities BPF and NET_ADMIN: %w", f.err)
		}
		if errors.Is(f.err, ebpf.ErrNotSupported) {
			missing = append(missing, f.name)
		} else if f.err != nil {
			return fmt.Errorf("check the kernel for %s: %w", f.name, f.err)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("the kernel lacks %s", strings.Join(missing, ", "))
	}
	if noMemory != nil {
		return fmt.Errorf("raise the limit of locked memory, as Linux before 5.11 requires: %w", noMemory)
	}
	return nil
}

// netNSCookie returns the cookie of the network namespace of the process.
func netNSCookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("open a socket: %w", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("read the cookie of the network namespace (Linux 5.14): %w", err)
	}
	return cookie, nil
}

// attach attaches the programs to the cgroup. A link that exists gets the new program in
// one step.
func (p *programs) attach(o *Options, cgroup string) error {
	id, err := cgroupID(cgroup)
	if err != nil {
		return err
	}
	if err := p.closeLinks(); err != nil {
		return err
	}
	for _, h := range p.hooks() {
		l, err := attach(filepath.Join(o.directory(), h.name), cgroup, id, h)
		if err != nil {
			return fmt.Errorf("attach to hook %s of cgroup %s: %w", h.name, cgroup, err)
		}
		p.links = append(p.links, l)
	}
	return removeUnknownLinks(o)
}

// removeUnknownLinks detaches the programs at hooks that only another version of kpng uses.
func removeUnknownLinks(o *Options) error {
	files, err := os.ReadDir(o.directory())
	if err != nil {
		return err
	}
	var errs []error
	for _, file := range files {
		known := slices.ContainsFunc(new(programs).hooks(), func(h hook) bool { return h.name == file.Name() })
		if _, isMap := o.sizes()[file.Name()]; known || isMap {
			continue
		}
		if l, err := link.LoadPinnedLink(filepath.Join(o.directory(), file.Name()), nil); err == nil {
			errs = append(errs, ignoreUnattached(l.Detach()), l.Unpin(), l.Close())
		}
	}
	return errors.Join(errs...)
}

func attach(path, cgroup string, id uint64, h hook) (link.Link, error) {
	l, err := link.LoadPinnedLink(path, nil)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if err == nil {
		if attachedTo(l) == id {
			if err = l.Update(h.program); err == nil {
				return l, nil
			}
		}
		// Detach and delete the link, because its cgroup was deleted or the options have
		// changed. A new link replaces it.
		err = errors.Join(ignoreUnattached(l.Detach()), l.Unpin(), l.Close())
		if err != nil {
			return nil, err
		}
	}
	l, err = link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: h.attach, Program: h.program})
	if err != nil {
		return nil, err
	}
	if err := l.Pin(path); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// attached reports whether all programs are attached to the cgroup and all links are
// pinned. Pinned links stay when this process ends.
func (p *programs) attached(o *Options, cgroup string) bool {
	id, err := cgroupID(cgroup)
	if err != nil || len(p.links) < len(p.hooks()) {
		return false
	}
	for i, h := range p.hooks() {
		if _, err := os.Stat(filepath.Join(o.directory(), h.name)); err != nil || attachedTo(p.links[i]) != id {
			return false
		}
	}
	return true
}

// attachedTo returns the ID of the cgroup to which a link is attached, or 0.
func attachedTo(l link.Link) uint64 {
	info, err := l.Info()
	if err != nil || info.Cgroup() == nil {
		return 0
	}
	return info.Cgroup().CgroupId
}

func ignoreUnattached(err error) error {
	if errors.Is(err, unix.ENOLINK) {
		return nil
	}
	return err
}

// close closes the descriptors. The pinned maps and links stay.
func (p *programs) close() error {
	return errors.Join(p.connectObjects.Close(), p.closeLinks(), p.lock.Close())
}

// detach detaches the programs. The method attach attaches them again.
func (p *programs) detach() (err error) {
	for _, l := range p.links {
		err = errors.Join(err, ignoreUnattached(l.Detach()))
	}
	return err
}

func (p *programs) closeLinks() (err error) {
	for _, l := range p.links {
		err = errors.Join(err, l.Close())
	}
	p.links = nil
	return err
}

// remove detaches the programs and deletes the maps, if the instance exists.
func remove(o *Options) error {
	dir := o.directory()
	var errs []error
	for _, h := range new(programs).hooks() {
		l, err := link.LoadPinnedLink(filepath.Join(dir, h.name), nil)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = errors.Join(ignoreUnattached(l.Detach()), l.Unpin(), l.Close())
		}
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("detach eBPF programs: %w", err)
	}
	return os.RemoveAll(dir)
}
