// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"github.com/kpng-project/kpng/sink"
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

// load makes the maps, or opens those that exist, and loads the programs. It needs CAP_BPF,
// CAP_NET_ADMIN and CAP_PERFMON.
func load(ctx context.Context, o *Options) (p *programs, err error) {
	if err := checkKernel(); err != nil {
		return nil, err
	}
	spec, err := loadConnect()
	if err != nil {
		return nil, err
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
	pinned, err := openMaps(dir)
	if err != nil {
		return nil, err
	}
	defer closeMaps(pinned)
	adopted := map[string]*ebpf.Map{}
	for name, m := range mapSpecs(spec, o) {
		if old := pinned[name]; old != nil && old.layout == m.Name && m.Compatible(old.Map) == nil {
			adopted[name] = old.Map
		}
	}
	p = &programs{lock: lock}
	if err := spec.LoadAndAssign(&p.connectObjects, &ebpf.CollectionOptions{MapReplacements: adopted}); err != nil {
		return nil, fmt.Errorf("load eBPF programs: %w", err)
	}
	for name, m := range p.maps() {
		old := pinned[name]
		if old == nil || adopted[name] != nil {
			continue
		}
		klog.FromContext(ctx).Info("Replacing an eBPF map of another layout or size", "map", name)
		if old.layout == spec.Maps[name].Name && old.Type() == m.Type() {
			if err := copyElements(old.Map, m); err != nil {
				return nil, errors.Join(fmt.Errorf("copy map %s: %w", name, err), p.connectObjects.Close())
			}
		}
	}
	return p, nil
}

// layout is the version of the meaning of keys and values in the maps. A change that
// leaves their sizes unchanged must increase it. The kernel's name of a map ends with it.
const layout = 1

// mapSpecs sets the names and sizes of the maps, and returns those that are pinned.
func mapSpecs(spec *ebpf.CollectionSpec, o *Options) map[string]*ebpf.MapSpec {
	all := maps.Clone(spec.Maps)
	maps.DeleteFunc(all, func(name string, _ *ebpf.MapSpec) bool { return strings.HasPrefix(name, ".") }) // such as .rodata
	for name, m := range all {
		m.Name = fmt.Sprintf("%s_v%d", name, layout)
		if size, ok := o.sizes()[name]; ok {
			m.MaxEntries = uint32(size)
		}
	}
	return all
}

// maps returns the maps that are pinned.
func (p *programs) maps() map[string]*ebpf.Map {
	return map[string]*ebpf.Map{
		"frontends": p.Frontends, "slots": p.Slots, "members": p.Members, "clients": p.Clients,
		"tcp_peers": p.TcpPeers, "udp_peers": p.UdpPeers, "heartbeat": p.Heartbeat, "counters": p.Counters,
	}
}

// pinnedMap is a map of an earlier process. Its layout is the kernel's name of the map.
type pinnedMap struct {
	*ebpf.Map
	layout string
}

// openMaps opens the pinned maps.
func openMaps(dir string) (all map[string]*pinnedMap, err error) {
	all = map[string]*pinnedMap{}
	defer func() {
		if err != nil {
			closeMaps(all)
		}
	}()
	for name := range new(programs).maps() {
		m, err := ebpf.LoadPinnedMap(filepath.Join(dir, name), nil)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("open map %s: %w", name, err)
		}
		all[name] = &pinnedMap{Map: m}
		info, err := m.Info()
		if err != nil {
			return nil, fmt.Errorf("read the layout of map %s: %w", name, err)
		}
		all[name].layout = info.Name
	}
	return all, nil
}

func closeMaps(all map[string]*pinnedMap) {
	for _, m := range all {
		m.Close()
	}
}

// copyElements copies elements until the map to is full. Its iteration order is random.
func copyElements(from, to *ebpf.Map) error {
	var key, value []byte
	elements := from.Iterate()
	for elements.Next(&key, &value) {
		if err := to.Put(key, value); errors.Is(err, unix.E2BIG) {
			return nil
		} else if err != nil {
			return err
		}
	}
	return elements.Err()
}

// beat writes the current time to the map heartbeat. Without it, the programs stop after
// ten minutes to translate connections.
func (p *programs) beat() error {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return err
	}
	if err := p.Heartbeat.Put(uint32(0), uint64(now.Nano())); err != nil {
		return fmt.Errorf("write to map heartbeat: %w", err)
	}
	return nil
}

// lockDirectory makes a directory for maps and links, and locks it until the result is
// closed or the process ends. Two processes that write the same maps would corrupt each
// other's lists.
func lockDirectory(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make a directory for maps and links: %w", err)
	}
	lock, err := os.OpenFile(dir, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("lock the directory of maps and links: %w", err)
	}
	if err := checkOwner(lock); err != nil {
		lock.Close()
		return nil, err
	}
	err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		return lock, nil
	}
	lock.Close()
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, fmt.Errorf("eBPF maps in %s: %w", dir, sink.ErrOwned)
	}
	return nil, fmt.Errorf("lock the directory %s: %w", dir, err)
}

