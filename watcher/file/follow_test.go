// SPDX-License-Identifier: Apache-2.0

package file

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"go.uber.org/goleak"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience limits each wait.
const patience = 20 * time.Second

// following contains a running follower, and its outputs that the tests observe.
type following struct {
	t      *testing.T
	ctx    context.Context
	state  *cluster.State
	loaded chan error
	log    *strings.Builder // may be read only after the follower has ended
	notify *fsnotify.Watcher
	stop   func()
}

// follow starts a follower of path, and waits until the follower has read path.
func follow(t *testing.T, path string, notify bool) *following {
	t.Helper()
	x := &following{t: t, state: cluster.New(cluster.Options{}), loaded: make(chan error, 1000), log: &strings.Builder{}}
	f := &follower{
		opts:   Options{Path: path},
		log:    textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(x.log))),
		state:  x.state,
		notify: &fsnotify.Watcher{},
		loaded: func(err error) { x.loaded <- err },
	}
	if notify {
		w, err := fsnotify.NewWatcher()
		must(t, err)
		t.Cleanup(func() { w.Close() })
		f.notify, x.notify = w, w
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	done := make(chan error, 1)
	go func() { done <- f.run(ctx) }()
	x.ctx = ctx
	x.stop = func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run returned %v", err)
		}
		done <- nil
	}
	t.Cleanup(x.stop)
	select {
	case <-x.state.Changed(0):
	case <-ctx.Done():
		t.Fatal("never synced")
	}
	return x
}

// awaitServices waits until the state has the services with these names.
func (x *following) awaitServices(want ...string) {
	x.t.Helper()
	for {
		snapshot := x.state.Snapshot()
		got := x.services()
		if slices.Equal(got, want) {
			return
		}
		select {
		case <-x.state.Changed(snapshot.Revision):
		case <-x.ctx.Done():
			x.t.Fatalf("services %v, want %v", got, want)
		}
	}
}

func (x *following) services() []string {
	var names []string
	for key := range x.state.Objects().Services.All() {
		names = append(names, key.Name)
	}
	return names
}

// awaitLoad waits for a successful reading, or for a failed reading if well is false.
func (x *following) awaitLoad(well bool) error {
	x.t.Helper()
	for {
		select {
		case err := <-x.loaded:
			if (err == nil) == well {
				return err
			}
		case <-x.ctx.Done():
			x.t.Fatalf("no reading succeeded: %v", well)
		}
	}
}

