// SPDX-License-Identifier: Apache-2.0

package program

import (
	"runtime"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/sysctl"
	"golang.org/x/sys/unix"
)

// onReadOnlySysctls runs f in network and mount namespaces where net.ipv4.ip_forward is 0.
// With readOnly, no process can change kernel settings there, as in an unprivileged
// container.
func onReadOnlySysctls(t *testing.T, readOnly bool, f func()) {
	t.Helper()
	netnstest.NeedRoot(t)
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		done <- func() error {
			if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS | unix.CLONE_NEWNET); err != nil {
				return err
			}
			if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
				return err
			}
			sysctl.Kernel.Apply(t.Context(), []sysctl.Setting{{Name: "net.ipv4.ip_forward"}}, true)
			if readOnly {
				if err := unix.Mount("/proc/sys", "/proc/sys", "", unix.MS_BIND, ""); err != nil {
					return err
				}
				if err := unix.Mount("", "/proc/sys", "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
					return err
				}
			}
			f()
			return nil
		}()
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestCheckSaysWhetherKpngCanSetKernelSettings(t *testing.T) {
	const sets, cannot = "kpng sets it at the start", "kpng cannot set it here: set it on the node, or use the chart's kernelSettings"
	for name, test := range map[string]struct {
		args     []string
		readOnly bool
		want     string
	}{
		"writable":              {nil, false, sets},
		"read-only":             {nil, true, cannot},
		"read-only, and report": {[]string{"--sysctls=report"}, true, sysctl.Forwarding[0].Reason},
	} {
		onReadOnlySysctls(t, test.readOnly, func() {
			for _, f := range parsedFlags(t, "", test.args...).settingsCheck()(t.Context()) {
				if f.Subject == "sysctl net.ipv4.ip_forward" {
					if !strings.HasSuffix(f.Text, test.want) {
						t.Errorf("%s: %q does not end with %q", name, f.Text, test.want)
					}
					return
				}
			}
			t.Errorf("%s: no finding about net.ipv4.ip_forward", name)
		})
	}
}
