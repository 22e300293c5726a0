// SPDX-License-Identifier: Apache-2.0

// Package wine runs Windows programs of this project on Linux, under Wine, so
// that what is written for Windows is tested and not only cross-compiled.
//
//	w := wine.New(t, wine.Options{})
//	exe := w.Build(t, "./examples/winkernelspace")
//	p := w.Start(t, exe, "--api", "tcp://127.0.0.1:12090")
//	…
//	p.Kill(t)
//
// Each [Wine] has a prefix (a Windows installation) of its own, and so a
// wineserver and processes that no other test sees; they end with the test, and
// with the test process however it ends. The first use of a version of Wine on
// a machine makes a prefix in the user's cache folder, which takes ten seconds;
// what tests get are copies of it, made of hard links.
//
// Programs are built without cgo and with two changed lines of Go's standard
// library, for what Wine 8 lacks and Windows has (see [Wine.Build]); nothing else
// differs from a released program. What Wine cannot show: named pipes and unix
// sockets, the race detector, and several UDP sockets on one port.
//
// It needs the packages wine64 and wine, and for [CompileDLL]
// gcc-mingw-w64-x86-64. A test that finds them missing fails and says so.
package wine