// named returns a manifest with services of these names.
func named(names ...string) string {
	var list []string
	for _, name := range names {
		list = append(list, strings.Replace(service, "name: web", "name: "+name, 1))
	}
	return strings.Join(list, "---\n")
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func put(t *testing.T, path, text string) {
	t.Helper()
	must(t, os.WriteFile(path, []byte(text), 0o644))
}

func TestChangesAreFollowed(t *testing.T) {
	for _, c := range []struct {
		name string
		// prepare creates a manifest in dir, with a service named "a", and returns the path to
		// follow.
		prepare func(t *testing.T, dir string) string
		// change replaces the service by a service with the given name.
		change func(t *testing.T, dir, name string)
	}{{
		name:    "a file written in place",
		prepare: inFile,
		change:  func(t *testing.T, dir, name string) { put(t, filepath.Join(dir, "m.yaml"), named(name)) },
	}, {
		name:    "a file replaced by a rename",
		prepare: inFile,
		change: func(t *testing.T, dir, name string) {
			put(t, filepath.Join(dir, ".m.yaml.swp"), named(name))
			must(t, os.Rename(filepath.Join(dir, ".m.yaml.swp"), filepath.Join(dir, "m.yaml")))
		},
	}, {
		name:    "a file moved away and created again",
		prepare: inFile,
		change: func(t *testing.T, dir, name string) {
			must(t, os.Rename(filepath.Join(dir, "m.yaml"), filepath.Join(dir, "before-"+name)))
			put(t, filepath.Join(dir, "m.yaml"), named(name))
		},
	}, {
		name:    "a file deleted and created again",
		prepare: inFile,
		change: func(t *testing.T, dir, name string) {
			must(t, os.Remove(filepath.Join(dir, "m.yaml")))
			put(t, filepath.Join(dir, "m.yaml"), named(name))
		},
	}, {
		name: "a file of a ConfigMap, updated by the kubelet",
		prepare: func(t *testing.T, dir string) string {
			return filepath.Join(inConfigMap(t, dir), "m.yaml")
		},
		change: swapConfigMap,
	}, {
		name:    "a folder of a ConfigMap, updated by the kubelet",
		prepare: inConfigMap,
		change:  swapConfigMap,
	}, {
		name: "the target of a symbolic link to another folder, written in place",
		prepare: func(t *testing.T, dir string) string {
			must(t, os.MkdirAll(filepath.Join(dir, "here"), 0o755))
			must(t, os.MkdirAll(filepath.Join(dir, "deep", "there"), 0o755))
			put(t, filepath.Join(dir, "deep", "there", "m.yaml"), named("a"))
			must(t, os.Symlink(filepath.Join(dir, "deep", "there", "m.yaml"), filepath.Join(dir, "here", "m.yaml")))
			return filepath.Join(dir, "here", "m.yaml")
		},
		change: func(t *testing.T, dir, name string) {
			put(t, filepath.Join(dir, "deep", "there", "m.yaml"), named(name))
		},
	}, {
		name:    "a file added to a folder and another removed",
		prepare: inFolder,
		change: func(t *testing.T, dir, name string) {
			before, err := filepath.Glob(filepath.Join(dir, "conf", "*"))
			must(t, err)
			put(t, filepath.Join(dir, "conf", name+".yaml"), named(name))
			for _, path := range before {
				must(t, os.Remove(path))
			}
		},
	}, {
		name:    "a folder replaced by another",
		prepare: inFolder,
		change: func(t *testing.T, dir, name string) {
			must(t, os.Mkdir(filepath.Join(dir, "next"), 0o755))
			put(t, filepath.Join(dir, "next", "m.yaml"), named(name))
			must(t, os.Rename(filepath.Join(dir, "conf"), filepath.Join(dir, "before-"+name)))
			must(t, os.Rename(filepath.Join(dir, "next"), filepath.Join(dir, "conf")))
		},
	}, {
		name: "the folder of a file replaced by another",
		prepare: func(t *testing.T, dir string) string {
			return filepath.Join(inFolder(t, dir), "m.yaml")
		},
		change: func(t *testing.T, dir, name string) {
			must(t, os.RemoveAll(filepath.Join(dir, "conf")))
			must(t, os.Mkdir(filepath.Join(dir, "conf"), 0o755))
			put(t, filepath.Join(dir, "conf", "m.yaml"), named(name))
		},
	}, {
		name:    "a symbolic link changed to another folder",
		prepare: inLinkedFolder,
		change: func(t *testing.T, dir, name string) {
			must(t, os.MkdirAll(filepath.Join(dir, name, "conf"), 0o755))
			put(t, filepath.Join(dir, name, "conf", "m.yaml"), named(name))
			must(t, os.Symlink(filepath.Join(dir, name, "conf"), filepath.Join(dir, "next")))
			must(t, os.Rename(filepath.Join(dir, "next"), filepath.Join(dir, "current")))
		},
	}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			x := follow(t, c.prepare(t, dir), true)
			x.awaitServices("a")
			// The follower must notice a second change of the same kind, too.
			for _, name := range []string{"b", "c"} {
				c.change(t, dir, name)
				x.awaitServices(name)
			}
		})
	}
}

func inFile(t *testing.T, dir string) string {
	put(t, filepath.Join(dir, "m.yaml"), named("a"))
	return filepath.Join(dir, "m.yaml")
}

func inFolder(t *testing.T, dir string) string {
	must(t, os.Mkdir(filepath.Join(dir, "conf"), 0o755))
	put(t, filepath.Join(dir, "conf", "m.yaml"), named("a"))
	return filepath.Join(dir, "conf")
}

func inLinkedFolder(t *testing.T, dir string) string {
	must(t, os.MkdirAll(filepath.Join(dir, "v1", "conf"), 0o755))
	put(t, filepath.Join(dir, "v1", "conf", "m.yaml"), named("a"))
	must(t, os.Symlink(filepath.Join(dir, "v1", "conf"), filepath.Join(dir, "current")))
	return filepath.Join(dir, "current")
}

// inConfigMap creates files and links as a kubelet does for a ConfigMap.
func inConfigMap(t *testing.T, dir string) string {
	conf := filepath.Join(dir, "conf")
	must(t, os.MkdirAll(filepath.Join(conf, "..2024_01"), 0o755))
	put(t, filepath.Join(conf, "..2024_01", "m.yaml"), named("a"))
	must(t, os.Symlink("..2024_01", filepath.Join(conf, "..data")))
	must(t, os.Symlink(filepath.Join("..data", "m.yaml"), filepath.Join(conf, "m.yaml")))
	return conf
}

func swapConfigMap(t *testing.T, dir, name string) {
	conf := filepath.Join(dir, "conf")
	before, err := os.Readlink(filepath.Join(conf, "..data"))
	must(t, err)
	must(t, os.Mkdir(filepath.Join(conf, "..2024_"+name), 0o755))
	put(t, filepath.Join(conf, "..2024_"+name, "m.yaml"), named(name))
	must(t, os.Symlink("..2024_"+name, filepath.Join(conf, "..data_tmp")))
	must(t, os.Rename(filepath.Join(conf, "..data_tmp"), filepath.Join(conf, "..data")))
	must(t, os.RemoveAll(filepath.Join(conf, before)))
}