// checkOwner returns an error if other users can change the directory. They could detach
// the programs and redirect connections.
func checkOwner(dir *os.File) error {
	var s unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &s); err != nil {
		return fmt.Errorf("check the directory %s: %w", dir.Name(), err)
	}
	if user := os.Geteuid(); int(s.Uid) != user || s.Mode&0o022 != 0 {
		return fmt.Errorf("%s belongs to user %d and has mode %o, so others than user %d can write to it: delete it", dir.Name(), s.Uid, s.Mode&0o777, user)
	}
	return nil
}

// restoreDirectory makes the directory of maps and links again, and locks it, if another
// program has deleted it.
func (p *programs) restoreDirectory(dir string) error {
	var locked, found unix.Stat_t
	if err := unix.Fstat(int(p.lock.Fd()), &locked); err != nil {
		return fmt.Errorf("check the directory %s: %w", dir, err)
	}
	if unix.Stat(dir, &found) == nil && found.Dev == locked.Dev && found.Ino == locked.Ino {
		return nil
	}
	lock, err := lockDirectory(dir)
	if err != nil {
		return err
	}
	p.lock.Close()
	p.lock = lock
	return nil
}

// pin pins the maps that are not pinned, in place of other maps with the same names.
func (p *programs) pin(dir string) error {
	pinned, err := openMaps(dir)
	if err != nil {
		return err
	}
	defer closeMaps(pinned)
	for name, m := range p.maps() {
		path := filepath.Join(dir, name)
		if old := pinned[name]; old != nil {
			if same, err := sameMap(old.Map, m); err != nil {
				return err
			} else if same {
				continue
			}
			if err := os.Remove(path); err != nil {
				return err
			}
		}
		c, err := m.Clone() // a Map remembers its path, even if the file was deleted
		if err == nil {
			err = errors.Join(c.Pin(path), c.Close())
		}
		if err != nil {
			return fmt.Errorf("pin map %s: %w", name, err)
		}
	}
	return nil
}

func sameMap(a, b *ebpf.Map) (bool, error) {
	infoA, errA := a.Info()
	infoB, errB := b.Info()
	if err := errors.Join(errA, errB); err != nil {
		return false, err
	}
	idA, _ := infoA.ID()
	idB, _ := infoB.ID()
	return idA == idB, nil
}

// checkKernel returns an error that names what the kernel or the process lacks.
func checkKernel() error {
	if err := checkCapabilities(); err != nil {
		return err
	}
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

// checkCapabilities returns an error that names missing capabilities. Without PERFMON, many
// kernels reject programs that store a value in a part of a stack slot.
func checkCapabilities() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("read the capabilities of the process: %w", err)
	}
	has := func(c int) bool { return data[c/32].Effective&(1<<(c%32)) != 0 }
	var missing []string
	for _, c := range []struct {
		name   string
		number int
		// implied is true if SYS_ADMIN includes the capability.
		implied bool
	}{{"BPF", unix.CAP_BPF, true}, {"NET_ADMIN", unix.CAP_NET_ADMIN, false}, {"PERFMON", unix.CAP_PERFMON, true}} {
		if !has(c.number) && !(c.implied && has(unix.CAP_SYS_ADMIN)) {
			missing = append(missing, c.name)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("eBPF needs the capabilities BPF, NET_ADMIN and PERFMON, and the process lacks %s", strings.Join(missing, " and "))
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
// one step. Then attach pins new maps, so that the pinned maps are always those of attached
// programs.
func (p *programs) attach(o *Options, cgroup string) error {
	id, err := cgroupID(cgroup)
	if err != nil {
		return err
	}
	if err := p.restoreDirectory(o.directory()); err != nil {
		return err
	}
	if err := p.beat(); err != nil {
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
	return errors.Join(p.pin(o.directory()), removeUnknown(o))
}

// removeUnknown detaches the programs at hooks that only another version of kpng uses, and
// deletes its maps.
func removeUnknown(o *Options) error {
	files, err := os.ReadDir(o.directory())
	if err != nil {
		return err
	}
	var errs []error
	for _, file := range files {
		known := slices.ContainsFunc(new(programs).hooks(), func(h hook) bool { return h.name == file.Name() })
		if _, isMap := new(programs).maps()[file.Name()]; known || isMap {
			continue
		}
		path := filepath.Join(o.directory(), file.Name())
		if l, err := link.LoadPinnedLink(path, nil); err == nil {
			errs = append(errs, ignoreUnattached(l.Detach()), l.Close())
		}
		errs = append(errs, os.Remove(path))
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

// attached reports whether all programs are attached to the cgroup, and all links and maps
// are pinned. They stay when this process ends.
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
	for name := range p.maps() {
		if _, err := os.Stat(filepath.Join(o.directory(), name)); err != nil {
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
