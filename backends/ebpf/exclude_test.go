// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

func TestCgroupsOfPods(t *testing.T) {
	const uid, static = "11111111-2222-3333-4444-555555555555", "5a105e8b9d40e1329780d62ea2265d8a"
	underlined := strings.ReplaceAll(uid, "-", "_")
	for name, test := range map[string]struct {
		dirs []string
		want map[types.UID]string
	}{
		"cgroupfs, guaranteed": {
			[]string{"kubepods/pod" + uid + "/container", "kubepods/besteffort"},
			map[types.UID]string{uid: "kubepods/pod" + uid},
		},
		"cgroupfs, classes": {
			[]string{"kubepods/burstable/pod" + uid, "kubepods/besteffort/pod" + static},
			map[types.UID]string{uid: "kubepods/burstable/pod" + uid, static: "kubepods/besteffort/pod" + static},
		},
		"systemd, guaranteed": {
			[]string{"kubepods.slice/kubepods-pod" + underlined + ".slice/cri-1.scope"},
			map[types.UID]string{uid: "kubepods.slice/kubepods-pod" + underlined + ".slice"},
		},
		"systemd, classes": {
			[]string{
				"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + underlined + ".slice",
				"kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod" + static + ".slice",
			},
			map[types.UID]string{
				uid:    "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + underlined + ".slice",
				static: "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod" + static + ".slice",
			},
		},
		"kubelet has a cgroup root of its own, as in kind": {
			[]string{
				"kubelet/kubepods/burstable/pod" + static,
				"kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod" + underlined + ".slice",
			},
			map[types.UID]string{
				static: "kubelet/kubepods/burstable/pod" + static,
				uid:    "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod" + underlined + ".slice",
			},
		},
		"a node in a container": {
			[]string{"docker/0123456789ab/kubelet/kubepods/pod" + uid},
			map[types.UID]string{uid: "docker/0123456789ab/kubelet/kubepods/pod" + uid},
		},
		"other pods, and names that only look like one": {
			[]string{
				"kubepods/pod99999999-2222-3333-4444-555555555555", "kubepods/pod" + uid + ".scope", "kubepods/burstable/xpod" + uid,
				"kubepods/pod/" + uid, "user.slice/pod" + uid, "mykubepods/pod" + uid, "a/b/c/d/kubepods/pod" + uid,
			},
			map[types.UID]string{},
		},
		"a pod that imitates another one in its own cgroup": {
			[]string{
				"kubepods/pod99999999-2222-3333-4444-555555555555/kubepods/pod" + uid,
				"kubepods/burstable/pod99999999-2222-3333-4444-555555555555/pod" + uid,
			},
			map[types.UID]string{},
		},
		"no cgroups of pods": {nil, map[types.UID]string{}},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for _, dir := range test.dirs {
				if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			got := map[types.UID]string{}
			for id, dir := range new(exclusions).podCgroups(klog.Background(), root, []types.UID{uid, static, "../..", ""}) {
				got[id], _ = filepath.Rel(root, dir)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("cgroups (-want +got):\n%s", diff)
			}
		})
	}
}

func TestCgroupsOfPodsAreFoundLater(t *testing.T) {
	root := t.TempDir()
	e := new(exclusions)
	find := func() int { return len(e.podCgroups(klog.Background(), root, []types.UID{"1", "2"})) }
	add := func(dir string) {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if n := find(); n != 0 {
		t.Fatalf("%d pods in no cgroup", n)
	}
	add("kubepods/pod1")
	if n := find(); n != 1 {
		t.Errorf("%d pods after the start of kubelet, want 1", n)
	}
	add("kubepods.slice/kubepods-pod2.slice") // as if kubelet started with another driver
	e.searched = e.searched.Add(-searchPause)
	if n := find(); n != 2 {
		t.Errorf("%d pods after a change of the driver, want 2", n)
	}
}