func TestInvalidFileChangesNothingAndIsLoggedOnce(t *testing.T) {
	path := inFile(t, t.TempDir())
	x := follow(t, path, true)
	before := x.state.Snapshot().Revision

	put(t, path, named("b")+"oops: [")
	err := x.awaitLoad(false)
	if want := path + ": document 1 (line 1): yaml: line 10: did not find expected node content"; err.Error() != want {
		t.Errorf("error %q, want %q", err, want)
	}
	if err := x.state.SourceError(); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("source error %v", err)
	}
	put(t, path, named("b")+"oops: [")
	x.awaitLoad(false)
	if after := x.state.Snapshot().Revision; after != before {
		t.Errorf("revision went from %d to %d", before, after)
	}

	put(t, path, named("b"))
	x.awaitServices("b")
	x.awaitLoad(true) // wait until the result is in the log
	if err := x.state.SourceError(); err != nil {
		t.Errorf("source error %v of a valid file", err)
	}
	x.stop()
	if n := strings.Count(x.log.String(), "Cannot read manifests"); n != 1 {
		t.Errorf("logged %d times:\n%s", n, x.log)
	}
	if !strings.Contains(x.log.String(), "valid again") {
		t.Errorf("the recovery is not logged:\n%s", x.log)
	}
}

func TestStateIsKeptUntilManifestsReturn(t *testing.T) {
	for _, c := range []struct {
		name    string
		prepare func(*testing.T, string) string
		gone    string
	}{
		{"a file", inFile, "m.yaml"},
		{"a folder", inFolder, "conf"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			x := follow(t, c.prepare(t, dir), true)
			must(t, os.RemoveAll(filepath.Join(dir, c.gone)))
			for !errors.Is(x.awaitLoad(false), os.ErrNotExist) {
				// This reading found an empty folder, which is another error. Wait for the next
				// reading.
			}
			x.awaitServices("a")
			c.prepare(t, dir)
			x.awaitLoad(true)
			x.awaitServices("a")
		})
	}
}

func TestStateIsKeptIfFolderLosesItsManifests(t *testing.T) {
	for _, c := range []struct {
		name string
		// emptyFolder leaves an empty folder at the path conf.
		emptyFolder func(t *testing.T, x *following, conf string)
	}{{
		name: "the files are removed",
		emptyFolder: func(t *testing.T, _ *following, conf string) {
			must(t, os.Remove(filepath.Join(conf, "m.yaml")))
		},
	}, {
		name: "the folder is removed and created again without files",
		emptyFolder: func(t *testing.T, x *following, conf string) {
			must(t, os.RemoveAll(conf))
			for !errors.Is(x.awaitLoad(false), os.ErrNotExist) {
			}
			must(t, os.Mkdir(conf, 0o755))
		},
	}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			conf := inFolder(t, t.TempDir())
			x := follow(t, conf, true)
			before := x.state.Snapshot().Revision
			c.emptyFolder(t, x, conf)
			for !errors.Is(x.awaitLoad(false), errVanished) {
			}
			if after := x.state.Snapshot().Revision; after != before {
				t.Errorf("revision went from %d to %d", before, after)
			}
			put(t, filepath.Join(conf, "next.yaml"), named("b"))
			x.awaitServices("b")
			x.stop()
			if n := strings.Count(x.log.String(), "Cannot read manifests"); n != 1 {
				t.Errorf("logged %d times:\n%s", n, x.log)
			}
		})
	}
}

func TestFolderMayBeEmptyAtFirst(t *testing.T) {
	conf := t.TempDir()
	x := follow(t, conf, true)
	x.awaitServices()
	put(t, filepath.Join(conf, "m.yaml"), named("a"))
	x.awaitServices("a")
}

func TestEmptyListDeletesEverything(t *testing.T) {
	conf := inFolder(t, t.TempDir())
	x := follow(t, conf, true)
	put(t, filepath.Join(conf, "m.yaml"), "apiVersion: v1\nkind: List\nitems: []\n")
	x.awaitServices()
}

