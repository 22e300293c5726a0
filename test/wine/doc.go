// SPDX-License-Identifier: Apache-2.0

// Package wine runs Windows programs of this project on Linux under Wine, so that code
// for Windows is tested and not only cross-compiled.
//
//	w := wine.New(t, wine.Options{})
//	exe := w.Build(t, "./examples/winkernelspace")
//	p := w.Start(t, exe, "--api", "tcp://127.0.0.1:12090")
//	…
//	p.Kill(t)
//
// Each [Wine] has its own prefix (a Windows installation), and so its own wineserver and
// processes. The processes end with the test. They also end if the test process is
// killed. The first use of a Wine version on a machine creates a prefix in the user's
// cache folder, which takes ten seconds. Tests use copies of it, made of hard links.
//
// Programs are built without cgo and with two changed lines of Go's standard library, for
// features that Wine 8 lacks (see [Wine.Build]). Otherwise they are the same as released
// programs. Wine does not support named pipes and unix sockets, the race detector, or
// several UDP sockets on one port.
//
// It needs the packages wine64 and wine, and for [CompileDLL] gcc-mingw-w64-x86-64. A
// test without them fails and names them.
package wine
