// SPDX-License-Identifier: Apache-2.0

package transport_test

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kpng-project/kpng/internal/transport"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestParseAddress(t *testing.T) {
	for _, test := range []struct {
		in, want string // the string want is empty for an invalid address
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
		{in: "unix:///" + strings.Repeat("x", 106), want: "unix:///" + strings.Repeat("x", 106)},
		{in: "unix:///" + strings.Repeat("x", 107)},
		{in: "unix:///" + strings.Repeat("x", 88) + "/s"},
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
		_, err = transport.NewDialer(transport.DialOptions{Addresses: []string{test.in}})
		if got := err != nil; got != test.exposed {
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

// The test tries directory names of all lengths. Listen must accept each address that
// ParseAddress accepts.
func TestAcceptedSocketPathsCanBeListenedOn(t *testing.T) {
	root := t.TempDir()
	accepted, refused := 0, 0
	for n := range 108 - len(root) - len("//s") {
		dir := filepath.Join(root, strings.Repeat("d", n+1))
		a, err := transport.ParseAddress("unix://" + dir + "/s")
		if err != nil {
			refused++
			continue
		}
		l, err := a.Listen(0)
		if err != nil {
			t.Fatalf("a path of %d bytes: %v", len(dir)+2, err)
		}
		l.Close()
		accepted++
	}
	if accepted == 0 || refused == 0 {
		t.Errorf("%d accepted, %d refused", accepted, refused)
	}
}

func TestWindowsConnectionRefused(t *testing.T) {
	for number, want := range map[syscall.Errno]bool{syscall.ECONNREFUSED: true, 10061: true, syscall.EACCES: false} {
		err := &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", number)}
		if got := transport.IsRefused(err); got != want {
			t.Errorf("%v: refused %t", err, got)
		}
	}
}

func TestSocketHasItsMode(t *testing.T) {
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
			t.Errorf("%v remains, error %v", files, err)
		}
	}
}

func TestMissingDirectoryIsCreated(t *testing.T) {
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

func TestIPv4AddressIsNotWidened(t *testing.T) {
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

func TestStaleSocketIsReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)

	if _, err := listen(t, path, 0); err == nil || !strings.Contains(err.Error(), "already listening") {
		t.Errorf("with a listening process: error %v", err)
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

	// A second listener replaces the socket. When the first listener is closed, the new
	// socket must stay.
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

func TestFileIsNotReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	if err := os.WriteFile(path, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := listen(t, path, 0); err == nil || !strings.Contains(err.Error(), "not a socket") {
		t.Errorf("error %v", err)
	}
	if content, err := os.ReadFile(path); err != nil || string(content) != "mine" {
		t.Errorf("content %q, error %v", content, err)
	}
}

func TestReconnect(t *testing.T) {
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
		err = d.Stay(ctx, func(_ context.Context, conn *grpc.ClientConn, heard func(complete, stale bool) error) error {
			n := len(tried)
			waited := time.Since(last)
			defer func() { last = time.Now() }()
			tried = append(tried, port(conn))
			// The dialer waits after every two failed tries, and after a good try. The fifth try
			// is good and lasts, so later waits are short again.
			most := [...]time.Duration{0, 0, 1, 0, 2, 1, 1, 0, 2, 0}[n] * time.Second
			if waited > most+1 {
				t.Errorf("try %d came after %s, want at most %s", n, waited, most)
			}
			switch n {
			case 4:
				heard(true, false)
				time.Sleep(4 * time.Second)
			case 9:
				cancel(ended)
			}
			return errors.New("lost")
		})
		if !errors.Is(err, ended) {
			t.Errorf("error %v", err)
		}
		want := strings.Repeat("12", 6)
		if got := strings.Join(tried, ""); got != want[:10] && got != want[1:11] {
			t.Errorf("tried %s", got)
		}
	})
}

// port returns the port to which conn connects.
func port(conn *grpc.ClientConn) string {
	return strings.TrimPrefix(conn.Target(), "passthrough:///127.0.0.1:")
}

func TestClientsSpreadOverServers(t *testing.T) {
	first := map[string]bool{}
	for range 200 {
		d, err := transport.NewDialer(transport.DialOptions{Addresses: []string{"127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"}})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		d.Stay(ctx, func(_ context.Context, conn *grpc.ClientConn, _ func(complete, stale bool) error) error {
			first[port(conn)] = true
			cancel()
			return nil
		})
	}
	if len(first) != 3 {
		t.Errorf("200 clients started at %v", first)
	}
}

