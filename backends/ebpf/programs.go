// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"cmp"
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
	// netNS is the network namespace in which the backend started.
	netNS *os.File
	// sweepsUDP is true if the backend can destroy UDP sockets in netNS.
	sweepsUDP bool
	// lock is the directory of the instance, which the process has opened and locked.
	lock *os.File
}

// hook is a hook of the cgroup. Its pinned link has the hook's name.
type hook struct {
	name    string
	attach  ebpf.AttachType
	program *ebpf.Program
}

// translatingHooks is the number of hooks that replace addresses. They come first.
const translatingHooks = 8

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
		{"sock_release", ebpf.AttachCgroupInetSockRelease, p.SockRelease},
		{"bind4", ebpf.AttachCGroupInet4Bind, p.Bind4},
		{"bind6", ebpf.AttachCGroupInet6Bind, p.Bind6},
	}
}

// netNSFD returns the file descriptor of the network namespace in which the backend
// started, or 0 if the backend is not started.
func (p *programs) netNSFD() int {
	if p == nil {
		return 0
	}
	return int(p.netNS.Fd())
}

// load opens or makes the maps, and loads the programs. It needs CAP_BPF, CAP_NET_ADMIN
// and CAP_PERFMON.
func load(ctx context.Context, o *Options) (_ *programs, err error) {
	if err := checkKernel(); err != nil {
		return nil, err
	}
	spec, err := loadConnect()
	if err != nil {
		return nil, err
	}
	if err := setVariables(spec, o); err != nil {
		return nil, err
	}
	log := klog.FromContext(ctx)
	cookie, unable := sweptNetNS()
	if unable != nil {
		log.Info("Connected UDP sockets are handled without eBPF", "reason", unable)
	} else if !o.TCPOnly {
		if err := spec.Variables["connected_udp_netns"].Set(cookie); err != nil {
			return nil, err
		}
	}
	p := &programs{sweepsUDP: unable == nil}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	if p.netNS, err = os.Open("/proc/thread-self/ns/net"); err != nil {
		return nil, err
	}
	dir := o.directory()
	if p.lock, err = lockDirectory(dir); err != nil {
		return nil, err
	}
	pinned := openMaps(dir)
	defer closeMaps(pinned)
	adopted, resized, foreign := sortMaps(pinned, mapSpecs(spec, o))
	if len(foreign) > 0 && len(pinned) > 0 {
		log.Info("Replacing eBPF maps of another version; all connections are handled without eBPF until all services are known", "maps", foreign)
	}
	err = spec.LoadAndAssign(&p.connectObjects, &ebpf.CollectionOptions{MapReplacements: adopted})
	if err != nil && len(adopted) > 0 {
		log.Error(err, "Replacing all eBPF maps, because the programs cannot use those of the process before")
		resized = nil
		err = spec.LoadAndAssign(&p.connectObjects, nil)
	}
	if err != nil {
		return nil, fmt.Errorf("load eBPF programs: %w", err)
	}
	for _, name := range resized {
		n, err := copyMap[name](pinned[name].Map, p.maps()[name])
		log.Info("Copied an eBPF map to one of another size", "map", name, "elements", n)
		if err != nil {
			log.Info("Some elements of the eBPF map were not copied", "map", name, "reason", err)
		}
	}
	return p, nil
}

// setVariables sets the variables of the programs. Without a cookie of the network namespace,
// the programs leave node ports at loopback addresses.
func setVariables(spec *ebpf.CollectionSpec, o *Options) error {
	netNS, err := netNSCookie()
	if err != nil && o.HostNetworkOnly {
		return err
	}
	number := map[bool]uint64{true: 1}
	canRefuse := netNS != 0 && features.HaveProgramHelper(ebpf.CGroupSockAddr, asm.FnSetRetval) == nil
	var errs []error
	for name, value := range map[string]uint64{
		"node_netns":        netNS,
		"node_only":         number[o.HostNetworkOnly],
		"refuse_binds":      number[canRefuse],
		"max_clients_of_ip": uint64(share(o.MaxClients)),
		"count_connections": number[o.Stats],
		"has_exclusions":    number[len(o.ExcludedCgroups) > 0 || o.ExcludedPods != nil],
	} {
		errs = append(errs, spec.Variables[name].Set(value))
	}
	return errors.Join(errs...)
}

// layouts has the version of each map's layout, except for maps with version 1. A change of
// the meaning or the size of keys and values must increase the version. The kernel's name
// of a map ends with the version.
var layouts = map[string]int{"counters": 3, "udp_peers": 2, "slots": 2}

