// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// maxCgroupLevels is CGROUP_LEVELS in connect.c, and maxExcluded is the size of the map
// "excluded".
const maxCgroupLevels, maxExcluded = 16, 4096

// exclusions is the state of the excluded cgroups.
type exclusions struct {
	// missing has the paths of Options.ExcludedCgroups that did not exist.
	missing map[string]bool
	// kubepods are the directories of kubelet's cgroups for pods. The backend last
	// searched for them at the time searched.
	kubepods []string
	searched time.Time
	// left is the number of excluded pods that did not fit into the map.
	left int
}

// writeExcluded writes the IDs of the excluded cgroups to the map "excluded". A cgroup
// that was deleted and created again has another ID.
func (b *backend) writeExcluded(ctx context.Context) error {
	e, log := &b.exclusions, klog.FromContext(ctx)
	wanted := map[uint64]uint32{}
	for _, path := range b.opts.ExcludedCgroups {
		id, err := cgroupID(filepath.Join(b.cgroup, path))
		if err == nil {
			wanted[id] = 0
		} else if !e.missing[path] {
			log.Info("Excluded cgroup not found; it is excluded when it exists", "cgroup", path, "reason", err.Error())
		}
		e.missing[path] = err != nil
	}
	table := kernelTable[uint64, uint32]{"excluded", b.programs.Excluded}
	// The map has no room for more.
	exclude := func(id uint64) (ok bool) {
		if _, ok = wanted[id]; !ok && len(wanted) < maxExcluded {
			wanted[id], ok = 0, true
		}
		return ok
	}
	if b.opts.ExcludedPods != nil {
		pods, known := b.opts.ExcludedPods()
		if !known {
			if err := table.each(ctx, func(id uint64, _ uint32) { exclude(id) }); err != nil {
				return err
			}
		}
		left := 0
		for _, dir := range e.podCgroups(log, b.cgroup, pods) {
			if id, err := cgroupID(dir); err == nil && !exclude(id) { // a missing cgroup means an ended pod
				left++
			}
		}
		if left > 0 && e.left == 0 {
			log.Info("Too many excluded cgroups; eBPF handles some excluded pods", "pods", left, "maximum", maxExcluded)
		}
		e.left = left
	}
	return table.replace(ctx, wanted)
}

// While pods have no cgroup, the backend searches for kubelet's cgroups this often.
const searchPause = 10 * time.Second

// podCgroups returns the directories of the pods' cgroups below root, by UID.
func (e *exclusions) podCgroups(log klog.Logger, root string, pods []types.UID) map[types.UID]string {
	if len(pods) == 0 {
		return nil
	}
	found := findPods(e.kubepods, pods)
	if len(found) < len(pods) && (len(e.kubepods) == 0 || time.Since(e.searched) >= searchPause) {
		if e.kubepods = findKubepods(root); len(e.kubepods) == 0 && e.searched.IsZero() {
			log.Info("No cgroups of pods found; pods are excluded when their cgroups exist", "below", root)
		}
		e.searched = time.Now()
		found = findPods(e.kubepods, pods)
	}
	return found
}

// maxKubepodsLevel limits the search for kubelet's cgroups. The flag --cgroup-root of kubelet
// defines how many cgroups are above them.
const maxKubepodsLevel = 4

// findKubepods returns the directories of kubelet's cgroups for pods below root. With the
// driver cgroupfs, their name is "kubepods". With the driver systemd, it is for example
// "kubepods.slice" or "kubelet-kubepods.slice". findKubepods does not search cgroups of
// pods.
func findKubepods(root string) []string {
	var dirs []string
	top := strings.Count(filepath.Clean(root), "/")
	_ = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil
		}
		switch name := d.Name(); {
		case name == "kubepods" || name == "kubepods.slice" || strings.HasSuffix(name, "-kubepods.slice"):
			dirs = append(dirs, path)
			return fs.SkipDir
		case strings.Count(path, "/")-top == maxKubepodsLevel:
			return fs.SkipDir
		}
		return nil
	})
	return dirs
}

// podCgroup matches the name of a pod's cgroup. With the driver cgroupfs, the name is "pod"
// and the UID. With the driver systemd, it is for example "kubepods-burstable-pod" and the
// UID, in which "_" replaces "-". A static pod may have a UID without "-".
var podCgroup = regexp.MustCompile(`^(?:.*?-)?pod([0-9A-Za-z_-]+?)(?:\.slice)?$`)

// findPods returns the directories of the pods' cgroups, by UID. A pod's cgroup is directly
// in a directory of kubepods, or in a subdirectory for a quality-of-service class.
func findPods(kubepods []string, pods []types.UID) map[types.UID]string {
	found, wanted := map[types.UID]string{}, make(map[string]types.UID, len(pods))
	for _, uid := range pods {
		wanted[strings.ReplaceAll(string(uid), "-", "_")] = uid
	}
	var search func(dir string, classes bool)
	search = func(dir string, classes bool) {
		entries, _ := os.ReadDir(dir) // a missing directory has no pods
		for _, e := range entries {
			if !e.IsDir() {
				continue
			}
			path := filepath.Join(dir, e.Name())
			if name := podCgroup.FindStringSubmatch(e.Name()); name == nil {
				if classes {
					search(path, false)
				}
			} else if uid, ok := wanted[strings.ReplaceAll(name[1], "-", "_")]; ok {
				found[uid] = path
			}
		}
	}
	for _, dir := range kubepods {
		search(dir, true)
	}
	return found
}
