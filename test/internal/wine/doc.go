// SPDX-License-Identifier: Apache-2.0

// Package wine runs this project's Windows programs on Linux under Wine. So tests can run
// code for Windows, not only compile it.
//
//	w := wine.New(t, wine.Options{})
//	exe := w.Build(t, "./examples/winkernelspace")
//	p := w.Start(t, exe, "--api", "tcp://127.0.0.1:12090")
//	…
//	p.Kill(t)
//
// Each [Wine] has its own prefix (a Windows installation), its own wineserver and its own
// processes. The processes end when the test ends or the test process is killed. The
// first use of a Wine version takes ten seconds, because it creates a prefix in the
// user's cache folder. Tests use copies of this prefix. The copies consist mostly of hard
// links.
//
// Programs under test differ from released programs in two ways. They are built without
// cgo. Two lines of Go's standard library are changed, because Wine 8 lacks two features
// (see [Wine.Build]). Tests under Wine cannot use named pipes, unix sockets, the race
// detector, or several UDP sockets on one port.
//
// The tests need the Debian packages wine64 and wine. [CompileDLL] also needs
// gcc-mingw-w64-x86-64. If a package is missing, the test fails and names the package.
package wine
