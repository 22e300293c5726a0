// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"errors"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/kpng-project/kpng/internal/netnstest"
	"golang.org/x/sys/unix"
)

// specs returns the specifications of the maps.
func (n *node) specs() map[string]*ebpf.MapSpec {
	n.t.Helper()
	spec, err := loadConnect()
	if err != nil {
		n.t.Fatal(err)
	}
	return mapSpecs(spec, &n.backend.opts.public)
}

// repin replaces a file of the directory by a map.
func (n *node) repin(name string, m *ebpf.Map) {
	n.t.Helper()
	path := filepath.Join(n.opts.directory(), name)
	c, err := m.Clone()
	if err != nil {
		n.t.Fatal(err)
	}
	defer c.Close()
	if err := errors.Join(os.RemoveAll(path), c.Pin(path)); err != nil {
		n.t.Fatal(err)
	}
}

// testForeignFiles replaces pinned maps and links by other files. Another version of
// kpng, or another program, could have made these files.
func testForeignFiles(t *testing.T) {
	n := newNode(t, Options{MaxFrontends: 100, MaxEndpoints: 100, MaxMembers: 100, MaxClients: 100})
	n.serveAt(endpoints[0])
	n.serveAt(endpoints[1])
	web := view("web", []string{"10.96.0.1"}, endpoints[:2], nil)
	withMap := func(edit func(*ebpf.MapSpec)) func(string) {
		return func(file string) {
			m := &ebpf.MapSpec{Name: "foreign", Type: ebpf.Hash, KeySize: 4, ValueSize: 8, MaxEntries: 5}
			if spec := n.specs()[file]; spec != nil {
				m = spec.Copy()
				edit(m)
			}
			other, err := ebpf.NewMap(m)
			if err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			defer other.Close()
			if m.Type == ebpf.Hash && m.Flags&unix.BPF_F_RDONLY == 0 {
				if err := other.Put(make([]byte, m.KeySize), make([]byte, m.ValueSize)); err != nil {
					t.Fatal(err)
				}
			}
			n.repin(file, other)
		}
	}
	untyped := func(m *ebpf.MapSpec) { m.Key, m.Value = nil, nil }
	storage := func(m *ebpf.MapSpec) bool { return m.Type == ebpf.SkStorage }
	otherValue := withMap(func(m *ebpf.MapSpec) {
		if storage(m) {
			return // a value with a spin lock must keep its type
		}
		untyped(m)
		m.ValueSize += 8
	})
	names := slices.Sorted(maps.Keys(n.specs()))
	type edit struct {
		name    string
		files   []string
		replace func(file string)
	}
	edits := []edit{
		{"maps with another name", names, withMap(func(m *ebpf.MapSpec) { m.Name += "0" })},
		{"hash maps", names, withMap(func(m *ebpf.MapSpec) {
			untyped(m)
			m.Type, m.KeySize, m.MaxEntries, m.Flags = ebpf.Hash, max(m.KeySize, 1), max(m.MaxEntries, 1), unix.BPF_F_NO_PREALLOC
		})},
		{"maps with another key", []string{"frontends", "slots", "members", "clients", "tcp_peers"}, withMap(func(m *ebpf.MapSpec) { untyped(m); m.KeySize += 4 })},
		{"maps with more elements", names, withMap(func(m *ebpf.MapSpec) {
			if !storage(m) {
				m.MaxEntries++
			}
		})},
		{"maps with fewer elements", names, withMap(func(m *ebpf.MapSpec) {
			if m.MaxEntries > 1 {
				m.MaxEntries--
			}
		})},
		{"maps that only programs may write", []string{"frontends", "heartbeat"}, withMap(func(m *ebpf.MapSpec) { m.Flags |= unix.BPF_F_RDONLY })},
		{"frozen maps", []string{"frontends", "slots", "heartbeat"}, func(file string) {
			withMap(func(*ebpf.MapSpec) {})(file)
			m, err := ebpf.LoadPinnedMap(filepath.Join(n.opts.directory(), file), nil)
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			if err := m.Freeze(); err != nil {
				t.Fatal(err)
			}
		}},
		{"socket storage without a spin lock", []string{"udp_peers"}, withMap(func(m *ebpf.MapSpec) {
			m.Value = &btf.Array{Index: &btf.Int{Size: 4}, Type: &btf.Int{Size: 8}, Nelems: m.ValueSize / 8}
		})},
		{"directories", append([]string{"connect4", "recvmsg6", "other"}, names...), func(file string) {
			path := filepath.Join(n.opts.directory(), file)
			if err := errors.Join(os.RemoveAll(path), os.Mkdir(path, 0o700), os.Mkdir(filepath.Join(path, "sub"), 0o700)); err != nil {
				t.Fatal(err)
			}
		}},
		{"nothing", append([]string{"connect4", "sendmsg6"}, names...), func(file string) {
			if err := os.Remove(filepath.Join(n.opts.directory(), file)); err != nil {
				t.Fatal(err)
			}
		}},
		{"maps in place of links, and another map", []string{"connect4", "getpeername6", "other"}, withMap(nil)},
		{"links in place of other links and of maps", []string{"connect4", "slots", "heartbeat"}, func(file string) {
			path := filepath.Join(n.opts.directory(), file)
			if err := errors.Join(os.RemoveAll(path), os.Rename(filepath.Join(n.opts.directory(), map[string]string{"connect4": "connect6", "slots": "sendmsg4", "heartbeat": "sendmsg6"}[file]), path)); err != nil {
				t.Fatal(err)
			}
		}},
	}
	for _, name := range names {
		edits = append(edits, edit{"a map with another value: " + name, []string{name}, otherValue})
	}
	for _, edit := range edits {
		n.pass(web)
		if err := n.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		for _, file := range edit.files {
			edit.replace(file)
		}
		if err := n.tryStart(); err != nil {
			t.Fatalf("%s: %v", edit.name, err)
		}
		if endpoint, _, err := n.dial(n.ns.Do, "10.96.0.1:80"); err == nil && !slices.Contains(endpoints[:2], endpoint) {
			t.Errorf("%s: before the first pass, the service leads to %s", edit.name, endpoint)
		}
		n.pass(web)
		n.mustReachOnceEach("10.96.0.1:80", endpoints[:2])
		n.socket().ask("10.96.0.1:80")
		if err := n.verify(); err != nil {
			t.Errorf("%s: %v", edit.name, err)
		}
	}
}

