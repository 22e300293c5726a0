// SPDX-License-Identifier: Apache-2.0

//go:build !linux && !windows

package userspace

import "syscall"

const keepAliveInherited = false

func listenerControl(syscall.RawConn) error { return nil }

func dialControl(string, string, syscall.RawConn) error { return nil }

func bindAnywhere(syscall.RawConn) error { return nil }
