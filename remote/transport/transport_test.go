// SPDX-License-Identifier: Apache-2.0

package transport_test

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/remote/transport"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestParseAddress(t *testing.T) {
	for _, test := range []struct {
		in, want string // no want: an error
		exposed  bool
	}{
		{in: transport.DefaultAddress, want: "tcp://127.0.0.1:12090"},
		{in: "127.0.0.1:1", want: "tcp://127.0.0.1:1"},
		{in: "tcp://[::1]:1", want: "tcp://[::1]:1"},
		{in: "localhost:1", want: "tcp://localhost:1"},
		{in: "unix:///run/kpng/kpng.sock", want: "unix:///run/kpng/kpng.sock"},
		{in: "tcp://10.0.0.1:1", want: "tcp://10.0.0.1:1", exposed: true},
		{in: "tcp://:1", want: "tcp://:1", exposed: true},
		{in: "tcp://[::ffff:127.0.0.1]:1", want: "tcp://[::ffff:127.0.0.1]:1"},
		{in: "kpng.example:1", want: "tcp://kpng.example:1", exposed: true},
		{in: "unix://relative"},
		{in: "unix:///" + strings.Repeat("x", 107)},
		{in: "127.0.0.1"},
		{in: "127.0.0.1:"},
		{in: "http://127.0.0.1:1"},
		{in: ""},
	} {
		a, err := transport.ParseAddress(test.in)
		if (err != nil) != (test.want == "") {
			t.Errorf("%q: error %v", test.in, err)
		}
		if err != nil {
			continue
		}
		if a.String() != test.want {
			t.Errorf("%q: %s, want %s", test.in, a, test.want)
		}
		if got := a.CheckPlaintext() != nil; got != test.exposed {
			t.Errorf("%q: plaintext refused: %t", test.in, got)
		}
	}
}

func listen(t *testing.T, path string, mode fs.FileMode) (net.Listener, error) {
	t.Helper()
	a, err := transport.ParseAddress("unix://" + path)
	if err != nil {
		t.Fatal(err)
	}
	return a.Listen(mode)
}

func TestASocketHasItsMode(t *testing.T) {
	for mode, want := range map[fs.FileMode]fs.FileMode{0: 0o600, 0o660: 0o660} {
		path := filepath.Join(t.TempDir(), "s")
		l, err := listen(t, path, mode)
		if err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(path)
		if err != nil || info.Mode().Perm() != want {
			t.Errorf("mode %v, error %v, want %v", info.Mode(), err, want)
		}
		l.Close()
		files, err := os.ReadDir(filepath.Dir(path))
		if err != nil || len(files) > 0 {
			t.Errorf("%v is left, error %v", files, err)
		}
	}
}

func TestAMissingDirectoryIsCreated(t *testing.T) {
	root := t.TempDir()
	for _, test := range []struct{ path, err string }{
		{"kpng/s", ""},
		{"not/there/s", "create its directory: mkdir " + root + "/not/there: no such file or directory"},
	} {
		a, err := transport.ParseAddress("unix://" + root + "/" + test.path)
		if err != nil {
			t.Fatal(err)
		}
		l, err := a.Listen(0)
		switch {
		case err == nil:
			l.Close()
			if test.err != "" {
				t.Errorf("%s: no error", test.path)
			}
		case test.err == "" || !strings.Contains(err.Error(), test.err):
			t.Errorf("%s: error %v, want %q", test.path, err, test.err)
		}
	}
}

func TestAnIPv4AddressIsNotWidened(t *testing.T) {
	a, err := transport.ParseAddress("tcp://0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	l, err := a.Listen(0)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if got := l.Addr().String(); !strings.HasPrefix(got, "0.0.0.0:") {
		t.Errorf("listens on %s", got)
	}
}

func TestAStaleSocketIsReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)

	if _, err := listen(t, path, 0); err == nil || !strings.Contains(err.Error(), "somebody listens") {
		t.Errorf("while somebody listens: error %v", err)
	}
	stale.Close()
	l, err := listen(t, path, 0)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()

	// Another listener takes the place; closing the first leaves it alone.
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	second, err := listen(t, path, 0)
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	if _, err := os.Stat(path); err != nil {
		t.Errorf("the second socket: %v", err)
	}
	second.Close()
}

func TestAFileIsNotReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	if err := os.WriteFile(path, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := listen(t, path, 0); err == nil || !strings.Contains(err.Error(), "no socket") {
		t.Errorf("error %v", err)
	}
	if content, err := os.ReadFile(path); err != nil || string(content) != "mine" {
		t.Errorf("content %q, error %v", content, err)
	}
}

// TestComingBack notes which addresses are tried, and how long the dialer waits.
func TestComingBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, err := transport.NewDialer(transport.DialOptions{
			Addresses:  []string{"127.0.0.1:1", "127.0.0.1:2"},
			MinBackoff: time.Second, MaxBackoff: 4 * time.Second,
		})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		ended := errors.New("enough")
		var tried []string
		last := time.Now()
		err = d.Stay(ctx, func(_ context.Context, conn *grpc.ClientConn, good func()) error {
			n := len(tried)
			waited := time.Since(last)
			last = time.Now()
			tried = append(tried, strings.TrimPrefix(conn.Target(), "passthrough:///127.0.0.1:"))
			// There is no wait within a round, and after the fifth try, which was
			// good, it all begins anew.
			most := [...]time.Duration{0, 0, 1, 0, 2, 1, 1, 0, 2, 0}[n] * time.Second
			if waited > most+1 {
				t.Errorf("try %d came after %s, want %s at most", n, waited, most)
			}
			switch n {
			case 4:
				good()
			case 9:
				cancel(ended)
			}
			return errors.New("lost")
		})
		if !errors.Is(err, ended) {
			t.Errorf("error %v", err)
		}
		if diff := cmp.Diff(strings.Split("1 2 1 2 1 2 1 2 1 2", " "), tried); diff != "" {
			t.Error(diff)
		}
	})
}

func TestWhoWantsToFailFastTriesEachAddressOnce(t *testing.T) {
	for _, test := range []struct {
		name      string
		addresses []string
		good      int // the try that is good, from 1
		tries     int
		last      string
	}{
		{"the default address", nil, 0, 1, "127.0.0.1:12090"},
		{"two addresses", []string{"127.0.0.1:1", "127.0.0.1:2"}, 0, 2, "127.0.0.1:2"},
		{"the first of two is lost after it was good", []string{"127.0.0.1:1", "127.0.0.1:2"}, 1, 1, "127.0.0.1:1"},
		{"the second of three is lost after it was good", []string{"127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"}, 2, 2, "127.0.0.1:2"},
	} {
		t.Run(test.name, func(t *testing.T) {
			d, err := transport.NewDialer(transport.DialOptions{Addresses: test.addresses, FailFast: true})
			if err != nil {
				t.Fatal(err)
			}
			lost := errors.New("lost")
			tries := 0
			err = d.Stay(t.Context(), func(_ context.Context, _ *grpc.ClientConn, good func()) error {
				if tries++; tries == test.good {
					good()
				}
				return lost
			})
			if !errors.Is(err, lost) || !strings.Contains(err.Error(), test.last+":") || tries != test.tries {
				t.Errorf("error %v after %d tries, want one of %s after %d", err, tries, test.last, test.tries)
			}
		})
	}
}
