// SPDX-License-Identifier: Apache-2.0

package openflow

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// fakeSwitch serves one connection with a function. It returns the path of its socket.
func fakeSwitch(t *testing.T, serve func(net.Conn)) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	t.Cleanup(func() { l.Close(); <-ended })
	go func() {
		defer close(ended)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		serve(c)
	}()
	return path
}

var hello = appendMessage(nil, typeHello, 0, []byte{0, 1, 0, 8, 0, 0, 0, 1 << version})

// answer sends a hello, and then these bytes after each message.
func answer(b []byte) func(net.Conn) {
	return func(c net.Conn) {
		r := bufio.NewReader(c)
		for next := hello; ; next = b {
			if _, _, err := readMessage(r); err != nil {
				return
			}
			if _, err := c.Write(next); err != nil {
				return
			}
		}
	}
}

func setPatience(t *testing.T, d time.Duration) {
	old := patience
	patience = d
	t.Cleanup(func() { patience = old })
}

// TestUnexpectedAnswers checks that a switch that does not follow the protocol causes an
// error.
func TestUnexpectedAnswers(t *testing.T) {
	listing := func(body ...byte) []byte { return appendMessage(nil, typeMultipartReply, 1, body) }
	header := []byte{0, listGroups, 0, 0, 0, 0, 0, 0}
	group := []byte{0, 32, groupSelect, 0, 0, 0, 0, 1, 0, 16, 0, 0, 0, 0, 0, 0}
	for name, test := range map[string]struct {
		serve func(net.Conn)
		want  string
	}{
		"the connection ends before hello": {func(c net.Conn) { readMessage(c) }, "hello"},
		"hello of an old version":          {func(c net.Conn) { c.Write([]byte{1, 0, 0, 8, 0, 0, 0, 0}); io.Copy(io.Discard, c) }, "OpenFlow15"},
		"hello without OpenFlow 1.5": {func(c net.Conn) {
			c.Write([]byte{7, 0, 0, 16, 0, 0, 0, 0, 0, 1, 0, 8, 0, 0, 0, 16})
			io.Copy(io.Discard, c)
		}, "OpenFlow15"},
		"something else":                        {func(c net.Conn) { readMessage(c); io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n") }, "hello"},
		"a message with a size of 0":            {answer([]byte{version, typeMultipartReply, 0, 0, 0, 0, 0, 1}), "truncated"},
		"the connection ends in a message":      {func(c net.Conn) { c.Write(append(hello, listing(header...)[:12]...)); readMessage(c); readMessage(c) }, "lost"},
		"an error":                              {answer(appendMessage(nil, typeError, 1, []byte{0, 1, 0, 5})), "permission denied"},
		"an error without a code":               {answer(appendMessage(nil, typeError, 1, []byte{0})), "truncated"},
		"a listing without a header":            {answer(listing(0)), "unexpected"},
		"another message":                       {answer(appendMessage(nil, typeBarrierReply, 1, nil)), "unexpected"},
		"a group that ends early":               {answer(listing(append(header, group...)...)), "truncated"},
		"a group with a bucket that ends early": {answer(listing(append(append(header, group...), 0, 64, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)...)), "truncated"},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := Dial(t.Context(), fakeSwitch(t, test.serve))
			if err == nil {
				defer c.Close()
				_, err = c.Groups(t.Context())
			}
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v does not contain %q", err, test.want)
			}
		})
	}
}

