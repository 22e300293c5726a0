// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/manifest"
	"k8s.io/klog/v2"
)

func TestWrittenFileIsReadBack(t *testing.T) {
	for _, test := range []struct {
		name         string
		write, print []string // flags of two commands: the first writes the file, the second prints it
	}{
		{"without a proxy name", nil, nil},
		{"the services of a proxy name", []string{"--service-proxy-name=kpng-example"}, []string{"--service-proxy-name=kpng-example"}},
		{"all-ports services", []string{"--all-ports"}, []string{"--all-ports-annotation=" + manifest.DefaultAllPortsAnnotation}},
	} {
		t.Run(test.name, func(t *testing.T) {
			fromFile := append([]string{"file", "-i", demo}, test.write...)
			toJSON := []string{"to-local", "json", "--node-name=vm-002", "--once"}
			want := mustExecute(t, joinArgs(fromFile, toJSON...)...)
			served := serve(t, fromFile...)
			for name, source := range map[string][]string{
				"file.yaml": fromFile,
				"file.json": fromFile,
				"api.yml":   {"api", "--api", served},
			} {
				path := filepath.Join(t.TempDir(), name)
				marks := []string{}
				if source[0] == "api" && strings.Contains(strings.Join(test.write, ""), "proxy-name") {
					marks = test.write
				}
				mustExecute(t, append(joinArgs(source, "to-file", path, "--once"), marks...)...)
				if got := mustExecute(t, joinArgs(append([]string{"file", "-i", path}, test.print...), toJSON...)...); got != want {
					t.Errorf("%s: read\n%s\nwant\n%s", name, got, want)
				}
			}
		})
	}
}

func TestStandardOutputIsWrittenOnce(t *testing.T) {
	if got := mustExecute(t, "file", "-i", demo, "to-file", "-"); strings.Count(got, "kind: Service\n") != 1 {
		t.Errorf("want one service in\n%s", got)
	}
}

// read returns the content of the file. It expects no other file in the same folder.
func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(entries) != 1 {
		t.Errorf("the folder has %v, error %v; want only the file", entries, err)
	}
	return string(text)
}

func TestFileFollowsStateAtAnInterval(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.yaml")
	synctest.Test(t, func(t *testing.T) {
		state := cluster.New(cluster.Options{})
		set := func(name string) {
			state.Update(func(tx *cluster.Tx) { tx.SetNode(&api.Node{Name: name}) })
		}
		w, err := newFileWriter(path, manifest.WriteOptions{})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- w.follow(ctx, state, time.Minute) }()
		set("one")
		synctest.Wait()
		if _, err := os.Stat(path); err == nil {
			t.Error("written before the state has synced")
		}
		state.SetSynced()
		synctest.Wait()
		if got := read(t, path); !strings.Contains(got, "name: one") {
			t.Errorf("first content:\n%s", got)
		}
		set("two")
		time.Sleep(59 * time.Second)
		set("three")
		synctest.Wait()
		if got := read(t, path); strings.Contains(got, "two") {
			t.Errorf("written before the end of the interval:\n%s", got)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if got := read(t, path); !strings.Contains(got, "two") || !strings.Contains(got, "three") {
			t.Errorf("content after the interval:\n%s", got)
		}

		// If a service cannot be written, the file does not change.
		state.Update(func(tx *cluster.Tx) { tx.SetService(&api.Service{Name: "odd", Type: "Odd"}) })
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if got := read(t, path); !strings.Contains(got, "three") {
			t.Errorf("content after a failure:\n%s", got)
		}
		set("four")
		state.Update(func(tx *cluster.Tx) { tx.DeleteService((&api.Service{Name: "odd"}).Key()) })
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if got := read(t, path); !strings.Contains(got, "four") {
			t.Errorf("content after recovery:\n%s", got)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestWriteFailureIsLoggedOnce(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "folder")
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		state := cluster.New(cluster.Options{})
		state.SetSynced()
		w, err := newFileWriter(filepath.Join(folder, "state.yaml"), manifest.WriteOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var logged []string
		log := funcr.New(func(_, line string) { logged = append(logged, line) }, funcr.Options{})
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), log))
		ended := make(chan error, 1)
		go func() { ended <- w.follow(ctx, state, time.Second) }()
		synctest.Wait()
		if err := os.RemoveAll(folder); err != nil {
			t.Fatal(err)
		}
		state.Update(func(tx *cluster.Tx) { tx.SetNode(&api.Node{Name: "one"}) })
		time.Sleep(time.Minute)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if len(logged) != 1 || !strings.Contains(logged[0], w.path) {
			t.Errorf("logged %q, want one line that names %s", logged, w.path)
		}
	})
}

func TestFirstFailedWriteEndsProgram(t *testing.T) {
	for _, args := range [][]string{
		{"file", "-i", demo, "to-file", "/does/not/exist.yaml"},
		{"file", "-i", demo, "to-file", "/does/not/exist.yaml", "--once"},
		{"file", "-i", "/does/not/exist.yaml", "to-file", "-"},
	} {
		if _, err := execute(t.Context(), args...); err == nil || !strings.Contains(err.Error(), "/does/not") {
			t.Errorf("kpng %q: error %v does not name the file", args, err)
		}
	}
}
