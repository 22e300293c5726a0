// SPDX-License-Identifier: Apache-2.0

package openflow

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
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

// answer returns a function that sends a hello, and the bytes b after each message.
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

// TestUnexpectedAnswers checks for errors after answers that violate the protocol.
func TestUnexpectedAnswers(t *testing.T) {
	listing := func(body ...byte) []byte { return appendMessage(nil, typeMultipartReply, 1, body) }
	header := []byte{0, listGroups, 0, 0, 0, 0, 0, 0}
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
		"something else":                   {func(c net.Conn) { readMessage(c); io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n") }, "hello"},
		"a message with a size of 0":       {answer([]byte{version, typeMultipartReply, 0, 0, 0, 0, 0, 1}), "truncated"},
		"the connection ends in a message": {func(c net.Conn) { c.Write(append(hello, listing(header...)[:12]...)); readMessage(c); readMessage(c) }, "lost"},
		"an error":                         {answer(appendMessage(nil, typeError, 1, []byte{0, 1, 0, 5})), "permission denied"},
		"an error without a code":          {answer(appendMessage(nil, typeError, 1, []byte{0})), "truncated"},
		"a listing without a header":       {answer(listing(0)), "unexpected"},
		"another message":                  {answer(appendMessage(nil, typeBarrierReply, 1, nil)), "unexpected"},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := Dial(t.Context(), fakeSwitch(t, test.serve), Cookies{})
			if err == nil {
				defer c.Close()
				_, err = c.Groups(t.Context(), []uint32{1})
			}
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v does not contain %q", err, test.want)
			}
		})
	}
}

// TestUnusableGroupsAreForeign checks that an unreadable group is reported as foreign, so
// that the backend replaces the group.
func TestUnusableGroupsAreForeign(t *testing.T) {
	bucket := Bucket{ID: 1, Weight: 7, Actions: ToGroup(2)}
	good := listed(1, bucket.encode(), (&Group{Seed: 3}).selection())
	for name, test := range map[string]struct {
		group   []byte
		foreign bool
	}{
		"complete":                 {good, false},
		"of another type":          {append([]byte{good[0], good[1], groupSelect + 1}, good[3:]...), true},
		"without a hash":           {listed(1, bucket.encode(), nil), true},
		"with another ID":          {listed(2, bucket.encode(), (&Group{Seed: 3}).selection()), true},
		"shorter than it says":     {good[:len(good)-8], true},
		"a bucket that ends early": {listed(1, []byte{0, 64, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, (&Group{Seed: 3}).selection()), true},
		"twice":                    {append(slices.Clone(good), good...), true},
	} {
		t.Run(name, func(t *testing.T) {
			header := []byte{0, listGroups, 0, 0, 0, 0, 0, 0}
			c, err := Dial(t.Context(), fakeSwitch(t, answer(appendMessage(nil, typeMultipartReply, 1, append(header, test.group...)))), Cookies{})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			groups, err := c.Groups(t.Context(), []uint32{1})
			if err != nil || len(groups) != 1 || groups[0].ID != 1 || groups[0].Foreign != test.foreign {
				t.Errorf("groups %+v, error %v", groups, err)
			}
		})
	}
}

// TestMessageIDsBeginAgain checks that a connection may have more messages than there are
// IDs.
func TestMessageIDsBeginAgain(t *testing.T) {
	c := &Conn{nextID: 1<<32 - 3}
	if first := c.ids(5); first != 1 {
		t.Errorf("the first of five IDs is %d, want 1", first)
	}
}

// TestHangingSwitch sends requests to a switch that does not answer. A request ends with
// its context, or when the patience is over.
func TestHangingSwitch(t *testing.T) {
	hang := func(c net.Conn) { io.Copy(io.Discard, c) }
	greetAndHang := func(c net.Conn) { c.Write(hello); hang(c) }
	cause := errors.New("enough")
	ended := func() context.Context {
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(10*time.Millisecond, func() { cancel(cause) })
		return ctx
	}
	if _, err := Dial(ended(), fakeSwitch(t, hang), Cookies{}); !errors.Is(err, cause) {
		t.Errorf("hello: error %v, want %v", err, cause)
	}
	connect := func() *Conn {
		c, err := Dial(t.Context(), fakeSwitch(t, greetAndHang), Cookies{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	c := connect()
	if _, err := c.Groups(ended(), []uint32{1}); !errors.Is(err, cause) {
		t.Errorf("list: error %v, want %v", err, cause)
	}
	<-c.Lost() // a request without an answer ends the connection
	setPatience(t, 50*time.Millisecond)
	if err := connect().Commit(t.Context(), []Message{DeleteGroup(1)}); err == nil || !strings.Contains(err.Error(), "has not answered") {
		t.Errorf("commit: error %v does not say that the switch has not answered", err)
	}
	if _, err := Dial(t.Context(), fakeSwitch(t, hang), Cookies{}); err == nil {
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
	c, err := Dial(t.Context(), path, Cookies{})
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
	for _, a := range []Actions{"", Resubmit(1), CT{Actions: Translate()}.Action(), CT{Actions: TranslateSource(netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), 1, 2)}.Action()} {
		if got := TranslatedTo(a); got.IsValid() {
			t.Errorf("%q translates the destination to %s", a, got)
		}
	}
}

// listed returns an entry of a listing of groups.
func listed(id uint32, buckets, properties []byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, uint16(16+len(buckets)+len(properties)))
	b = append(b, groupSelect, 0)
	b = binary.BigEndian.AppendUint32(b, id)
	b = binary.BigEndian.AppendUint16(b, uint16(len(buckets)))
	b = append(b, 0, 0, 0, 0, 0, 0)
	return append(append(b, buckets...), properties...)
}

// FuzzParsers checks that no message of a switch ends the process, and that the parsers
// read encoded groups correctly.
func FuzzParsers(f *testing.F) {
	m := Match{EtherType: IPv4, Destination: netip.MustParsePrefix("10.0.0.1/32"), Protocol: 6, Port: 80}
	f.Add(flowMod(flowAdd, &Flow{FlowKey: FlowKey{Match: m.Encode()}, Actions: ToGroup(1)}, 0).body)
	f.Add([]byte(m.Encode()))
	f.Add([]byte(CT{Commit: true, Actions: TranslateDestination(netip.MustParseAddr("fd00::1"), 80)}.Action()))
	bucket := Bucket{ID: 1, Weight: 7, Actions: ToGroup(2)}
	f.Add(listed(1, bucket.encode(), (&Group{Seed: 3}).selection()))
	f.Add(listed(1, bucket.encode(), (&Group{Seed: 3, ByClient: true}).selection()))
	f.Add(hello)
	f.Fuzz(func(t *testing.T, b []byte) {
		parseFlows(nil, b)
		supports(b, version)
		Destination(string(b))
		Register64(string(b), 0)
		parseGroupCounts(0, b)
		TranslatedTo(Actions(b))
		readMessage(strings.NewReader(string(b)))
		for range Numbers(Actions(b)) {
		}
		(&Conn{changed: make(chan struct{}, 1)}).noteChanges(b)
		g, err := parseGroup(b)
		if err != nil || g.Foreign {
			return
		}
		var encoded []byte
		for _, bucket := range g.Buckets {
			if len(bucket.Actions)%8 != 0 || len(bucket.Actions) > 1<<10 || len(g.Buckets) > 16 {
				return
			}
			encoded = append(encoded, bucket.encode()...)
		}
		again, err := parseGroup(listed(g.ID, encoded, g.selection()))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(g, again); diff != "" {
			t.Fatalf("the encoded group differs (-want +got):\n%s", diff)
		}
	})
}