// mapSpecs sets the names and sizes of the maps, and returns the maps that are pinned.
func mapSpecs(spec *ebpf.CollectionSpec, o *Options) map[string]*ebpf.MapSpec {
	all := maps.Clone(spec.Maps)
	maps.DeleteFunc(all, func(name string, _ *ebpf.MapSpec) bool { return strings.HasPrefix(name, ".") }) // such as .rodata
	for name, m := range all {
		m.Name = fmt.Sprintf("%s_v%d", name, cmp.Or(layouts[name], 1))
		if size, ok := o.sizes()[name]; ok {
			m.MaxEntries = uint32(size)
		}
	}
	delete(all, "client_counts")
	delete(all, "connections")
	return all
}

// maps returns the maps that are pinned.
func (p *programs) maps() map[string]*ebpf.Map {
	return map[string]*ebpf.Map{
		"frontends": p.Frontends, "slots": p.Slots, "members": p.Members, "clients": p.Clients,
		"tcp_peers": p.TcpPeers, "udp_peers": p.UdpPeers, "udp_conns": p.UdpConns, "node_ips": p.NodeIps, "excluded": p.Excluded, "heartbeat": p.Heartbeat, "counters": p.Counters,
	}
}

// pinnedMap is a map of an earlier process, or of another program.
type pinnedMap struct {
	*ebpf.Map
	info *ebpf.MapInfo
}

// openMaps opens the pinned maps. It omits files that are not maps, and maps that this
// process cannot change.
func openMaps(dir string) map[string]*pinnedMap {
	all := map[string]*pinnedMap{}
	for name := range new(programs).maps() {
		m, err := ebpf.LoadPinnedMap(filepath.Join(dir, name), nil)
		if err != nil {
			continue
		}
		if info, err := m.Info(); err != nil || info.Frozen() {
			m.Close()
		} else {
			all[name] = &pinnedMap{m, info}
		}
	}
	return all
}

func closeMaps(all map[string]*pinnedMap) {
	for _, m := range all {
		m.Close()
	}
}

// sortMaps compares the maps that this version needs with the pinned maps of the same
// names. The process uses the pinned maps of the result adopted. For the maps of resized,
// it makes larger or smaller maps with the same elements. For the maps of foreign, it
// makes empty maps, because the pinned map is missing or has another layout.
//
// If a map is foreign, the map "heartbeat" is foreign, too. Then the programs leave all
// connections to the other sink until the first pass has ended. Otherwise, while programs
// of both versions are attached, a program of one version would not find the records of
// the other version.
func sortMaps(pinned map[string]*pinnedMap, specs map[string]*ebpf.MapSpec) (adopted map[string]*ebpf.Map, resized, foreign []string) {
	adopted = map[string]*ebpf.Map{}
	for name, spec := range specs {
		old := pinned[name]
		if old == nil || old.info.Name != spec.Name {
			foreign = append(foreign, name)
			continue
		}
		ofOldSize := spec.Copy()
		ofOldSize.MaxEntries = old.MaxEntries()
		switch {
		case spec.Compatible(old.Map) == nil:
			adopted[name] = old.Map
		case copyMap[name] != nil && ofOldSize.Compatible(old.Map) == nil:
			resized = append(resized, name)
		default:
			foreign = append(foreign, name)
		}
	}
	if len(foreign) > 0 {
		delete(adopted, "heartbeat")
	}
	slices.Sort(foreign)
	return adopted, resized, foreign
}

// copyMap has a function for each map whose size is an option. It copies elements until the
// new map is full, and returns their number. Copying is best effort: programs and other
// processes may change the old map meanwhile, and the first pass writes missing elements.
var copyMap = map[string]func(from, to *ebpf.Map) (int, error){
	"frontends": copyElements[frontendKey, list],
	"slots":     copyElements[slotKey, address],
	"members":   copyElements[memberKey, uint32],
	"clients":   copyElements[clientKey, choice],
	"tcp_peers": copyElements[uint64, peer],
	"udp_conns": copyElements[uint64, peer],
}

func copyElements[K, V comparable](from, to *ebpf.Map) (int, error) {
	var all batch[K, V]
	readErr := kernelTable[K, V]{"of the process before", from}.each(context.Background(), all.add)
	n, err := kernelTable[K, V]{"of this process", to}.set(all.keys, all.values)
	return n, errors.Join(readErr, err)
}