// mustReachOnceEach makes connections until each endpoint was reached.
func (n *node) mustReachOnceEach(to string, want []string) {
	n.t.Helper()
	seen := map[string]bool{}
	for range 100 {
		seen[n.reaches(to, 1)[0]] = true
		if len(seen) == len(want) {
			break
		}
	}
	for _, endpoint := range want {
		if !seen[endpoint] || len(seen) != len(want) {
			n.t.Errorf("%s leads to %v, want %v", to, seen, want)
		}
	}
}

// testNewSizeUnderLoad changes MaxClients while sockets write to the maps.
func testNewSizeUnderLoad(t *testing.T) {
	n := newNode(t, Options{MaxClients: 1024})
	n.serveAt(endpoints[0])
	web := view("web", []string{"10.96.0.1"}, endpoints[:1], withAffinity(10))
	n.pass(web)
	var hot [2]*ebpf.Map
	for i, m := range []*ebpf.Map{n.programs.TcpPeers, n.programs.Clients} {
		c, err := m.Clone()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		hot[i] = c
	}
	stop := make(chan struct{})
	var writers sync.WaitGroup
	defer writers.Wait()
	defer close(stop)
	for _, m := range hot {
		writers.Go(func() {
			key, value := make([]byte, m.KeySize()), make([]byte, m.ValueSize())
			for i := uint64(0); ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				for at := range 8 {
					key[at] = byte(i >> (8 * at))
				}
				m.Put(key, value)
			}
		})
	}
	for i := range 6 {
		if err := n.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		n.repin("tcp_peers", hot[0])
		n.repin("clients", hot[1])
		n.opts.MaxClients = 1000 + 20*i
		n.restart()
		n.mustReachOnce("10.96.0.1:80", endpoints[0])
	}
	n.pass(web)
	n.mustReachOnce("10.96.0.1:80", endpoints[0])
}

// testInterruptedStart imitates a process of another version that was killed after it had
// attached some of its programs.
func testInterruptedStart(t *testing.T) {
	n := newNode(t, Options{})
	n.useNFTables()
	n.echo(1)
	netnstest.Listen(t, n.ns.Do, endpointAddr(1), func(c net.Conn) { c.Write([]byte("10.0.1.1")) })
	web := service(1, 1)
	n.pass(web)
	for attached := range len(n.programs.hooks()) {
		if err := n.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		other, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: 8, MaxEntries: 1})
		if err != nil {
			t.Fatal(err)
		}
		n.repin([]string{"udp_peers", "frontends"}[attached%2], other)
		other.Close()
		p, err := load(t.Context(), &n.backend.opts.public)
		if err != nil {
			t.Fatal(err)
		}
		id, err := cgroupID(n.opts.Cgroup)
		if err != nil {
			t.Fatal(err)
		}
		for _, h := range p.hooks()[:attached] {
			l, err := attach(filepath.Join(n.opts.directory(), h.name), n.opts.Cgroup, id, h)
			if err != nil {
				t.Fatal(err)
			}
			p.links = append(p.links, l)
		}
		if err := p.close(); err != nil {
			t.Fatal(err)
		}
		mustWork := func() {
			t.Helper()
			n.mustReachOnce(serviceAddr(1), "10.0.1.1")
			s := n.socket()
			s.mustSend(serviceAddr(1), serviceAddr(1))
			s.mustReceive(2)
		}
		mustWork()
		n.restart()
		mustWork()
		n.pass(web)
		mustWork()
	}
}