// TestHangingSwitch checks that neither the context nor the patience is ignored if the
// switch does not answer.
func TestHangingSwitch(t *testing.T) {
	hang := func(c net.Conn) { io.Copy(io.Discard, c) }
	greetAndHang := func(c net.Conn) { c.Write(hello); hang(c) }
	cause := errors.New("enough")
	ended := func() context.Context {
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(10*time.Millisecond, func() { cancel(cause) })
		return ctx
	}
	if _, err := Dial(ended(), fakeSwitch(t, hang)); !errors.Is(err, cause) {
		t.Errorf("hello: error %v, want %v", err, cause)
	}
	connect := func() *Conn {
		c, err := Dial(t.Context(), fakeSwitch(t, greetAndHang))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	c := connect()
	if _, err := c.Groups(ended()); !errors.Is(err, cause) {
		t.Errorf("list: error %v, want %v", err, cause)
	}
	<-c.Lost() // a request without an answer ends the connection
	setPatience(t, 50*time.Millisecond)
	if err := connect().Commit(t.Context(), []Message{DeleteGroup(1)}); err == nil || !strings.Contains(err.Error(), "has not answered") {
		t.Errorf("commit: error %v does not say that the switch has not answered", err)
	}
	if _, err := Dial(t.Context(), fakeSwitch(t, hang)); err == nil {
		t.Error("no error if the switch never says hello")
	}
}

func TestEchoRequestsAreAnswered(t *testing.T) {
	answered := make(chan string, 1)
	path := fakeSwitch(t, func(c net.Conn) {
		c.Write(append(hello, appendMessage(nil, typeEchoRequest, 7, []byte("still there?"))...))
		r := bufio.NewReader(c)
		for {
			m, _, err := readMessage(r)
			if err != nil {
				close(answered)
				return
			}
			if m.kind == typeEchoReply && m.id == 7 {
				answered <- string(m.body)
				return
			}
		}
	})
	c, err := Dial(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if got := <-answered; got != "still there?" {
		t.Errorf("the answer contains %q", got)
	}
}

func TestTranslatedTo(t *testing.T) {
	for _, to := range []netip.AddrPort{
		netip.MustParseAddrPort("10.0.0.1:80"), netip.MustParseAddrPort("[fd00::1]:80"), netip.MustParseAddrPort("10.0.0.1:0"),
	} {
		a := Join(Resubmit(1), CT{Commit: true, Actions: Join(CopyToMark(0, 8), TranslateDestination(to.Addr(), to.Port()))}.Action())
		if got := TranslatedTo(a); got != to {
			t.Errorf("%s, want %s", got, to)
		}
	}
	for _, a := range []Actions{"", Resubmit(1), CT{Actions: Translate()}.Action(), CT{Actions: TranslateSource(netip.MustParseAddr("10.0.0.1"), 1, 2)}.Action()} {
		if got := TranslatedTo(a); got.IsValid() {
			t.Errorf("%q translates the destination to %s", a, got)
		}
	}
}

// FuzzParsers checks that no message of a switch ends the process, and that what the
// parsers read from encoded groups is what was encoded.
func FuzzParsers(f *testing.F) {
	m := Match{EtherType: IPv4, Destination: netip.MustParsePrefix("10.0.0.1/32"), Protocol: 6, Port: 80}
	f.Add(flowMod(flowAdd, &Flow{FlowKey: FlowKey{Match: m.Encode()}, Actions: ToGroup(1)}, 0).body)
	f.Add([]byte(m.Encode()))
	f.Add([]byte(CT{Commit: true, Actions: TranslateDestination(netip.MustParseAddr("fd00::1"), 80)}.Action()))
	f.Add([]byte{0, 32, groupSelect, 0, 0, 0, 0, 1, 0, 16, 0, 0, 0, 0, 0, 0, 0, 16, 0, 8, 0, 0, 0, 1, 0, 22, 0, 8, 0, 0, 0, 2})
	f.Add(hello)
	f.Fuzz(func(t *testing.T, b []byte) {
		parseFlows(nil, b)
		supports(b, version)
		Destination(string(b))
		TranslatedTo(Actions(b))
		readMessage(strings.NewReader(string(b)))
		groups, err := parseGroups(nil, b)
		if err != nil {
			return
		}
		for _, g := range groups {
			if len(g.Buckets) == 0 {
				continue
			}
			var encoded []byte
			for _, bucket := range g.Buckets {
				if len(bucket.Actions)%8 != 0 || len(bucket.Actions) > 1<<10 || len(g.Buckets) > 16 {
					return
				}
				encoded = append(encoded, bucket.encode()...)
			}
			entry := []byte{byte((16 + len(encoded)) >> 8), byte(16 + len(encoded)), groupSelect, 0}
			entry = append(entry, byte(g.ID>>24), byte(g.ID>>16), byte(g.ID>>8), byte(g.ID))
			entry = append(entry, byte(len(encoded)>>8), byte(len(encoded)), 0, 0, 0, 0, 0, 0)
			again, err := parseGroups(nil, append(entry, encoded...))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]Group{g}, again); diff != "" {
				t.Fatalf("the encoded group differs (-want +got):\n%s", diff)
			}
		}
	})
}
