// SPDX-License-Identifier: Apache-2.0

//go:build !windows

package netif

import (
	"errors"
	"net"
	"net/netip"
	"os/exec"
)

func withoutWindow(*exec.Cmd) {}

func addByAPI(*net.Interface, netip.Addr) error { return errors.ErrUnsupported }

func removeByAPI(*net.Interface, netip.Addr) error { return errors.ErrUnsupported }