// A server answers and then closes each connection.
func TestServerThatClosesConnectionsCausesBackoff(t *testing.T) {
	for _, discover := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			lists := 0
			opts := transport.DialOptions{Addresses: []string{"127.0.0.1:1", "127.0.0.1:2"}}
			if discover {
				found := opts.Addresses
				opts.Addresses, opts.Discover = nil, func(context.Context) ([]string, error) { lists++; return found, nil }
			}
			d, err := transport.NewDialer(opts)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			defer cancel()
			tries := 0
			d.Stay(ctx, func(_ context.Context, _ *grpc.ClientConn, heard func(complete, stale bool) error) error {
				tries++
				return heard(true, false)
			})
			// The mean wait is 7.5 s.
			if tries < 300 || tries > 700 || discover != (lists >= 300) || lists > 700 {
				t.Errorf("%d tries and %d lists in an hour", tries, lists)
			}
		})
	}
}

// Servers start and end, and the list is not always readable.
func TestServersAreFound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var (
			mu        sync.Mutex // the test holds the lock, except while it waits
			found     []string
			failed    error
			lists     int
			alive     = map[string]bool{}
			connected = map[string]int{}
			at        string
		)
		d, err := transport.NewDialer(transport.DialOptions{Discover: func(context.Context) ([]string, error) {
			mu.Lock()
			defer mu.Unlock()
			lists++
			return slices.Clone(found), failed
		}})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		mu.Lock()
		ended := make(chan error)
		lose := make(chan struct{})
		go func() {
			ended <- d.Stay(ctx, func(ctx context.Context, conn *grpc.ClientConn, heard func(complete, stale bool) error) error {
				mu.Lock()
				at = port(conn)
				connected[at]++
				dead := !alive[at]
				mu.Unlock()
				if dead {
					return errors.New("dead")
				}
				heard(true, false)
				select {
				case <-ctx.Done():
				case <-lose:
				}
				return errors.New("lost")
			})
		}()
		sleep := func(wait time.Duration) {
			mu.Unlock()
			time.Sleep(wait)
			synctest.Wait()
			mu.Lock()
		}
		after := func(wait time.Duration, want string) {
			t.Helper()
			sleep(wait)
			if at != want {
				t.Errorf("connected to %q, want %q", at, want)
			}
		}
		after(time.Minute, "")
		failed = errors.New("the API server is down")
		after(time.Minute, "")
		found, failed, alive["1"] = []string{"127.0.0.1:1", "192.0.2.1:1", "nonsense"}, nil, true // 192.0.2.1 would need TLS
		after(time.Minute, "1")
		before := lists
		after(time.Hour, "1")
		if lists != before {
			t.Errorf("%d lists while connected", lists-before)
		}
		// The server dies while the list is not readable. The client keeps the list.
		failed, alive["1"] = errors.New("the API server is down"), false
		lose <- struct{}{}
		sleep(time.Minute)
		alive["1"] = true
		after(time.Minute, "1")
		// Another server replaces the first one.
		found, failed, alive = []string{"127.0.0.1:2"}, nil, map[string]bool{"2": true}
		lose <- struct{}{}
		after(time.Minute, "2")
		// There are more servers. A client with an old list finds them when it reconnects.
		found, alive["3"] = []string{"127.0.0.1:2", "127.0.0.1:3"}, true
		clear(connected)
		for range 100 {
			sleep(30 * time.Minute)
			lose <- struct{}{}
		}
		sleep(time.Minute)
		if connected["2"] < 20 || connected["3"] < 20 {
			t.Errorf("reconnected to %v", connected)
		}
		mu.Unlock()
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

func TestFailFastReturnsErrorOfList(t *testing.T) {
	want := errors.New("forbidden")
	d, err := transport.NewDialer(transport.DialOptions{FailFast: true, Discover: func(context.Context) ([]string, error) { return nil, want }})
	if err != nil {
		t.Fatal(err)
	}
	err = d.Stay(t.Context(), func(context.Context, *grpc.ClientConn, func(complete, stale bool) error) error {
		t.Error("connected")
		return nil
	})
	if !errors.Is(err, want) {
		t.Errorf("error %v", err)
	}
}

