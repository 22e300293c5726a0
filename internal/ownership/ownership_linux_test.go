// SPDX-License-Identifier: Apache-2.0

package ownership

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
)

const objects = "table kpng"

// With this variable, the test binary is a process that owns the objects until it is
// killed. With the value "squat", the process binds the name as another user.
const roleVariable = "OWNERSHIP_ROLE"

func TestMain(m *testing.M) {
	switch os.Getenv(roleVariable) {
	case "":
		os.Exit(m.Run())
	case "owner":
		if _, err := Objects(context.Background(), 0, objects); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	case "squat":
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
		if err == nil {
			err = syscall.Setuid(65534)
		}
		if err == nil {
			err = unix.Bind(fd, &unix.SockaddrUnix{Name: name(objects)})
		}
		if err == nil {
			err = unix.Listen(fd, 1)
		}
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
	fmt.Println("ready")
	select {}
}

// another starts another process in the namespace and returns when it has its role.
func another(t *testing.T, ns *netnstest.Namespace, role string) (cmd *exec.Cmd, kill func()) {
	t.Helper()
	cmd = exec.Command("/proc/self/exe", "--example-flag")
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	ended, err := ns.Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	kill = func() {
		cmd.Process.Kill()
		<-ended
	}
	t.Cleanup(func() { cmd.Process.Kill() })
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the other process printed %q, %v", line, err)
	}
	return cmd, kill
}

// take takes the ownership of the objects in the namespace.
func take(t *testing.T, ns *netnstest.Namespace) (release func(), err error) {
	t.Helper()
	if doErr := ns.Do(func() error { release, err = Objects(t.Context(), 0, objects); return nil }); doErr != nil {
		t.Fatal(doErr)
	}
	return release, err
}

func TestSecondProcessIsRefusedUntilTheFirstEnds(t *testing.T) {
	ns := netnstest.New(t)
	first, kill := another(t, ns, "owner")
	_, err := take(t, ns)
	var taken *Taken
	if !errors.As(err, &taken) || !errors.Is(err, sink.ErrOwned) {
		t.Fatalf("error %v, want a *Taken", err)
	}
	for _, want := range []string{objects, fmt.Sprintf("process %d: ", first.Process.Pid), "--example-flag", " since 2"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error %q does not contain %q", err, want)
		}
	}
	if release, err := take(t, netnstest.New(t)); err != nil {
		t.Errorf("in another network namespace: %v", err)
	} else {
		release()
	}
	kill()
	release, err := take(t, ns)
	if err != nil {
		t.Fatalf("after the end of the first process: %v", err)
	}
	if _, err := take(t, ns); !errors.Is(err, sink.ErrOwned) {
		t.Errorf("second owner in the same process: error %v", err)
	}
	release()
	if release, err = take(t, ns); err != nil {
		t.Fatalf("after the release: %v", err)
	}
	release()
}

// Any process may bind the name. But a process without privileges must not keep the proxy
// from starting.
func TestUnprivilegedProcessCannotRefuseOwnership(t *testing.T) {
	ns := netnstest.New(t)
	another(t, ns, "squat")
	release, err := take(t, ns)
	if err != nil {
		t.Fatal(err)
	}
	release()
	if err := ns.Do(func() error {
		if IsOwned(objects) {
			return errors.New("an unprivileged process counts as the owner")
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

func TestOwnerHoldsObjectsOnlyWhileStarted(t *testing.T) {
	var o Owner
	held := 0
	own := func() (func(), error) { held++; return func() { held-- }, nil }
	start := func(err error) func() error {
		return func() error {
			if held != 1 {
				t.Errorf("held %d times during the call", held)
			}
			return err
		}
	}
	broken := errors.New("broken")
	if err := o.Start(own, start(broken)); err != broken || held != 0 {
		t.Errorf("failed start: %v, held %d times", err, held)
	}
	func() {
		defer func() { recover() }()
		o.Start(own, func() error { panic(broken) })
	}()
	if held != 0 {
		t.Errorf("held %d times after a panic", held)
	}
	if err := o.During(own, start(nil)); err != nil || held != 0 {
		t.Errorf("clean-up without start: %v, held %d times", err, held)
	}
	if err := o.Start(own, start(nil)); err != nil || held != 1 {
		t.Errorf("start: %v, held %d times", err, held)
	}
	if err := o.During(own, start(nil)); err != nil || held != 1 {
		t.Errorf("clean-up after start: %v, held %d times", err, held)
	}
	o.Release()
	o.Release()
	if held != 0 {
		t.Errorf("held %d times after the release", held)
	}
}
