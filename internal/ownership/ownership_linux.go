// SPDX-License-Identifier: Apache-2.0

package ownership

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"time"

	"github.com/kpng-project/kpng/internal/netns"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// An owner listens on a unix socket with an abstract name in the network namespace of its
// objects. All processes in that namespace see the name, whatever they have mounted. When
// the process ends, the socket and its name disappear.
//
// Any process in the namespace may bind such a name, even a process without privileges.
// So a name counts only if its owner has the credentials of root or of this process's own
// user. The kernel reports these credentials. Otherwise an unprivileged process could
// keep the proxy from starting.

// proofTime is how long an owner may take to accept a connection.
const proofTime = time.Second

// Objects takes the ownership of the objects in the network namespace with the file
// descriptor netNS. If netNS is 0, this is the network namespace of this process. If
// another owner has the objects, the error is a [*Taken].
func Objects(ctx context.Context, netNS int, objects string) (release func(), err error) {
	address := name(objects)
	for deadline := time.Now().Add(proofTime); ; {
		var l net.Listener
		var by string
		nsErr := netns.Do(netNS, func() {
			if l, err = net.Listen("unix", address); errors.Is(err, unix.EADDRINUSE) {
				by, err = ask(address)
			}
		})
		switch {
		case nsErr != nil:
			return nil, nsErr
		case l != nil:
			go serve(l)
			return func() { l.Close() }, nil
		case err == nil:
			return nil, &Taken{objects, by}
		case !errors.Is(err, errNoAnswer):
			return nil, fmt.Errorf("take the ownership of %s: %w", objects, err)
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		case time.Now().After(deadline):
			klog.FromContext(ctx).Error(err, "The name of the owner is in use by a program that is not kpng; continuing without protection against a second kpng", "objects", objects)
			return func() {}, nil
		}
		time.Sleep(10 * time.Millisecond) // the owner has just ended or started
	}
}

// IsOwned reports whether a process owns the objects in the network namespace of the
// calling thread.
func IsOwned(objects string) bool {
	for deadline := time.Now().Add(proofTime); ; time.Sleep(10 * time.Millisecond) {
		_, err := ask(name(objects))
		if err == nil || errors.Is(err, unix.ECONNREFUSED) || time.Now().After(deadline) {
			return err == nil
		}
	}
}

// name returns the abstract name of the socket. Other versions of kpng use the same name.
func name(objects string) string {
	const most = 100 // the kernel's limit is 107 bytes
	if len(objects) > most {
		sum := sha256.Sum256([]byte(objects))
		objects = objects[:most/2] + hex.EncodeToString(sum[:16])
	}
	return "@kpng/" + objects
}

var errNoAnswer = errors.New("no answer of the owner")

// ask returns a description of the process that listens at the address.
func ask(address string) (string, error) {
	c, err := net.DialTimeout("unix", address, proofTime)
	if err != nil {
		return "", fmt.Errorf("%w: %w", errNoAnswer, err)
	}
	defer c.Close()
	peer, err := credentials(c)
	if err != nil {
		return "", fmt.Errorf("%w: %w", errNoAnswer, err)
	}
	if !trusted(peer) {
		return "", fmt.Errorf("%w: its user ID is %d", errNoAnswer, peer.Uid)
	}
	process := "a process of another container"
	if peer.Pid != 0 { // the ID is 0 if the process is not in the PID namespace of this process
		process = fmt.Sprintf("process %d", peer.Pid)
	}
	c.SetReadDeadline(time.Now().Add(proofTime))
	text, _ := io.ReadAll(io.LimitReader(c, 1024)) // even without the text, the process is known
	if text := strings.ToValidUTF8(string(text), "?"); text != "" {
		process += ": " + strings.Map(func(r rune) rune {
			if r < ' ' || r == 0x7f {
				return '?'
			}
			return r
		}, text)
	}
	return process, nil
}

// serve describes this process to other processes that look for the owner. It refuses the
// description to other users, because command lines of embedding programs may be private.
func serve(l net.Listener) {
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(100 * time.Millisecond) // no file descriptor is free
			continue
		}
		if peer, err := credentials(c); err == nil && trusted(peer) {
			c.SetWriteDeadline(time.Now().Add(proofTime))
			io.WriteString(c, self())
		}
		c.Close()
	}
}

func trusted(peer *unix.Ucred) bool { return peer.Uid == 0 || int(peer.Uid) == os.Geteuid() }

// credentials returns the credentials of the process at the other end of a connection.
func credentials(c net.Conn) (peer *unix.Ucred, err error) {
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return nil, err
	}
	if controlErr := raw.Control(func(fd uintptr) {
		peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); controlErr != nil {
		return nil, controlErr
	}
	return peer, err
}
