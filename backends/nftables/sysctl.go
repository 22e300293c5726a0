// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"

	"k8s.io/klog/v2"
)

// sysctls have to be 1 for what comes from elsewhere to go on to pods.
var sysctls = [...]string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"}

// checkSysctls does what Options.Sysctls says. A setting that the kernel does not have,
// as that of IPv6 where this is turned off, is none to care about.
func (b *Backend) checkSysctls(ctx context.Context) error {
	if b.opts.Sysctls == IgnoreSysctls {
		return nil
	}
	return inNetNS(b.opts.NetNS, func() error {
		var errs []error
		for _, name := range sysctls {
			file := path.Join("/proc/sys", name)
			text, err := os.ReadFile(file)
			switch {
			case errors.Is(err, fs.ErrNotExist):
			case err != nil:
				errs = append(errs, fmt.Errorf("reading a sysctl: %w", err))
			case strings.TrimSpace(string(text)) == "1":
			case b.opts.Sysctls == SetSysctls:
				if err := os.WriteFile(file, []byte("1\n"), 0); err != nil {
					errs = append(errs, fmt.Errorf("setting a sysctl: %w", err))
				}
			default:
				klog.FromContext(ctx).Info("Traffic from elsewhere does not reach pods: a sysctl is not 1",
					"sysctl", strings.ReplaceAll(name, "/", "."), "value", strings.TrimSpace(string(text)))
			}
		}
		return errors.Join(errs...)
	})
}