func TestFailFastTriesEachAddressOnce(t *testing.T) {
	for _, test := range []struct {
		name      string
		addresses []string
		good      int // number of the successful try, counted from 1
		tries     int
	}{
		{"the default address", nil, 0, 1},
		{"two addresses", []string{"127.0.0.1:1", "127.0.0.1:2"}, 0, 2},
		{"the first of two fails after it was good", []string{"127.0.0.1:1", "127.0.0.1:2"}, 1, 1},
		{"the second of three fails after it was good", []string{"127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"}, 2, 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			d, err := transport.NewDialer(transport.DialOptions{Addresses: test.addresses, FailFast: true})
			if err != nil {
				t.Fatal(err)
			}
			lost := errors.New("lost")
			var tried []string
			err = d.Stay(t.Context(), func(_ context.Context, conn *grpc.ClientConn, heard func(complete, stale bool) error) error {
				if tried = append(tried, port(conn)); len(tried) == test.good {
					heard(true, false)
				}
				return lost
			})
			if !errors.Is(err, lost) || len(tried) != test.tries || !strings.Contains(err.Error(), ":"+tried[len(tried)-1]+":") {
				t.Errorf("error %v after trying %v, want %d tries", err, tried, test.tries)
			}
			slices.Sort(tried)
			if len(slices.Compact(tried)) != test.tries {
				t.Errorf("tried %v", tried)
			}
		})
	}
}

// The first server accepts the connection, but sends nothing. All other servers are good.
func TestSilentServerIsLeft(t *testing.T) {
	for _, test := range []struct {
		name      string
		addresses []string
		failFast  bool
		slow      bool // the good server sends an answer of six messages, one every ten seconds
		want      time.Duration
		silent    bool // Stay must return the error for a silent server
	}{
		{name: "another server answers", addresses: []string{"127.0.0.1:1", "127.0.0.1:2"}, want: 15 * time.Second},
		{name: "another server answers slowly", addresses: []string{"127.0.0.1:1", "127.0.0.1:2"}, slow: true, want: 75 * time.Second},
		{name: "there is no other server", addresses: []string{"127.0.0.1:1"}, want: time.Hour},
		{name: "there is none to wait for", addresses: []string{"127.0.0.1:1"}, failFast: true, want: 15 * time.Second, silent: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d, err := transport.NewDialer(transport.DialOptions{Addresses: test.addresses, FailFast: test.failFast})
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				tries, began := 0, time.Now()
				err = d.Stay(ctx, func(ctx context.Context, _ *grpc.ClientConn, heard func(complete, stale bool) error) error {
					if tries++; tries == 1 {
						<-ctx.Done()
						return ctx.Err()
					}
					for i := 0; test.slow && i < 6; i++ {
						time.Sleep(10 * time.Second)
						heard(i == 5, false)
					}
					if err := context.Cause(ctx); err != nil {
						t.Errorf("the client left the server that answered: %v", err)
					}
					cancel()
					return nil
				})
				if got := time.Since(began); got != test.want {
					t.Errorf("took %v, want %v", got, test.want)
				}
				if silent := err != nil && strings.Contains(err.Error(), "sent nothing"); silent != test.silent {
					t.Errorf("error %v", err)
				}
			})
		})
	}
}

func TestStaleServerIsLeft(t *testing.T) {
	const dead, stale, fresh = 'd', 's', 'f'
	for _, test := range []struct {
		name    string
		servers int
		says    string // the answers of the servers, in order: dead, stale or fresh
		stays   int    // number of answers that the client accepts from the last server
	}{
		{"the only server is stale", 1, "sss", 3},
		{"the other server is fresh", 2, "sff", 2},
		{"both are stale", 2, "sss", 2},
		{"the other server is down", 2, "sdss", 2},
		{"all three are stale", 3, "ssss", 2},
		{"a server becomes stale later, and the other server is fresh", 2, "ffsff", 2},
		{"a stale server becomes fresh, and stale again", 2, "ssfsf", 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				addresses := []string{"127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"}[:test.servers]
				d, err := transport.NewDialer(transport.DialOptions{Addresses: addresses})
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancel(t.Context())
				said, stays := 0, 0
				d.Stay(ctx, func(ctx context.Context, _ *grpc.ClientConn, heard func(complete, stale bool) error) error {
					stays = 0
					for said < len(test.says) {
						now := test.says[said]
						said++
						if now == dead {
							return errors.New("dead")
						}
						if err := heard(true, now == stale); err != nil {
							return err
						}
						stays++
					}
					cancel()
					return nil
				})
				if stays != test.stays {
					t.Errorf("the client stayed for %d answers, want %d", stays, test.stays)
				}
			})
		})
	}
}