func TestWarningsAreLogged(t *testing.T) {
	dir := t.TempDir()
	put(t, filepath.Join(dir, "m.yaml"), "{apiVersion: v1, kind: Pod}\n---\n{apiVersion: v1, kind: Pod}\n---\n"+
		strings.Replace(slice, "kubernetes.io/service-name", "app", 1))
	empty := t.TempDir()
	for path, want := range map[string][]string{
		dir: {
			`"Manifests read with a warning" warning="` + dir + `/m.yaml: document 3 (line 4): EndpointSlice default/web-1: metadata.labels[kubernetes.io/service-name]: missing, so the slice belongs to no service"`,
			`"Manifests read with a warning" warning="` + dir + `/m.yaml: document 1 (line 1): v1 Pod ignored (objects: 2)"`,
		},
		empty: {`"Manifests read with a warning" warning="` + empty + `: folder has no manifests"`},
	} {
		x := follow(t, path, true)
		x.stop()
		var got []string
		for line := range strings.Lines(x.log.String()) {
			_, message, _ := strings.Cut(line, "] ")
			got = append(got, strings.TrimSpace(message))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("log (-want +got):\n%s", diff)
		}
	}
}

func TestWatchEndsWhileReading(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	state := cluster.New(cluster.Options{})
	if err := Watch(ctx, state, Options{Path: inFile(t, t.TempDir())}); err != nil {
		t.Errorf("error %v", err)
	}
	if state.IsSynced() {
		t.Error("synced before anything was read")
	}
}

func TestUnchangedManifestsChangeNothing(t *testing.T) {
	path := inFile(t, t.TempDir())
	x := follow(t, path, true)
	before := x.state.Objects()
	put(t, path, "# an additional comment\n"+named("a"))
	x.awaitLoad(true)
	if after := x.state.Snapshot(); after.Revision != before.Revision {
		t.Errorf("revision went from %d to %d", before.Revision, after.Revision)
	}
	put(t, path, named("a", "b"))
	x.awaitServices("a", "b")
	key := (&api.Service{Namespace: "default", Name: "a"}).Key()
	old, _ := before.Services.Get(key)
	now, _ := x.state.Objects().Services.Get(key)
	if old != now {
		t.Error("an unchanged service was written again")
	}
}

// polling runs test in a synctest bubble. The follower of path gets no notifications.
func polling(t *testing.T, test func(t *testing.T, path string, x *following)) {
	synctest.Test(t, func(t *testing.T) {
		path := inFile(t, t.TempDir())
		test(t, path, follow(t, path, false))
	})
}

// expectServices waits for the time d and then checks the services of the state.
func (x *following) expectServices(d time.Duration, want ...string) {
	x.t.Helper()
	time.Sleep(d)
	synctest.Wait()
	if got := x.services(); !slices.Equal(got, want) {
		x.t.Fatalf("services %v, want %v", got, want)
	}
}

func TestPollingWorksWithoutNotifications(t *testing.T) {
	polling(t, func(t *testing.T, path string, x *following) {
		put(t, path, named("b", "c"))
		x.expectServices(pollInterval+settleTime, "b", "c")
	})
}

func TestNotificationErrorIsLoggedOnce(t *testing.T) {
	path := inFile(t, t.TempDir())
	x := follow(t, path, true)
	for range 2 {
		x.notify.Errors <- errors.New("too many of them")
	}
	x.stop()
	if n := strings.Count(x.log.String(), "too many of them"); n != 1 {
		t.Errorf("the error is logged %d times:\n%s", n, x.log)
	}
}

func TestFileIsReadAfterLastWrite(t *testing.T) {
	polling(t, func(t *testing.T, path string, x *following) {
		put(t, path, named("b", "c"))
		x.expectServices(pollInterval, "a")
		put(t, path, named("b", "c", "d"))
		x.expectServices(settleTime, "a")
		x.expectServices(settleTime, "b", "c", "d")
	})
}

func TestConstantlyChangingFileIsRead(t *testing.T) {
	polling(t, func(t *testing.T, path string, x *following) {
		put(t, path, named("b", "c"))
		x.expectServices(pollInterval, "a")
		for waited := settleTime; waited < maxSettleTime; waited += settleTime {
			put(t, path, strings.Repeat("#", int(waited/settleTime))+"\n"+named("b", "c"))
			x.expectServices(settleTime, "a")
		}
		put(t, path, "# the last change\n"+named("b", "c"))
		x.expectServices(settleTime, "b", "c")
	})
}

func TestFirstReadingMustSucceed(t *testing.T) {
	state := cluster.New(cluster.Options{})
	err := Watch(t.Context(), state, Options{Path: filepath.Join(t.TempDir(), "none.yaml")})
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v", err)
	}
	if state.IsSynced() {
		t.Error("synced before anything was read")
	}
}

func TestOnceEndsAfterFirstReading(t *testing.T) {
	ctx := klog.NewContext(t.Context(), klog.Logger{})
	state := cluster.New(cluster.Options{})
	if err := Watch(ctx, state, Options{Path: inFile(t, t.TempDir()), Once: true}); err != nil {
		t.Fatal(err)
	}
	if !state.IsSynced() || state.Objects().Services.Len() != 1 {
		t.Error("nothing read")
	}
}