// beatPacket is the packet with which the kernel runs the program "beat". It is the
// shortest Ethernet frame. Kernels with commit fd18942 (Linux 6.1 and patches of older
// versions), but without commit 114039b, refuse a packet that has only a header of 14
// bytes.
var beatPacket = make([]byte, 60)

// beat lets the programs translate connections for as long as patience says.
func (p *programs) beat() error {
	if _, err := p.Beat.Run(&ebpf.RunOptions{Data: beatPacket}); err != nil {
		return fmt.Errorf("write to map heartbeat: %w", err)
	}
	return nil
}

// time returns the time of the last beat, by the clock of the kernel.
func (p *programs) time() (now uint64) {
	if err := p.Heartbeat.Lookup(uint32(0), &now); err != nil {
		return 0
	}
	return now
}

// pause makes the programs leave all connections to the other sink until the next beat.
func (p *programs) pause() error {
	if err := p.Heartbeat.Put(uint32(0), uint64(0)); err != nil {
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

// restoreDirectory makes and locks the directory of maps and links again if another
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

// pin pins the maps that are not pinned yet. It replaces other files with the same names.
func (p *programs) pin(dir string) error {
	pinned := openMaps(dir)
	defer closeMaps(pinned)
	for name, m := range p.maps() {
		path := filepath.Join(dir, name)
		if old := pinned[name]; old != nil {
			if same, err := sameMap(old.Map, m); err != nil {
				return err
			} else if same {
				continue
			}
		}
		if err := discard(path); err != nil {
			return err
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

// checkKernel returns an error that names the missing features of the kernel, or the
// missing capabilities of the process.
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

// attach attaches the programs to the cgroup. An existing link gets the new program in one
// step. Then attach pins new maps, so that attached programs always use the pinned maps.
func (p *programs) attach(o *Options, cgroup string) error {
	id, err := cgroupID(cgroup)
	if err != nil {
		return err
	}
	if err := p.restoreDirectory(o.directory()); err != nil {
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
		errs = append(errs, discard(filepath.Join(o.directory(), file.Name())))
	}
	return errors.Join(errs...)
}

// discard deletes a file of the directory, of any kind. If it is a link, discard detaches
// its program.
func discard(path string) error {
	if l, err := link.LoadPinnedLink(path, nil); err == nil {
		l.Detach() // an error does no harm: the kernel detaches links without a file
		l.Close()
	}
	return os.RemoveAll(path)
}

func attach(path, cgroup string, id uint64, h hook) (link.Link, error) {
	l, err := link.LoadPinnedLink(path, nil)
	if err == nil {
		if attachedTo(l) == (place{id, h.attach}) && l.Update(h.program) == nil {
			return l, nil
		}
		l.Close()
	}
	// The cgroup was deleted, the options have changed, or another program made the file.
	if err := discard(path); err != nil {
		return nil, err
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
		if _, err := os.Stat(filepath.Join(o.directory(), h.name)); err != nil || attachedTo(p.links[i]) != (place{id, h.attach}) {
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

// place is where a link is attached: the ID of a cgroup, and a hook.
type place struct {
	cgroup uint64
	hook   ebpf.AttachType
}

// attachedTo returns the place of a link, or no place if the link is not attached.
func attachedTo(l link.Link) place {
	info, err := l.Info()
	if err != nil || info.Cgroup() == nil {
		return place{}
	}
	return place{info.Cgroup().CgroupId, ebpf.AttachType(info.Cgroup().AttachType)}
}

// close closes the descriptors. The pinned maps and links stay.
func (p *programs) close() error {
	errs := []error{p.connectObjects.Close(), p.closeLinks()}
	for _, f := range []*os.File{p.netNS, p.lock} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

func (p *programs) closeLinks() (err error) {
	for _, l := range p.links {
		err = errors.Join(err, l.Close())
	}
	p.links = nil
	return err
}

// remove detaches the programs and deletes the maps, if the instance exists. Then it destroys
// the UDP sockets in the network namespace that the programs have connected to endpoints.
func remove(o *Options, netNS int) error {
	files, err := os.ReadDir(o.directory())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	connections, noMap := ebpf.LoadPinnedMap(filepath.Join(o.directory(), "udp_conns"), nil)
	for _, file := range files {
		errs = append(errs, discard(filepath.Join(o.directory(), file.Name())))
	}
	if noMap == nil {
		errs = append(errs, destroyAll(netNS, connections), connections.Close())
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("detach eBPF programs: %w", err)
	}
	return os.Remove(o.directory())
}
