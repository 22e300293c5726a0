// SPDX-License-Identifier: Apache-2.0

package netif

import (
	"errors"
	"net"
	"net/netip"
	"os/exec"
	"syscall"
	"unsafe"

	"golang.org/x/sys/windows"
)

// withoutWindow lets a service run a console program without a console window.
func withoutWindow(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{HideWindow: true, CreationFlags: windows.CREATE_NO_WINDOW}
}

// The functions of the IP Helper API (netioapi.h) that golang.org/x/sys/windows lacks.
var (
	ipHelper         = windows.NewLazySystemDLL("iphlpapi.dll")
	initializeEntry  = ipHelper.NewProc("InitializeUnicastIpAddressEntry")
	createEntry      = ipHelper.NewProc("CreateUnicastIpAddressEntry")
	deleteEntry      = ipHelper.NewProc("DeleteUnicastIpAddressEntry")
	errHelperMissing = errors.New("the IP Helper API lacks the function")
)

// addByAPI adds an address with prefix length 32 or 128 to an interface. The address
// exists until Windows restarts or the interface is removed.
func addByAPI(on *net.Interface, addr netip.Addr) error {
	row, err := entry(on, addr)
	if err != nil {
		return err
	}
	return call(createEntry, row)
}

// removeByAPI removes an address from an interface. If the address does not exist, there
// is no error.
func removeByAPI(on *net.Interface, addr netip.Addr) error {
	row, err := entry(on, addr)
	if err == nil {
		err = call(deleteEntry, row)
	}
	if errors.Is(err, windows.ERROR_NOT_FOUND) {
		return nil
	}
	return err
}

func entry(on *net.Interface, addr netip.Addr) (*windows.MibUnicastIpAddressRow, error) {
	row := &windows.MibUnicastIpAddressRow{}
	if err := initializeEntry.Find(); err != nil {
		return nil, errHelperMissing
	}
	initializeEntry.Call(uintptr(unsafe.Pointer(row))) // sets default values, such as infinite lifetimes
	if addr.Is4() {
		to := (*windows.RawSockaddrInet4)(unsafe.Pointer(&row.Address))
		to.Family, to.Addr = windows.AF_INET, addr.As4()
	} else {
		row.Address.Family, row.Address.Addr = windows.AF_INET6, addr.As16()
	}
	row.InterfaceIndex = uint32(on.Index)
	row.OnLinkPrefixLength = uint8(addr.BitLen())
	row.SkipAsSource = 1
	return row, nil
}

// call calls a function that returns a Win32 error.
func call(f *windows.LazyProc, row *windows.MibUnicastIpAddressRow) error {
	if err := f.Find(); err != nil {
		return errHelperMissing
	}
	if code, _, _ := f.Call(uintptr(unsafe.Pointer(row))); code != 0 {
		return syscall.Errno(code)
	}
	return nil
}
